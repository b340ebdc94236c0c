"""`iep-bench`: how fast the engine, other networks, the loader and several processes run, and schedules to look at."""

import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from tqdm import tqdm

from iep.bench.strategy import ALL, BEST, DEFER, PHASES, SHARING, parse_schedulers, parse_strategies
from iep.cli.common import Command, Group
from iep.cli.options import CommaList, RecordedCommand, placement_options, where
from iep.config import MODULES, Config, EngineConfig, read_config
from iep.errors import InputError

STRATEGIES = "height,agenda,lookahead,height+defer,agenda+defer,lookahead+defer"
SIZE, DATA = click.IntRange(1, 10**9), click.Path(path_type=Path)
SIZES, TRIPLE = CommaList(SIZE), (SIZE, SIZE, SIZE)
FILE, DIRECTORY = click.Path(path_type=Path, dir_okay=False), click.Path(path_type=Path, file_okay=False)
ENGINE_STRATEGIES = f"""Schedulers, with + what they run with: sharing, defer, families, bfloat16. 'all': every one,
{BEST}+sharing and {BEST}+sharing+defer."""
option = partial(click.option, show_default=True)


class Parsed(click.ParamType):
    """What `parse` makes of a text; what it refuses is a usage error."""

    name = "list"

    def __init__(self, parse: Callable[[str], Any]):
        self.parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.parse(value)
        except InputError as error:
            self.fail(str(error), param, ctx)


def parse_threads(text: str) -> tuple[int, ...]:
    """Return the numbers of threads of a comma list; `all` is as many as there are cores that this process may use.

    Raises:
        InputError: a number is none, or not in the range from 1 to 1024.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    items = [item.strip() for item in text.split(",")]
    for item in items:
        if item != ALL and not (item.isdecimal() and 1 <= int(item) <= 1024):
            raise InputError(f"{item!r} is not in the range from 1 to 1024, and not {ALL}")
    return tuple(dict.fromkeys(cores if item == ALL else int(item) for item in items))


def choices(flag: str, name: str, known: tuple[str, ...], what: str) -> Callable:
    """Return an option that is a comma list of choices, all of them unless given."""
    return option(flag, name, type=CommaList(click.Choice(known)), default=",".join(known), help=what)


def all_of(*added: Callable) -> Callable:
    """Return a decorator that adds options in the order given."""
    return lambda command: all_of(*added[:-1])(added[-1](command)) if added else command


def measured(repeat: int, max_seconds: float = 10.0, of: str = "Rounds of measuring.") -> Callable:
    """Return the options of how long to measure and where to write."""
    enough = "After so many, what was measured three times is not measured again."
    return all_of(
        option("--repeat", type=click.IntRange(min=1), default=repeat, help=of),
        option("--max-seconds", type=click.FloatRange(min=0), default=max_seconds, help=enough),
        option("--out", type=DIRECTORY, help="Directory for the tables, all figures (JSON) and a picture."),
    )


def seeded() -> Callable:
    """Return the option --seed."""
    return option("--seed", type=click.IntRange(0, 2**32 - 1), default=0)


def computed(threads: str = "1,all") -> Callable:
    """Return the options of what a step is and what it runs on."""
    return all_of(
        choices("--phase", "phases", PHASES, "What a step is: forward, loss and backward; or forward."),
        option("--threads", type=Parsed(parse_threads), default=threads, help="Of PyTorch on a CPU; comma list."),
        seeded(),
    )


def network(words: int) -> Callable:
    """Return the options that networks of trees and of sentences have in common."""
    some, what = Parsed(partial(parse_strategies, options=(SHARING, DEFER))), "Schedulers, with + sharing and defer."
    return all_of(
        option("--words", type=click.IntRange(2, 10**9), default=words, help="Of the vocabulary of what is made."),
        option("--batching", "strategies", type=some, default=STRATEGIES, help=f"Comma list. {what}"),
        computed(),
        measured(7),
    )


def run(ctx: click.Context, repeat: int, max_seconds: float, out: Path | None, **given: Any) -> None:
    """Measure the benchmark that the module of the command's name makes of the options, and write its files."""
    # Imported late: `--help` should not wait for torch.
    from iep.bench.compare import Effort
    from iep.bench.report import result_files, run_benchmark

    files, effort = result_files(out, ctx.info_name), Effort(repeat, max_seconds)
    name = ctx.info_name.replace("-", "_")
    make = getattr(import_module(f"iep.bench.{name}"), f"{name}_benchmark")
    with tqdm(unit=" measurements", leave=False, mininterval=1.0) as bar:

        def progress(what: str) -> None:
            bar.set_description_str(what, refresh=False)
            bar.update()

        run_benchmark(make(**given), effort, ctx.meta["command"], files, bar.write, progress)
    if files:
        click.echo(f"\nWrote {', '.join(map(str, files))}")


