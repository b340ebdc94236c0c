"""`iep-train`: preprocessed data in, a run directory with checkpoints out."""

from pathlib import Path
from typing import Any

import click

from iep.cli.common import Command
from iep.config import BATCHING, MODELS, PRECISIONS, PROGRAM_SOURCES, Config, read_config, to_yaml, update


@click.command(cls=Command)
@click.option(
    "--model",
    type=click.Choice(MODELS),
    help="What to train: program generator, execution engine, both jointly, or the question-only LSTM.",
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
@click.option("--programs", type=click.Choice(PROGRAM_SOURCES), help="Programs that the engine is trained on.")
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
@click.option("--precision", type=click.Choice(PRECISIONS), help="What the networks compute in; weights stay float32.")
@click.option("--num-train-samples", type=click.IntRange(min=1), help="Train on the first N questions only.")
@click.option("--num-val-samples", type=click.IntRange(min=1), help="Validate on the first N questions only.")
@click.option("--freeze", type=click.Choice(["generator", "engine"]), help="Part that joint training leaves as it is.")
@click.option("--device", type=str, help="auto, cpu, cuda, cuda:1, ...")
@click.option(
    "--resume",
    is_flag=True,
    help="Go on from the run's last checkpoint, if it has one, with its saved settings.",
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
    # Imported late: `--help` and `--dry-run` should not wait for torch.
    overrides = {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}
    config = read_config(config_file, settings, overrides, base=_saved_config(out) if resume else None)
    if dry_run:
        click.echo(to_yaml(config), nl=False)
        return
    from iep.training.run import train

    if train(config, out, resume):
        click.echo(f"{out}: trained {config.model} to iteration {config.iterations}")
    else:
        click.echo(f"{out}: already trained to iteration {config.iterations} or further; nothing to do")


def _saved_config(out: Path) -> Config | None:
    """The settings of the run in `out`, if it has got as far as a checkpoint."""
    from iep.training.checkpoint import LAST, PARTS_OF_A_RUN, load_checkpoint

    if not (out / LAST).exists():
        return None
    return update(Config(), load_checkpoint(out / LAST, PARTS_OF_A_RUN)["config"], source=str(out / LAST))


if __name__ == "__main__":
    main()
