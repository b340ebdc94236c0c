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
    flat,
    given_names,
    given_settings,
    overridden,
    read_config,
    to_dict,
    to_yaml,
    update,
)
from iep.errors import InputError
from iep.runtime.locks import alone_in

if TYPE_CHECKING:
    from iep.models.checkpoint import Saved


@click.command(cls=Command)
@click.option(
    "--model",
    type=click.Choice(MODELS),
    help="What to train: program generator, execution engine, both jointly, or a baseline without programs.",
)
@click.option("--data", type=click.Path(path_type=Path), help="Directory that iep-preprocess wrote.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Run directory: config, checkpoints, metrics.",
)
@click.option("--config", "config_file", type=click.Path(path_type=Path, dir_okay=False), help="YAML file of settings.")
@click.option(
    "--pg",
    type=click.Path(path_type=Path),
    help="Checkpoint or run of a program generator to start from or predict with.",
)
@click.option("--ee", type=click.Path(path_type=Path), help="Checkpoint or run of an execution engine to start from.")
@click.option("--baseline", type=click.Path(path_type=Path), help="Checkpoint or run of a baseline to start from.")
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
    help="Go on from the run's newest checkpoint, if it has one, with its saved settings.",
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
    given = given_settings(config_file, settings, overrides)
    if dry_run:
        config, _ = _resolve(out, resume, given)
        click.echo(to_yaml(config), nl=False)
        return
    # Imported late: `--help` and `--dry-run` should not wait for torch.
    from iep.runtime.distributed import is_main, joined
    from iep.training.run_training import train_from, was_restarted

    with joined(), alone_in(out, "*") if is_main() else nullcontext():
        config, start = _resolve(out, resume or was_restarted(out), given)
        if is_main() and start is not None:
            _tell_changes(out, start, config)
        if resume and config.data is None and not (out / CONFIG).exists():
            raise InputError(
                f"{out}: holds no run to resume; for a new one give --data DIR, which iep-preprocess wrote"
            )
        trained = train_from(start, config, out, given_names(given))
        if is_main() and trained:
            click.echo(f"{out}: trained {config.model} to iteration {config.iterations}")
        elif is_main():
            click.echo(f"{out}: already trained to iteration {config.iterations} or further; nothing to do")


def _resolve(out: Path, resume: bool, given: Given) -> tuple[Config, "Saved | None"]:
    """The settings of the run, and the checkpoint that it goes on from if it is to and has one."""
    start, saved = _start(out) if resume else None, None
    if start is not None:
        saved = update(Config(), start.content["config"], source=str(start.path))
    elif resume and (out / CONFIG).exists():  # a run that has not come to its first checkpoint
        begun = to_dict(read_config(out / CONFIG))
        saved = update(Config(), {key: begun[key] for key in begun if key not in PLACES}, source=str(out / CONFIG))
    return overridden(saved or Config(), given), start


def _tell_changes(out: Path, start: "Saved", config: Config) -> None:
    """Say which settings, but for its length, a run goes on with that are not those of its checkpoint."""
    saved = update(Config(), start.content["config"], source=str(start.path))  # by an earlier version, perhaps
    before, now = (flat(to_dict(settings)) for settings in (saved, config))
    changes = [
        f"{key} {now[key]} instead of {before[key]}"
        for key in before
        if before[key] != now[key] and key != "iterations" and key not in PLACES
    ]
    if changes:
        click.echo(f"{out}: goes on with {', '.join(changes)}")


def _start(out: Path) -> "Saved | None":
    from iep.training.run_training import load_start

    return load_start(out)


if __name__ == "__main__":
    main()
