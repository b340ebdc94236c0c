"""`iep-bench`: how fast the engine and other networks run under every schedule, schedules to look at, the loader."""

from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from iep.bench.strategy import ALL, BEST, PHASES, parse_strategies
from iep.cli.bench_moe import moe
from iep.cli.bench_trees import tagger, tree_fc, tree_lstm
from iep.cli.common import Command, Group
from iep.cli.options import CommaList, PicturePath, RecordedCommand, parsed, placement_options, where
from iep.config import BATCHING, MODULES, Config, EngineConfig, read_config
from iep.errors import InputError, nearest


@click.group(cls=Group)
def main() -> None:
    """Measure the batched execution engine, the data loader and other batched networks, and look at schedules."""


@main.command(cls=RecordedCommand)
@click.option(
    "--batch-sizes",
    type=CommaList(click.IntRange(min=1)),
    default="1,4,16,64,256,1024",
    show_default=True,
    help="Questions a minibatch.",
)
@click.option(
    "--batching",
    default=ALL,
    show_default=True,
    help="Comma list of strategies: a scheduler, and with + what it runs with: sharing, defer, bfloat16. 'all': every "
    f"scheduler, {BEST}+sharing and {BEST}+sharing+defer.",
)
@click.option("--sharing/--no-sharing", default=None, help="For every strategy, whatever its name says.")
@click.option(
    "--defer-weight-grads/--no-defer-weight-grads", "defer", default=None, help="For every strategy, likewise."
)
@click.option(
    "--precision",
    default="float32",
    show_default=True,
    help="Comma list: float32, bfloat16; for strategies that name none.",
)
@click.option(
    "--phase",
    "phases",
    type=CommaList(click.Choice(PHASES)),
    default="inference,train",
    show_default=True,
    help="What a step is: forward; or forward, loss and backward.",
)
@click.option("--data", type=click.Path(path_type=Path), help="Directory that iep-preprocess wrote; else data is made.")
@click.option("--split", help="Split of --data.  [default: val]")
@click.option("--questions-per-image", type=click.IntRange(1, 300), help="Of the data made.  [default: 1]")
@click.option(
    "--feature-shape",
    type=(click.IntRange(min=1), click.IntRange(min=1), click.IntRange(min=1)),
    metavar="C H W",
    help="Of the data made.  [default: 1024 14 14]",
)
@click.option("--config", "config_file", type=click.Path(path_type=Path, dir_okay=False), help="YAML: its engine part.")
@click.option("--modules", type=click.Choice(MODULES), help="engine.modules: residual blocks, or attentions.")
@click.option("--repeat", type=click.IntRange(min=1), default=10, show_default=True, help="Rounds of measuring.")
@click.option(
    "--max-seconds",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="A strategy that was measured for so long, and three times, has had enough.",
)
@click.option("--device", help=f"auto, cpu, cuda, cuda:1, ...  [default: {Config.device}]")
@placement_options
@click.option(
    "--memory-format",
    type=click.Choice(["channels-first", "channels-last"]),
    help="Of convolutions.  [default: channels-last on a CPU, channels-first elsewhere]",
)
@click.option("--threads", type=click.IntRange(min=1), help="Of a CPU.  [default: PyTorch's choice]")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for engine.json, engine.txt and engine.png.",
)
@click.argument("settings", nargs=-1, metavar="[engine.KEY=VALUE]...")
@click.pass_context
def engine(
    ctx: click.Context,
    batching: str,
    sharing: bool | None,
    defer: bool | None,
    precision: str,
    repeat: int,
    max_seconds: float,
    config_file: Path | None,
    settings: tuple[str, ...],
    out: Path | None,
    modules: str | None,
    **options: Any,
) -> None:
    """Time the execution engine under every strategy, and its limit.

    The engine has its full size unless KEY=VALUE arguments (engine.module_dim=16) or --config say otherwise. The
    strategies take turns; figures are medians. `limit` rows are the same module applications with every function run
    in one call, whatever waits on what. What the columns mean: benchmarks/README.md.
    """
    given = {name: value for name, value in (options | where(options)).items() if value is not None}
    _refuse_together(given, "data", ("questions_per_image", "feature_shape"))
    _refuse_without(given, "data", ("split",))
    parsed("--precision", lambda: parse_strategies(ALL, precisions=precision))
    strategies = parsed("--batching", lambda: parse_strategies(batching, sharing, defer, precision))
    overrides = {"engine": {"modules": modules}} if modules else {}
    size = read_config(config_file, map(_engine_setting, settings), overrides).engine
    # Imported late: `--help` should not wait for torch.
    from iep.bench.measure import Effort
    from iep.bench.run import EngineBenchmark, run_engine_benchmark

    with tqdm(unit=" measurements", leave=False, mininterval=1.0) as bar:

        def progress(what: str) -> None:
            bar.set_description_str(what, refresh=False)
            bar.update()

        run_engine_benchmark(
            EngineBenchmark(tuple(strategies), effort=Effort(repeat, max_seconds), engine=size, **given),
            ctx.meta["command"],
            out,
            say=bar.write,
            progress=progress,
        )
    if out is not None:
        click.echo(f"\nWrote {out / 'engine.json'}, {out / 'engine.txt'} and {out / 'engine.png'}")


