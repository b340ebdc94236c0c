"""`iep-train`: train a model on preprocessed data, and write checkpoints into a run directory."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from iep.cli.command import Command
from iep.cli.options import (
    PATH,
    CommaList,
    DirectoryPath,
    UpdateFrequency,
    device_settings,
    execution_options,
    network_options,
)
from iep.config import (
    CONFIG,
    MODELS,
    MODULES,
    PLACES,
    PROGRAM_SOURCES,
    Config,
    Given,
    absolute,
    find_config,
    given_settings,
    only_used,
    overridden,
    saved_config,
    to_yaml,
)
from iep.errors import InputError
from iep.execution_engine.choices import check_named
from iep.runtime.locks import alone_in
from iep.runtime.reading import read_yaml

if TYPE_CHECKING:
    from iep.models.checkpoint import Checkpoint

SECTIONS = {
    "Model and data": [
        "model",
        "data",
        "out",
        "config_file",
        "pg",
        "ee",
        "baseline",
        "programs",
        "modules",
        "families",
    ],
    "Training": ["num_train_samples", "freeze", "resume", "dry_run", "help_settings"],
    "Engine": ["batching", "sharing", "execution", "precision", "features_in_memory"],
    "Devices": ["device", "placement", "devices"],
    "Asynchronous training": ["asynchronous", "num_threads", "max_active_keys", "min_update_frequency"],
}


def print_settings(ctx: click.Context, param: click.Parameter, model: str | None) -> None:
    """Print all settings, or those of a model, and exit."""
    if model is not None and not ctx.resilient_parsing:
        if model not in ("all", *MODELS):
            raise click.BadParameter(f"{model!r} is not one of {', '.join(MODELS)}")
        from iep.cli.settings import as_text

        click.echo(as_text(None if model == "all" else model))
        ctx.exit()


@click.command(cls=Command, sections=SECTIONS)
@click.option(
    "--model",
    type=click.Choice(MODELS),
    help="Model to train: the program generator, the execution engine, both jointly, a baseline without programs, "
    f"or a backbone.  [default: {Config.model}]",
)
@click.option(
    "--data",
    type=PATH,
    help="Directory written by iep-preprocess; for a backbone, a directory in CLEVR's layout with images and scenes.",
)
@click.option("--out", type=DirectoryPath(), help="Run directory for settings, checkpoints and metrics.  [required]")
@click.option(
    "--config",
    "config_file",
    type=PATH,
    help="YAML file of settings, or the name of a config that comes with this package, such as mini/pg.",
)
@network_options
@click.option(
    "--programs",
    type=click.Choice(PROGRAM_SOURCES),
    help=f"Programs to train the engine on.  [default: {Config.programs}]",
)
@click.option(
    "--modules",
    metavar="|".join(MODULES),
    help="Set of modules of a new engine (engine.modules): the residual blocks of iep, the attention modules of "
    "Transparency by Design (tbd), those with vectors in place of maps (pooled), Vector-NMN (vector), or a class of "
    "another package, which has to be named for each command that uses the engine, with --resume too.  "
    f"[default: {Config.engine.modules}]",
)
@execution_options
@click.option(
    "--asynchronous/--no-asynchronous",
    default=None,
    help="Train the engine asynchronously: workers run and update their parts by themselves, with several instances, "
    "small minibatches of instance_size questions, in flight (AMPNet, Gaunt et al. 2017).",
)
@click.option(
    "--threads",
    "num_threads",
    type=click.IntRange(2, 64),
    help="Asynchronous: number of threads on the CPU, on which --placement places the parts (balanced, unless it is "
    "given). For workers on other devices, give --placement and --devices.",
)
@click.option(
    "--max-active-keys",
    type=click.IntRange(min=1),
    help=f"Asynchronous: largest number of instances in flight.  [default: {Config.max_active_keys}]",
)
@click.option(
    "--min-update-frequency",
    type=UpdateFrequency(),
    help="Asynchronous: number of calls after which a part is updated; auto is the number that it has in a minibatch.  "
    "[default: auto]",
)
@click.option("--num-train-samples", type=click.IntRange(min=1), help="Train only on the first N questions.")
@click.option(
    "--freeze",
    type=CommaList(click.STRING),
    metavar="PART[,PART...]",
    help="Parts of the model that training does not change. joint: generator, engine; pg: encoder, decoder; ee: stem, "
    "modules, classifier; lstm: rnn, classifier; cnn-lstm: rnn, cnn, classifier; cnn-lstm-sa: rnn, cnn, attention, "
    "classifier; backbone: trunk, head.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Resume from the run's newest checkpoint, if there is one, with its saved settings. Settings that are given "
    "again replace the saved ones if they may change during a run. If the data have been moved, give --data.",
)
@click.option("--dry-run", is_flag=True, help="Print the settings that would be used, and exit; needs no --out.")
@click.option(
    "--help-settings",
    metavar="[MODEL]",
    is_flag=False,
    flag_value="all",
    expose_value=False,
    is_eager=True,
    callback=print_settings,
    help="Print all settings, or those of a model, with types, defaults and meanings, and exit.",
)
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
def main(
    out: Path | None,
    config_file: Path | None,
    resume: bool,
    dry_run: bool,
    num_threads: int | None,
    settings: tuple[str, ...],
    **options: Any,
) -> None:
    """Train a model on preprocessed CLEVR, or a backbone on images with scenes.

    Settings are taken from the defaults, from --config, from KEY=VALUE arguments (with a dot for nested settings:
    engine.module_dim=64), and from options; each of these overrides those before it. Most often changed are iterations,
    batch_size, learning_rate, warmup, decay, curriculum, validate_every, features_in_memory, engine.module_dim and
    engine.modules; --help-settings prints all.

    --pg, --ee and --baseline are the networks to start from. With --programs predicted, --pg predicts the programs that
    the engine is trained on.
    """
    if out is None:
        if resume or not dry_run:
            raise click.UsageError("Missing option '--out'.")
        out = Path()  # a dry run of a new run does not read it
    modules = options.pop("modules")
    if num_threads is not None:
        if options["devices"] is not None or options["device"] is not None:
            raise click.UsageError("--threads places the parts on the CPU; it cannot go together with --device[s]")
        options |= {"devices": ("cpu",) * num_threads, "placement": options["placement"] or "balanced"}
    options |= device_settings(options)
    overrides = {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}
    if modules is not None:
        overrides["engine"] = {"modules": modules}
    file = None if config_file is None else find_config(config_file)
    given = given_settings(file, settings, overrides)
    names = {name for _, name, _ in given}
    # Imported late: `--help` should not wait for torch.
    from iep.runtime.distributed import is_main, joined
    from iep.training.run_training import check_settings, load_start, train_from

    with joined(), nullcontext() if dry_run or not is_main() else alone_in(out):
        start = load_start(out) if resume else None
        config = _resolve(out if resume else None, start, given, file)
        if num_threads is not None and not config.asynchronous:
            raise click.UsageError("--threads is for --asynchronous")
        if dry_run:
            check_settings(start, config, names)
            click.echo(to_yaml(replace(config, learning_rate=config.peak_learning_rate)), nl=False)
            return
        if resume and config.data is None and not (out / CONFIG).exists():
            raise InputError(f"{out}: holds no run to resume; to start one, give --data DIR")
        trainer = train_from(start, config, out, names)
        if is_main() and trainer is not None:
            done = f"trained {config.model} to iteration {config.iterations}"
            click.echo(f"{out}: {done}; {trainer.describe_best()}")
        elif is_main():
            click.echo(f"{out}: already trained to iteration {config.iterations} or further; nothing to do")


def _resolve(out: Path | None, start: "Checkpoint | None", given: Given, file: Path | None) -> Config:
    """Return the given settings over those of the run to resume, or over the defaults.

    Args:
        out: the directory of the run to resume, None for a new run. Its `config.yaml` has the settings of a run that
            was stopped before its first checkpoint.
        start: the checkpoint to resume from, if there is one.
        file: the file of settings among the given ones.

    Raises:
        InputError: a setting is invalid, or a file names modules of another package that the command does not name.
    """
    base = begun = Config()
    if out is not None and (out / CONFIG).exists():
        base = begun = saved_config(read_yaml(out / CONFIG), str(out / CONFIG))
    if start is not None:
        base = saved_config(start.state.config, str(start.path))
    is_asynchronous = overridden(base, given).asynchronous
    # Unlike other devices, the workers of asynchronous training on the CPU exist on every machine.
    places = begun if is_asynchronous and {*begun.devices} == {"cpu"} else Config()
    # Settings that only the other way to train uses are dropped if a resumed run changes to it.
    changed = {name: getattr(places, name) for name in PLACES} | {"asynchronous": is_asynchronous}
    config = absolute(overridden(only_used(replace(base, **changed)), given))
    named = {name: value for source, name, value in given if source != str(file)}.get("engine.modules")
    check_named(config.engine.modules, named, file or out)
    return config


if __name__ == "__main__":
    main()