def refuse(ctx: click.Context, names: tuple[str, ...], beside: str | None = None, without: str | None = None) -> None:
    """Refuse options given beside another one, or without it.

    Raises:
        click.UsageError: names the first.
    """
    flags = {each.name: each.opts[0] for each in ctx.command.params}
    given = {name for name in flags if ctx.get_parameter_source(name) != ParameterSource.DEFAULT}
    for name in names:
        if name in given and beside in given:
            raise click.UsageError(f"{flags[name]} is not for {flags[beside]}")
        if name in given and without is not None and without not in given:
            raise click.UsageError(f"{flags[name]} is for {flags[without]}")


@click.group(cls=Group)
def main() -> None:
    """Measure the batched execution engine, the data loader and other batched networks, and look at schedules.

    What the rows and columns of the tables mean: benchmarks/README.md.
    """


@main.command(cls=RecordedCommand)
@option("--batch-sizes", type=SIZES, default="1,4,16,64,256,1024", help="Questions a minibatch.")
@option("--batching", "strategies", type=Parsed(parse_strategies), default=ALL, help=f"Comma list. {ENGINE_STRATEGIES}")
@option("--data", type=DATA, help="Directory that iep-preprocess wrote; else data is made.")
@option("--split", default="val", help="Split of --data.")
@option("--questions-per-image", type=click.IntRange(1, 300), default=1, help="Of the data made.")
@option("--feature-shape", type=TRIPLE, metavar="C H W", default=(1024, 14, 14), help="Of the data made.")
@option("--config", "config_file", type=FILE, help="YAML: its engine part.")
@option("--modules", type=click.Choice(MODULES), help="engine.modules: residual blocks, or attentions.")
@option("--device", help=f"auto, cpu, cuda, cuda:1, ...  [default: {Config.device}]")
@placement_options
@option("--memory-format", type=click.Choice(["channels-first", "channels-last"]), help="Of convolutions; else that of training.")
@computed(threads=ALL)
@measured(10, 30.0)
@click.argument("settings", nargs=-1, metavar="[engine.KEY=VALUE]...")
@click.pass_context
def engine(
    ctx: click.Context,
    config_file: Path | None,
    settings: tuple[str, ...],
    modules: str | None,
    **given: Any,
) -> None:
    """Time the execution engine under every strategy, and its limit.

    The engine has its full size unless KEY=VALUE arguments (engine.module_dim=16) or --config say otherwise.
    """
    refuse(ctx, ("questions_per_image", "feature_shape"), beside="data")
    refuse(ctx, ("split",), without="data")
    for setting in settings:
        if not setting.startswith("engine.") or "=" not in setting:
            raise InputError(f"{setting!r}: expected engine.key=value, such as engine.module_dim=16")
    config = read_config(config_file, settings, {"engine": {"modules": modules}} if modules else {}).engine
    given |= where(given)
    given |= {name: getattr(Config, name) for name in ("device", "placement", "devices") if given[name] is None}
    run(ctx, config=config, **given)


@main.command(cls=Command)
@option("--program", "programs", multiple=True, metavar="TOKENS", help="In prefix order; may be given several times.")
@option("--data", type=DATA, help="Directory that iep-preprocess wrote.")
@option("--split", default="val", help="Split of --data.")
@option("--num-samples", type=SIZE, default=8, help="The first N questions of --data.")
@option("--questions-per-image", type=SIZE, default=1, help="So many programs of --program ask about one image.")
@option(
    "--batching", "schedulers", type=Parsed(parse_schedulers), default=BEST, help="Comma list of schedulers, or all."
)
@option("--sharing/--no-sharing", default=True, help="Run what is equal once.")
@option("--modules", type=click.Choice(MODULES), default=EngineConfig.modules, help="Residual blocks, or attentions.")
@option("--scene", type=click.Choice(["module", "stem"]), default=EngineConfig.scene, help="A module, or the stem.")
@placement_options
@option("--out", type=DIRECTORY, help="Directory for the text, the calls (JSON) and a picture of each schedule.")
@click.pass_context
def plan(ctx: click.Context, **given: Any) -> None:
    """Show which nodes of which programs run in which module call.

    For example: iep-bench plan --program "count filter_color[red] scene". A node is named example.token, both from 0.
    """
    if not given["programs"] and given["data"] is None:
        raise click.UsageError("nothing to plan: give --program or --data")
    if given["programs"]:
        refuse(ctx, ("split", "num_samples"), beside="programs")
    else:
        refuse(ctx, ("questions_per_image",), beside="data")
    from iep.bench.plan import show_plans

    given |= {name: getattr(Config, name) for name in ("placement", "devices") if given[name] is None}
    show_plans(**given, say=click.echo)


