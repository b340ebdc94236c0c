"""`iep-bench`: measure the speed of the execution engine, and print schedules."""

import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from iep.bench.strategy import ALL, BEST, GROUPED, OPTIONS, PHASES, SHARING, Strategy, parse_strategies
from iep.cli.command import Command, CommandGroup
from iep.cli.options import (
    PATH,
    CommaList,
    DirectoryPath,
    all_of,
    device_options,
    device_settings,
    placement_options,
)
from iep.config import DTYPES, MODULES, WITH_ENGINE, Config, EngineConfig, read_config
from iep.errors import InputError
from iep.execution_engine.choices import SCENES, is_outside

SIZE = click.IntRange(1, 10**9)
SIZES, TRIPLE = CommaList(SIZE), (SIZE, SIZE, SIZE)
option = partial(click.option, show_default=True)


class RecordedCommand(Command):
    """A command that records its arguments for its report."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["command"] = f"{ctx.command_path} {shlex.join(args)}"
        return super().parse_args(ctx, args)


def batching(default: str, *options: str) -> Callable:
    """Return the option `--batching`, which lists strategies; `options` may be added to each."""

    def parse(ctx: click.Context, param: click.Parameter, value: str) -> list[Strategy]:
        try:
            return parse_strategies(value, options)
        except InputError as error:
            raise click.BadParameter(str(error)) from None

    what = "Comma-separated list of schedulers, each of which may be followed by + and an option of "
    what += f"{', '.join(options)}. all: every scheduler, and {BEST} with more and more options."
    return option("--batching", "strategies", callback=parse, default=default, help=what)


def choices(flag: str, name: str, known: tuple[str, ...], what: str) -> Callable:
    """Return an option for a comma-separated list of choices, which has all of them by default."""
    return option(flag, name, type=CommaList(click.Choice(known)), default=",".join(known), help=what)


out = option("--out", type=DirectoryPath(), help="Directory for a file of all values (JSON).")
seed = option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, help="Seed of all random numbers.")
threads = option("--threads", type=click.IntRange(1, 1024), help="Number of CPU threads.  [default: PyTorch's]")
phases = choices("--phase", "phases", PHASES, "train: forward pass, loss and backward pass; inference: forward pass.")
data = all_of(
    option("--data", type=PATH, help="Directory written by iep-preprocess."),
    option("--split", default="val", help="Split of --data."),
)


def measured(repeat: int, max_seconds: float = 10.0) -> Callable:
    """Return the options for the duration of measuring and for the output."""
    enough = "Seconds after which three rounds of a row are enough."
    return all_of(
        option("--repeat", type=click.IntRange(min=1), default=repeat, help="Number of rounds of measuring."),
        option("--max-seconds", type=click.FloatRange(min=0), default=max_seconds, help=enough),
        out,
    )


def run(ctx: click.Context, make: Callable, **given: Any) -> None:
    """Run the benchmark that `make` returns for the options of a command, and write its files."""
    import torch

    from iep.bench.compare import run_benchmark

    repeat, max_seconds, directory = (given.pop(name) for name in ("repeat", "max_seconds", "out"))
    if (count := given.pop("threads", None)) is not None:
        torch.set_num_threads(count)
    torch.manual_seed(given.get("seed", 0))  # of the weights
    assert ctx.info_name is not None
    run_benchmark(make(**given), repeat, max_seconds, ctx.meta["command"], ctx.info_name, directory)


@click.group("iep-bench", cls=CommandGroup)
def main() -> None:
    """Measure the execution engine, and print schedules.

    benchmarks/README.md in the repository explains the rows and columns of the tables. There, `python -m benchmarks`
    measures the data loader and other networks.
    """


@main.command(cls=RecordedCommand)
@option("--batch-sizes", type=SIZES, default="1,4,16,64,256,1024", help="Questions per minibatch.")
@batching(ALL, *OPTIONS, *GROUPED, *DTYPES)
@option("--questions-per-image", type=click.IntRange(1, 300), default=1, help="Generated questions per image.")
@option("--feature-shape", type=TRIPLE, metavar="C H W", default=(1024, 14, 14), help="Shape of generated features.")
@option("--config", "config_file", type=PATH, help="YAML file of settings, or the name of a config, such as mini/ee.")
@device_options
@option("--memory-format", type=click.Choice(["channels-first", "channels-last"]), help="Format of convolutions.")
@phases
@seed
@threads
@measured(10, 30.0)
@click.argument("settings", nargs=-1, metavar="[engine.KEY=VALUE]...")
@click.pass_context
def engine(ctx: click.Context, config_file: Path | None, settings: tuple[str, ...], **given: Any) -> None:
    """Measure the execution engine under every strategy, on generated questions and random features.

    The engine has its full size unless KEY=VALUE arguments (engine.module_dim=16) or --config say otherwise.
    """
    for setting in settings:
        if not setting.startswith("engine.") or "=" not in setting:
            raise InputError(f"{setting!r}: expected engine.key=value, such as engine.module_dim=16")
    config = trusted_config(config_file, settings).engine
    given |= device_settings(given)
    given |= {name: getattr(Config, name) for name in ("device", "placement", "devices") if given[name] is None}
    from iep.bench.measure_engine import engine_benchmark

    run(ctx, engine_benchmark, config=config, **given)


@main.command(cls=Command)
@option("--program", "programs", multiple=True, metavar="TOKENS", help="Program in prefix order; can be repeated.")
@data
@option("--num-samples", type=SIZE, default=8, help="Use the first N questions of --data.")
@option("--questions-per-image", type=SIZE, default=1, help="Number of given programs per image.")
@batching(f"{BEST}+{SHARING}", SHARING, "triton")
@option("--modules", metavar="|".join(MODULES), default=EngineConfig.modules, help="Set of modules, as iep-train's.")
@option("--scene", type=click.Choice(SCENES), default=EngineConfig.scene, help="What computes the scene.")
@placement_options
def plan(**given: Any) -> None:
    """Print which nodes of which programs run in which module call.

    For example: iep-bench plan --program "count filter_color[red] scene". A node is named
    example.token, where both numbers begin at 0.
    """
    if bool(given["programs"]) == (given["data"] is not None):
        raise click.UsageError("expected either --program or --data")
    from iep.bench.show_plans import show_plans

    given |= {name: getattr(Config, name) for name in ("placement", "devices") if given[name] is None}
    show_plans(**given)


def trusted_config(file: Path | None, settings: Sequence[str]) -> Config:
    """Return the settings of a file and of KEY=VALUE arguments, which alone may name modules of another package.

    Raises:
        InputError: the file names such modules, and the arguments do not, or the settings are invalid or are those of a
            model without an execution engine.
    """
    config = read_config(file, settings)
    if config.model not in WITH_ENGINE:
        raise InputError(f"{file}: has the settings of {config.model}, expected those of a model with an engine")
    modules = config.engine.modules
    if is_outside(modules) and not any(each.startswith("engine.modules=") for each in settings):
        what = f"its modules are {modules!r}, code of another package, which is executed only if you name it"
        raise InputError(f"{file}: {what}; if you trust it, give engine.modules={modules!r}")
    return config


if __name__ == "__main__":
    main()
