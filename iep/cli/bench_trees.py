"""`iep-bench tree-lstm`, `tree-fc` and `tagger`: networks whose shape is the sample's, batched in every way."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from iep.bench.strategy import parse_strategies
from iep.cli.options import CommaList, PicturePath, RecordedCommand, parsed

STRATEGIES = "height,agenda,lookahead,height+defer,agenda+defer,lookahead+defer"
PHASES = ("training", "inference")
ALL_CORES = "all"
MOST_THREADS, LARGEST = 1024, 10**9


class Threads(click.ParamType):
    """A number of threads, or `all` cores that this process may use."""

    name = "threads"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if value == ALL_CORES:
            return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return click.IntRange(1, MOST_THREADS).convert(value, param, ctx)


def measuring_options(command: Callable) -> Callable:
    """What to measure, how, and where to write: the options that these commands have in common."""
    command = run_options(command)
    command = click.option(
        "--per-instance/--no-per-instance",
        "with_per_instance",
        default=True,
        show_default=True,
        help="Also one sample after the other, which speed-ups are over.",
    )(command)
    return click.option(
        "--batching",
        default=STRATEGIES,
        show_default=True,
        help="Comma list of strategies: a scheduler, and with + what it runs with: sharing, defer.",
    )(command)


def run_options(command: Callable) -> Callable:
    """How to measure and where to write."""
    options = [
        click.option(
            "--phase",
            "phases",
            type=CommaList(click.Choice(PHASES)),
            default=",".join(PHASES),
            show_default=True,
            help="What a step is: forward, loss and backward; or forward.",
        ),
        click.option(
            "--threads", type=CommaList(Threads()), default="1,all", show_default=True, help="Of PyTorch; comma list."
        ),
        click.option("--repeat", type=click.IntRange(min=1), default=7, show_default=True, help="Rounds of measuring."),
        click.option(
            "--max-seconds",
            type=click.FloatRange(min=0),
            default=10.0,
            show_default=True,
            help="A strategy that was measured for so long, and three times, has had enough.",
        ),
        click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True),
        click.option("--json", type=click.Path(path_type=Path, dir_okay=False), help="File for all figures."),
        click.option(
            "--out", "table", type=click.Path(path_type=Path, dir_okay=False), help="File for the tables printed."
        ),
        click.option("--picture", type=PicturePath(), help="File to draw: .png, .svg or .pdf."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def sizes(name: str, default: str, what: str, least: int = 1) -> Callable:
    """An option that is a comma list of sizes."""
    each = CommaList(click.IntRange(least, LARGEST))
    return click.option(name, type=each, default=default, show_default=True, help=what)


def width(default: int) -> Callable:
    """The option --width."""
    size = click.IntRange(1, LARGEST)
    return click.option("--width", type=size, default=default, show_default=True, help="Hidden size.")


def words(default: int) -> Callable:
    """The option --words."""
    return click.option(
        "--words", type=click.IntRange(2, LARGEST), help=f"Of the vocabulary of what is made.  [default: {default}]"
    )


WORDS, TREE_FC_WORDS = 16_000, 1_000


@click.command("tree-lstm", cls=RecordedCommand)
@sizes("--batch-sizes", "1,4,16,64,256", "Trees a minibatch.")
@click.option(
    "--cell",
    type=click.Choice(["binary", "child-sum"]),
    default="binary",
    show_default=True,
    help="Binary, for sentiment, by vertex functions; or child-sum, for relatedness, by the lazy scope.",
)
@click.option("--width", type=click.IntRange(1, LARGEST), help="Hidden size.  [default: 256; of child-sum 150]")
@words(WORDS)
@click.option(
    "--sst", type=click.Path(path_type=Path, dir_okay=False), help="Bracketed trees for --cell binary; else made."
)
@click.option(
    "--sick", type=click.Path(path_type=Path, file_okay=False), help="Directory of pairs for child-sum; else made."
)
@measuring_options
@click.pass_context
def tree_lstm(ctx: click.Context, **options: Any) -> None:
    """Time a Tree-LSTM per instance, batched, by hand (binary), and its limits.

    What the columns mean: benchmarks/README.md.
    """
    cell = options.pop("cell")
    unused = {"binary": "sick", "child-sum": "sst"}[cell]
    if options.pop(unused) is not None:
        raise click.UsageError(f"--{unused} is not for --cell {cell}")
    options["words"] = _words(options, {"binary": "sst", "child-sum": "sick"}[cell])
    options["width"] = options["width"] or {"binary": 256, "child-sum": 150}[cell]
    if cell == "binary":
        from iep.bench.tree_lstm import binary_cases as make_cases
    else:
        from iep.bench.child_sum import child_sum_cases as make_cases
    _run(ctx, make_cases, "batch", options)


@click.command("tree-fc", cls=RecordedCommand)
@sizes("--leaves", "32,64,128,256,512,1024", "Of a tree.", least=2)
@click.option("--batch-size", type=click.IntRange(1, LARGEST), default=16, show_default=True, help="Trees a minibatch.")
@width(512)
@words(TREE_FC_WORDS)
@measuring_options
@click.pass_context
def tree_fc(ctx: click.Context, **options: Any) -> None:
    """Time Tree-FC, complete binary trees, per instance, batched, by hand, and its limits.

    What the columns mean: benchmarks/README.md.
    """
    options["words"] = options["words"] or TREE_FC_WORDS
    from iep.bench.tree_fc import tree_fc_cases

    _run(ctx, tree_fc_cases, "leaves", options)


@click.command(cls=RecordedCommand)
@sizes("--batch-sizes", "1,4,16,64", "Sentences a minibatch.")
@click.option("--characters/--no-characters", default=False, show_default=True, help="Spell rare words.")
@width(256)
@words(WORDS)
@click.option("--wikiner", type=click.Path(path_type=Path, dir_okay=False), help="Lines of word|POS|tag; else made.")
@measuring_options
@click.pass_context
def tagger(ctx: click.Context, **options: Any) -> None:
    """Time a BiLSTM tagger per instance, batched, by packed nn.LSTM, and its limits.

    What the columns mean: benchmarks/README.md.
    """
    options["words"] = _words(options, "wikiner")
    from iep.bench.tagger import tagger_cases

    _run(ctx, tagger_cases, "batch", options)


def _run(ctx: click.Context, make_cases: Callable[..., Any], over: str, options: dict[str, Any]) -> None:
    """Measure the cases that `make_cases` makes of the options that are not about measuring."""
    from iep.bench.measure import Effort
    from iep.bench.workload_run import Files, WorkloadBenchmark, run_workload_benchmark

    strategies = _strategies(options.pop("batching"))
    files = Files(*(options.pop(name) for name in ("json", "table", "picture")))
    effort = Effort(options.pop("repeat"), options.pop("max_seconds"))
    phases, threads, seed = (options.pop(name) for name in ("phases", "threads", "seed"))
    description, cases = make_cases(strategies=strategies, seed=seed, **options)
    benchmark = WorkloadBenchmark(description, phases, threads, effort, over, seed)
    with tqdm(unit=" measurements", leave=False, mininterval=1.0) as bar:

        def progress(what: str) -> None:
            bar.set_description_str(what, refresh=False)
            bar.update()

        run_workload_benchmark(benchmark, cases, ctx.meta["command"], files, say=bar.write, progress=progress)
    if files.wanted:
        click.echo(f"\nWrote {', '.join(map(str, files.wanted))}")


def _words(options: dict[str, Any], file: str) -> int:
    """How many words to make samples of; a file brings its own."""
    if options[file] is not None and options["words"] is not None:
        raise click.UsageError(f"--words is not for --{file}")
    return options["words"] or WORDS


def _strategies(text: str) -> Sequence[Any]:
    strategies = parsed("--batching", lambda: parse_strategies(text))
    for strategy in strategies:
        if strategy.precision != "float32":
            raise click.BadParameter(f"{strategy.name!r}: float32 alone is measured here", param_hint="--batching")
    return strategies