@main.command(cls=RecordedCommand)
@option("--data", type=DATA, help="Directory that iep-preprocess wrote; else data is made.")
@option("--split", default="val", help="Split of --data.")
@option("--images", type=SIZE, default=10_000, help="Of the data made in --out: 0.4 GB a thousand, removed at the end.")
@choices("--features", "sources", ("cold", "warm", "memory"), "On the disk, in the system's cache, in shared memory.")
@choices("--order", "orders", ("image", "random"), "All questions image by image, or one of each image at random.")
@choices("--plans", "planning", ("without", "with"), "Whether workers make the engine's plans too.")
@option("--workers", type=CommaList(click.IntRange(min=0)), default="1,2", help="Comma list.")
@option("--prefetch", type=SIZE, default=Config.prefetch, help="Batches a worker makes ahead.")
@option("--batch-size", type=SIZE, default=256, help="Questions a batch.")
@option("--pass-seconds", type=click.FloatRange(min=0), default=20.0, help="After which a pass ends, if not before.")
@option("--device", default="cpu", help="To which batches are brought.")
@seeded()
@measured(3, 600.0, "Passes of each.")
@click.pass_context
def loader(ctx: click.Context, **given: Any) -> None:
    """Time the data loader alone: questions and bytes a second, without any network."""
    refuse(ctx, ("images",), beside="data")
    refuse(ctx, ("split",), without="data")
    run(ctx, directory=given["out"], **given)


@main.command(cls=RecordedCommand)
@option("--data", type=DATA, required=True, help="Directory that iep-preprocess wrote.")
@option("--config", type=click.Path(path_type=Path, dir_okay=False, exists=True), required=True, help="YAML to train.")
@option("--processes", type=SIZES, default="1,2", help="How many, on this machine; comma list.")
@option("--iterations", type=click.IntRange(min=2), default=100, help="Of each run.")
@measured(3, 3600.0, "Runs of each.")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.pass_context
def processes(ctx: click.Context, **given: Any) -> None:
    """Time training by one process and by several, and compare their losses."""
    run(ctx, **given)


@main.command("tree-lstm", cls=RecordedCommand)
@option("--batch-sizes", type=SIZES, default="1,4,16,64,256", help="Trees a minibatch.")
@option(
    "--cell", type=click.Choice(["binary", "child-sum"]), default="binary", help="Of constituents, or dependencies."
)
@option("--width", type=SIZE, help="Hidden size.  [default: 256; of child-sum 150]")
@option("--sst", type=FILE, help="Bracketed trees for --cell binary; else made.")
@option("--sick", type=DIRECTORY, help="Directory of pairs for --cell child-sum; else made.")
@network(words=16_000)
@click.pass_context
def tree_lstm(ctx: click.Context, sst: Path | None, sick: Path | None, **given: Any) -> None:
    """Time a Tree-LSTM per instance, batched, by hand (binary), and its limit.

    The binary one, for sentiment, is written in vertex functions; the child-sum one, for relatedness, in a lazy scope.
    """
    cell = given["cell"]
    used, unused = ("sst", "sick") if cell == "binary" else ("sick", "sst")
    if ctx.params[unused] is not None:
        raise click.UsageError(f"--{unused} is not for --cell {cell}")
    refuse(ctx, ("words",), beside=used)
    given |= {"width": given["width"] or {"binary": 256, "child-sum": 150}[cell], "files": sst or sick}
    run(ctx, **given)


@main.command("tree-fc", cls=RecordedCommand)
@option("--leaves", type=CommaList(click.IntRange(2, 10**9)), default="32,64,128,256,512,1024", help="Of a tree.")
@option("--batch-size", type=SIZE, default=16, help="Trees a minibatch.")
@option("--width", type=SIZE, default=512, help="Hidden size.")
@network(words=1_000)
@click.pass_context
def tree_fc(ctx: click.Context, **given: Any) -> None:
    """Time Tree-FC, complete binary trees, per instance, batched, by hand, and its limit."""
    run(ctx, **given)


@main.command(cls=RecordedCommand)
@option("--batch-sizes", type=SIZES, default="1,4,16,64", help="Sentences a minibatch.")
@option("--characters/--no-characters", default=False, help="Spell rare words.")
@option("--width", type=SIZE, default=256, help="Hidden size.")
@option("--wikiner", type=FILE, help="Lines of word|POS|tag; else made.")
@network(words=16_000)
@click.pass_context
def tagger(ctx: click.Context, **given: Any) -> None:
    """Time a BiLSTM tagger per instance, batched, by packed nn.LSTM, and its limit."""
    refuse(ctx, ("words",), beside="wikiner")
    run(ctx, **given)


@main.command(cls=RecordedCommand)
@option("--experts", type=SIZES, default="1,10,100,1000,10000", help="Of the layer.")
@option("--tokens", type=SIZES, default="1,10,100,1000,10000", help="A minibatch.")
@option("--k", type=SIZE, default=1, help="Experts of a token.")
@option("--width", type=TRIPLE, metavar="INPUTS HIDDEN OUTPUTS", default=(256, 256, 256), help="Of an expert.")
@option("--device", default="cpu", help="auto, cpu, cuda, cuda:1, ...")
@computed()
@measured(7)
@click.pass_context
def moe(ctx: click.Context, **given: Any) -> None:
    """Time a layer of experts token by token, batched, by hand, and its limit.

    Every number of experts is measured with every size of minibatch, as memory allows.
    """
    k, few = given["k"], min(given["experts"])
    if k > few:
        raise click.BadParameter(f"{k} different experts of {few}: lower it, or raise --experts", param_hint="--k")
    run(ctx, **given)


if __name__ == "__main__":
    main()
