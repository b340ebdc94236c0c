"""`iep-train`: preprocessed data in, a run directory with checkpoints out."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from iep.cli.command import Command
from iep.cli.options import CommaList, families_option, placement_options, where
from iep.config import (
    BATCHING,
    CONFIG,
    MODELS,
    MODULES,
    PLACES,
    PRECISIONS,
    PROGRAM_SOURCES,
    Config,
    Given,
    absolute,
    check_used,
    find_config,
    given_settings,
    only_used,
    overridden,
    read_config,
    to_yaml,
    update,
)
from iep.errors import InputError
from iep.runtime.locks import alone_in

if TYPE_CHECKING:
    from iep.models.checkpoint import Saved


FILE = click.Path(path_type=Path)


@click.command(cls=Command)
@click.option(
    "--model",
    type=click.Choice(MODELS),
    help="What to train: program generator, execution engine, both jointly, or a baseline without programs.",
)
@click.option("--data", type=FILE, help="Directory that iep-preprocess wrote.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Run directory: config, checkpoints, metrics.",
)
@click.option(
    "--config",
    "config_file",
    type=FILE,
    help="YAML file of settings, or the name of a config of this package, such as mini/pg.",
)
@click.option("--pg", type=FILE, help="Checkpoint or run of a program generator to start from or predict with.")
@click.option("--ee", type=FILE, help="Checkpoint or run of an execution engine to start from.")
@click.option("--baseline", type=FILE, help="Checkpoint or run of a baseline to start from.")
@click.option("--programs", type=click.Choice(PROGRAM_SOURCES), help="Programs that the engine is trained on.")
@click.option(
    "--modules",
    type=click.Choice(MODULES),
    help="Set of modules of a new engine (engine.modules): residual blocks, or Transparency by Design's attentions.  "
    "[default: iep]",
)
@click.option("--batching", type=click.Choice(BATCHING), help="Scheduler of the module calls.")
@click.option(
    "--sharing/--no-sharing",
    default=None,
    help="Run each image's stem, and equal subtrees over one image, once a step.  [default: where it is exact]",
)
@click.option(
    "--defer-weight-grads/--no-defer-weight-grads",
    default=None,
    help="Compute the gradient of each module's weights once a step, over all its calls.",
)
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    help="The dtype of computation; weights and the program generator stay in float32.",
)
@families_option
@click.option("--num-train-samples", type=click.IntRange(min=1), help="Train on the first N questions only.")
@click.option("--num-val-samples", type=click.IntRange(min=1), help="Validate on the first N questions only.")
@click.option(
    "--freeze",
    type=CommaList(click.STRING),
    metavar="PART[,PART...]",
    help="Parts that training leaves as they are. joint: generator, engine; pg: encoder, decoder; ee: stem, modules, "
    "classifier; lstm: rnn, classifier; cnn-lstm: rnn, cnn, classifier; cnn-lstm-sa: rnn, cnn, attention, classifier.",
)
@click.option(
    "--features-in-memory/--no-features-in-memory",
    default=None,
    help="Read all features into memory at the start, once for all processes of a machine.",
)
@click.option("--device", type=str, help="auto, cpu, cuda, cuda:1, ...")
@placement_options
@click.option("--keep", type=click.IntRange(min=1), help="How many of the newest checkpoints stay, besides the best.")
@click.option(
    "--resume",
    is_flag=True,
    help="Resume from the run's newest checkpoint, if it has one, with its saved settings. Settings that are given "
    "again replace them where they may change during a run; --data names data that were moved.",
)
@click.option("--dry-run", is_flag=True, help="Print the resolved settings and stop.")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
def main(
    out: Path,
    config_file: Path | None,
    resume: bool,
    dry_run: bool,
    settings: tuple[str, ...],
    **options: Any,
) -> None:
    """Train a model on preprocessed CLEVR.

    Settings come from the defaults, then --config, then KEY=VALUE arguments (nested ones with a dot:
    engine.module_dim=64), then options. `--dry-run` prints all of them.
    """
    modules = options.pop("modules")
    options |= where(options)
    overrides = {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}
    if modules is not None:
        overrides["engine"] = {"modules": modules}
    file = None if config_file is None else find_config(config_file)
    given = given_settings(file, settings, overrides)
    if dry_run:
        config, _ = _resolve(out, resume, given, file)
        click.echo(to_yaml(config), nl=False)
        return
    # Imported late: `--help` and `--dry-run` should not wait for torch.
    from iep.runtime.distributed import is_main, joined
    from iep.training.run_training import train_from, was_restarted

    with joined(), alone_in(out, "*") if is_main() else nullcontext():
        config, start = _resolve(out, resume or was_restarted(out), given, file)
        if resume and config.data is None and not (out / CONFIG).exists():
            raise InputError(
                f"{out}: holds no run to resume; for a new one give --data DIR, which iep-preprocess wrote"
            )
        file_settings = {name: value for source, name, value in given if source == str(file)}
        trainer = train_from(start, config, out, {name for _, name, _ in given}, file and file_settings)
        if is_main() and trainer is not None:
            done = f"trained {config.model} to iteration {config.iterations}"
            click.echo(f"{out}: {done}; {trainer.describe_best()}")
        elif is_main():
            click.echo(f"{out}: already trained to iteration {config.iterations} or further; nothing to do")


def _resolve(out: Path, resume: bool, given: Given, file: Path | None) -> tuple[Config, "Saved | None"]:
    """Return the settings of the run, and the checkpoint that it resumes from if it is to and has one.

    Raises:
        InputError: a setting is invalid or not used by the model, or the checkpoint is one of another run.
    """
    start, base = None, Config()
    if resume:
        from iep.training.run_training import GIVEN, changes, config_of, load_start

        start = load_start(out)
        begun = absolute(only_used(read_config(out / CONFIG))) if (out / CONFIG).exists() else None
        if start is not None:
            base = config_of(start)
            if begun is not None:
                changes(start, begun)
        elif begun is not None:  # a run that has not come to its first checkpoint
            base = update(begun, {key: getattr(Config, key) for key in PLACES}, str(out / CONFIG))
        # What the file said already when the run was started is not new: other settings may have replaced it since.
        before = given_settings(out / GIVEN) if (out / GIVEN).exists() else []
        said = [(name, value) for _, name, value in before]
        given = [each for each in given if each[0] != str(file) or each[1:] not in said]
    config = absolute(overridden(base, given))
    check_used(config, {name for _, name, _ in given})
    return config, start


if __name__ == "__main__":
    main()