@main.command(cls=Command)
@click.option(
    "--program",
    "programs",
    multiple=True,
    metavar="TOKENS",
    help='A program in prefix order, such as "count filter_color[red] scene"; may be given several times.',
)
@click.option("--data", type=click.Path(path_type=Path), help="Directory that iep-preprocess wrote.")
@click.option("--split", help="Split of --data.  [default: val]")
@click.option("--num-samples", type=click.IntRange(min=1), help="The first N questions of --data.  [default: 8]")
@click.option(
    "--questions-per-image",
    type=click.IntRange(min=1),
    help="So many programs of --program ask about one image.  [default: 1]",
)
@click.option("--batching", default=BEST, show_default=True, help="Comma list of schedulers, or all.")
@click.option("--sharing/--no-sharing", default=True, show_default=True, help="Run what is equal once.")
@click.option(
    "--modules",
    type=click.Choice(MODULES),
    default=EngineConfig.modules,
    show_default=True,
    help="Family of modules: residual blocks, or attentions.",
)
@click.option(
    "--scene",
    type=click.Choice(["module", "stem"]),
    default=EngineConfig.scene,
    show_default=True,
    help="Whether scene is a module or the stem's output.",
)
@placement_options
@click.option("--out", type=PicturePath(), help="Picture to write: .png, .svg or .pdf.")
def plan(batching: str, out: Path | None, **options: Any) -> None:
    """Show which nodes of which programs run in which module call.

    A node is named example.token, both from 0.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if not given["programs"] and "data" not in given:
        raise click.UsageError("nothing to plan: give --program or --data")
    if given["programs"]:
        _refuse_together(given, "programs", ("split", "num_samples"))
    else:
        _refuse_together(given, "data", ("questions_per_image",))
    from iep.bench.plan import PlanRequest, show_plans

    show_plans(PlanRequest(_schedulers(batching), **given), out, say=click.echo)


@main.command(cls=RecordedCommand)
@click.option("--data", type=click.Path(path_type=Path), help="Directory that iep-preprocess wrote; else data is made.")
@click.option("--split", help="Split of --data.  [default: val]")
@click.option(
    "--images",
    type=click.IntRange(min=1),
    help="Of the data made: float16 (1024, 14, 14) features, 0.4 GB a thousand, removed at the end.  [default: 10000]",
)
@click.option(
    "--features",
    "sources",
    type=CommaList(click.Choice(["cold", "warm", "memory"])),
    default="cold,warm,memory",
    show_default=True,
    help="Where features are: on the disk, in the system's cache of the file, in shared memory.",
)
@click.option(
    "--order",
    "orders",
    type=CommaList(click.Choice(["image", "random"])),
    default="image,random",
    show_default=True,
    help="All questions image by image, or one of each image at random.",
)
@click.option(
    "--plans",
    "planning",
    type=click.Choice(["without", "with", "both"]),
    default="both",
    show_default=True,
    help="Whether workers make the engine's plans too.",
)
@click.option("--workers", type=CommaList(click.IntRange(min=0)), default="1,2", show_default=True, help="Comma list.")
@click.option(
    "--prefetch", type=click.IntRange(min=1), help=f"Batches a worker makes ahead.  [default: {Config.prefetch}]"
)
@click.option("--batch-size", type=click.IntRange(min=1), help="Questions a batch.  [default: 256]")
@click.option("--repeat", type=click.IntRange(min=1), help="Rounds of measuring.  [default: 3]")
@click.option(
    "--max-seconds", type=click.FloatRange(min=0), help="After which a pass ends, if not before.  [default: 20]"
)
@click.option("--device", help="To which batches are brought.  [default: cpu]")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="[default: 0]")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for loader.json and loader.txt, and, meanwhile, the data made.",
)
@click.pass_context
def loader(ctx: click.Context, planning: str, out: Path | None, **options: Any) -> None:
    """Time the data loader alone: questions and bytes a second, without any network.

    What the columns mean: benchmarks/README.md.
    """
    given = {name: value for name, value in options.items() if value is not None}
    _refuse_together(given, "data", ("images",))
    _refuse_without(given, "data", ("split",))
    from iep.bench.loader_run import REPORT, TABLE, LoaderBenchmark, run_loader_benchmark

    plans = {"without": (False,), "with": (True,), "both": (False, True)}[planning]
    with tqdm(unit=" measurements", leave=False, mininterval=1.0) as bar:

        def progress(what: str) -> None:
            bar.set_description_str(what, refresh=False)
            bar.update()

        benchmark = LoaderBenchmark(planning=plans, **given)
        run_loader_benchmark(benchmark, ctx.meta["command"], out, say=bar.write, progress=progress)
    if out is not None:
        click.echo(f"\nWrote {out / REPORT} and {out / TABLE}")


@main.command(cls=RecordedCommand)
@click.option("--data", type=click.Path(path_type=Path), required=True, help="Directory that iep-preprocess wrote.")
@click.option(
    "--config", type=click.Path(path_type=Path, dir_okay=False, exists=True), required=True, help="What to train: YAML."
)
@click.option(
    "--processes", type=CommaList(click.IntRange(min=1)), help="How many, on this machine; comma list.  [default: 1,2]"
)
@click.option("--iterations", type=click.IntRange(min=2), help="Of each run.  [default: 100]")
@click.option("--repeat", type=click.IntRange(min=1), help="Runs of each.  [default: 3]")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Directory for processes.json and processes.txt."
)
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.pass_context
def processes(ctx: click.Context, out: Path | None, **options: Any) -> None:
    """Time training by one process and by several, and compare their losses."""
    given = {name: value for name, value in options.items() if value is not None}
    from iep.bench.processes import REPORT, TABLE, ProcessesBenchmark, run_processes_benchmark

    with tqdm(unit=" runs", leave=False, mininterval=1.0) as bar:

        def progress(what: str) -> None:
            bar.set_description_str(what)
            bar.update()

        benchmark = ProcessesBenchmark(**given)
        run_processes_benchmark(benchmark, ctx.meta["command"], out, say=bar.write, progress=progress)
    if out is not None:
        click.echo(f"\nWrote {out / REPORT} and {out / TABLE}")


for command in (moe, tree_lstm, tree_fc, tagger):
    main.add_command(command)


def _schedulers(text: str) -> tuple[str, ...]:
    items = [name.strip() for name in text.split(",")]
    names = tuple(dict.fromkeys(name for item in items for name in (BATCHING if item == ALL else [item])))
    for name in names:
        if name not in BATCHING:
            raise click.BadParameter(
                f"{name!r} is no scheduler, expected {ALL} or some of {', '.join(BATCHING)}{nearest(name, BATCHING)}",
                param_hint="--batching",
            )
    return names


def _engine_setting(assignment: str) -> str:
    if not assignment.startswith("engine.") or "=" not in assignment:
        raise InputError(f"{assignment!r}: expected engine.key=value, such as engine.module_dim=16")
    return assignment


def _refuse_together(given: dict[str, Any], one: str, others: tuple[str, ...]) -> None:
    for other in others:
        if one in given and other in given:
            raise click.UsageError(f"{_flag(other)} is not for {_flag(one)}")


def _refuse_without(given: dict[str, Any], one: str, others: tuple[str, ...]) -> None:
    for other in others:
        if one not in given and other in given:
            raise click.UsageError(f"{_flag(other)} is for {_flag(one)}")


def _flag(name: str) -> str:
    return {"programs": "--program"}.get(name, f"--{name.replace('_', '-')}")


if __name__ == "__main__":
    main()
