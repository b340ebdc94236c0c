"""`iep-bench`: measure the speed of the engine, the data loader, other networks and training, and show schedules."""

import shlex
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from iep.asynchronous.conductor import BACKWARD_WEIGHTS
from iep.bench.strategy import ALL, BEST, DEFER, GROUPED, OPTIONS, PHASES, SHARING, Strategy, parse_strategies
from iep.cli.command import Command, CommandGroup
from iep.cli.options import (
    PATH,
    CommaList,
    DirectoryPath,
    UpdateFrequency,
    all_of,
    device_options,
    device_settings,
    placement_options,
)
from iep.config import MODULES, PRECISIONS, Config, EngineConfig, find_config, read_config
from iep.errors import InputError
from iep.execution_engine.choices import SCENES, is_outside

STRATEGIES = "height,agenda,lookahead,height+defer,agenda+defer,lookahead+defer"
SIZE = click.IntRange(1, 10**9)
SIZES, TRIPLE = CommaList(SIZE), (SIZE, SIZE, SIZE)
SHARE, SEED = click.FloatRange(0, 1), click.IntRange(0, 2**32 - 1)
option = partial(click.option, show_default=True)


class RecordedCommand(Command):
    """A command that records its arguments for its report."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        names, each = [ctx.info_name], ctx.parent
        while each is not None and each.parent is not None:
            names, each = [each.info_name, *names], each.parent
        ctx.meta["command"] = shlex.join(["iep-bench", *names, *args])
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


def measured(repeat: int, max_seconds: float = 10.0, of: str = "Number of rounds of measuring.") -> Callable:
    """Return the options for the duration of measuring and for the output."""
    enough = "Seconds after which three rounds of a row are enough."
    return all_of(
        option("--repeat", type=click.IntRange(min=1), default=repeat, help=of),
        option("--max-seconds", type=click.FloatRange(min=0), default=max_seconds, help=enough),
        option("--out", type=DirectoryPath(), help="Directory for the tables, all results (JSON) and a picture."),
    )


seed = option("--seed", type=SEED, default=0, help="Seed of all random numbers.")
threads = option("--threads", type=click.IntRange(1, 1024), help="Number of CPU threads.  [default: PyTorch's]")
phases = choices("--phase", "phases", PHASES, "train: forward pass, loss and backward pass; inference: forward pass.")
data = all_of(
    option("--data", type=PATH, help="Directory written by iep-preprocess."),
    option("--split", default="val", help="Split of --data."),
)


def network(words: int) -> Callable:
    """Return the options that the networks of trees and of sentences share."""
    vocabulary = option(
        "--words", type=click.IntRange(2, 10**9), default=words, help="Size of the generated vocabulary."
    )
    return all_of(vocabulary, batching(STRATEGIES, SHARING, DEFER), phases, seed, threads, measured(7))


def run(ctx: click.Context, module: str, name: str | None = None, **given: Any) -> None:
    """Run a benchmark that a module of `iep.bench` defines, by default that of the command's name; write its files."""
    # Imported late: `--help` should not wait for torch.
    import torch

    from iep.bench.compare import Effort
    from iep.bench.tables import result_files, run_benchmark

    effort, threads = Effort(given.pop("repeat"), given.pop("max_seconds")), given.pop("threads", None)
    files = result_files(given.pop("out"), ctx.info_name)
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(given.get("seed", 0))  # of the weights
    make = getattr(import_module(f"iep.bench.{module}"), f"{(name or ctx.info_name).replace('-', '_')}_benchmark")
    run_benchmark(make(**given), effort, ctx.meta["command"], files)


def exclude(ctx: click.Context, *names: str, beside: str = "data") -> None:
    """Check that no option of `names` is given together with `beside`, nor a split without data.

    Raises:
        click.UsageError: names the first such option.
    """
    flags = {each.name: each.opts[0] for each in ctx.command.params}
    given = {name for name in flags if ctx.get_parameter_source(name) != ParameterSource.DEFAULT}
    for name in names:
        if {name, beside} <= given:
            raise click.UsageError(f"{flags[name]} cannot go together with {flags[beside]}")
    if "split" in given and "data" not in given:
        raise click.UsageError("--split needs --data")


@click.group(cls=CommandGroup)
def main() -> None:
    """Measure the execution engine, the data loader and other batched networks, and show schedules.

    benchmarks/README.md explains the rows and columns of the tables.
    """


@main.command(cls=RecordedCommand)
@option("--batch-sizes", type=SIZES, default="1,4,16,64,256,1024", help="Questions per minibatch.")
@batching(ALL, *OPTIONS, *GROUPED, *PRECISIONS)
@data
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
    """Measure the execution engine under every strategy, and its limit.

    The engine has its full size unless KEY=VALUE arguments (engine.module_dim=16) or --config say otherwise.
    """
    exclude(ctx, "questions_per_image", "feature_shape")
    for setting in settings:
        if not setting.startswith("engine.") or "=" not in setting:
            raise InputError(f"{setting!r}: expected engine.key=value, such as engine.module_dim=16")
    config = _trusted(config_file, settings).engine
    given |= device_settings(given)
    given |= {name: getattr(Config, name) for name in ("device", "placement", "devices") if given[name] is None}
    run(ctx, "measure_engine", config=config, **given)


@main.command(cls=Command)
@option("--program", "programs", multiple=True, metavar="TOKENS", help="Program in prefix order; can be repeated.")
@data
@option("--num-samples", type=SIZE, default=8, help="Use the first N questions of --data.")
@option("--questions-per-image", type=SIZE, default=1, help="Number of given programs per image.")
@batching(f"{BEST}+{SHARING}", SHARING, "triton")
@option("--modules", metavar="|".join(MODULES), default=EngineConfig.modules, help="Set of modules.")
@option("--scene", type=click.Choice(SCENES), default=EngineConfig.scene, help="What computes the scene.")
@placement_options
@option("--out", type=DirectoryPath(), help="Directory for the text, the calls (JSON) and a picture.")
@click.pass_context
def plan(ctx: click.Context, **given: Any) -> None:
    """Show which nodes of which programs run in which module call.

    For example: iep-bench plan --program "count filter_color[red] scene". A node is named
    example.token, where both numbers begin at 0.
    """
    if bool(given["programs"]) == (given["data"] is not None):
        raise click.UsageError("expected either --program or --data")
    exclude(ctx, "questions_per_image")
    exclude(ctx, "num_samples", beside="programs")
    from iep.bench.show_plans import show_plans

    given |= {name: getattr(Config, name) for name in ("placement", "devices") if given[name] is None}
    show_plans(**given)


@main.command(cls=RecordedCommand)
@data
@option("--images", type=SIZE, default=10_000, help="Generated images, 0.4 GB per thousand; removed at the end.")
@choices("--features", "sources", ("cold", "warm", "memory"), "Read features from disk (cold), cache (warm) or memory.")
@choices("--order", "orders", ("image", "random"), "image: all questions by image; random: one per image.")
@option("--workers", type=CommaList(click.IntRange(min=0)), default="1,2", help="Numbers of worker processes.")
@option("--batch-size", type=SIZE, default=256, help="Questions per batch.")
@option("--batches", type=SIZE, default=200, help="Largest number of batches of a pass.")
@seed
@threads
@measured(3, 600.0, "Number of passes of each row.")
@click.pass_context
def loader(ctx: click.Context, **given: Any) -> None:
    """Measure the data loader alone, in questions and bytes per second."""
    exclude(ctx, "images")
    run(ctx, "measure_loader", directory=given["out"], **given)


@main.command(cls=RecordedCommand)
@option("--data", type=PATH, required=True, help="Directory written by iep-preprocess.")
@option("--config", type=PATH, required=True, help="YAML file of settings, or the name of a config, such as mini/ee.")
@option("--processes", type=SIZES, default="1,2", help="Comma-separated list of numbers of processes.")
@option("--iterations", type=click.IntRange(min=2), default=100, help="Number of training steps of each run.")
@measured(3, 3600.0, "Number of runs with each number of processes.")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.pass_context
def processes(ctx: click.Context, **given: Any) -> None:
    """Measure training by one process and by several processes."""
    run(ctx, "measure_processes", **given | {"config": find_config(given["config"])})


@main.command("tree-lstm", cls=RecordedCommand)
@option("--batch-sizes", type=SIZES, default="1,4,16,64,256", help="Trees or pairs per minibatch.")
@option("--cell", type=click.Choice(["binary", "child-sum"]), default="binary", help="Kind of Tree-LSTM.")
@option("--width", type=SIZE, help="Hidden size.  [default: 256 for binary, 150 for child-sum]")
@option("--data", type=PATH, help="File of SST, or directory of SICK for child-sum.  [default: generate trees]")
@network(words=16_000)
@click.pass_context
def tree_lstm(ctx: click.Context, **given: Any) -> None:
    """Measure a Tree-LSTM per instance, batched, and by hand (binary only), and the limit of the hardware.

    The binary Tree-LSTM classifies sentiment and uses vertex functions. The child-sum Tree-LSTM predicts relatedness
    and uses a lazy scope.
    """
    exclude(ctx, "words")
    given["width"] = given["width"] or {"binary": 256, "child-sum": 150}[given["cell"]]
    run(ctx, "measure_networks", **given)


@main.command("tree-fc", cls=RecordedCommand)
@option("--leaves", type=CommaList(click.IntRange(2, 10**9)), default="32,64,128,256,512,1024", help="Leaves per tree.")
@option("--batch-size", type=SIZE, default=16, help="Trees per minibatch.")
@option("--width", type=SIZE, default=512, help="Hidden size.")
@network(words=1_000)
@click.pass_context
def tree_fc(ctx: click.Context, **given: Any) -> None:
    """Measure Tree-FC on complete binary trees per instance, batched and by hand, and the limit of the hardware."""
    run(ctx, "measure_networks", **given)


@main.command(cls=RecordedCommand)
@option("--batch-sizes", type=SIZES, default="1,4,16,64", help="Sentences per minibatch.")
@option("--characters/--no-characters", default=False, help="Read rare words letter by letter.")
@option("--width", type=SIZE, default=256, help="Hidden size.")
@option("--data", type=PATH, help="File of WikiNER with words as word|POS|tag.  [default: generate sentences]")
@network(words=16_000)
@click.pass_context
def tagger(ctx: click.Context, **given: Any) -> None:
    """Measure a BiLSTM tagger per instance, batched and with packed nn.LSTM, and the limit of the hardware."""
    exclude(ctx, "words")
    run(ctx, "measure_networks", **given)


@main.command(cls=RecordedCommand)
@option("--experts", type=SIZES, default="1,10,100,1000", help="Comma-separated list of numbers of experts.")
@option("--tokens", type=SIZES, default="1,10,100,1000,10000", help="Tokens per minibatch.")
@option("--k", type=SIZE, default=1, help="Experts per token.")
@option("--width", type=TRIPLE, metavar="INPUTS HIDDEN OUTPUTS", default=(256, 256, 256), help="Sizes of each expert.")
@option("--device", default="cpu", help="Device: auto, cpu, cuda, cuda:1, ...")
@phases
@seed
@threads
@measured(7)
@click.pass_context
def moe(ctx: click.Context, **given: Any) -> None:
    """Measure a layer of experts token by token, batched and by hand, and the limit of the hardware."""
    k, few = given["k"], min(given["experts"])
    if k > few:
        raise click.BadParameter(f"{k} different experts of {few}: lower it, or raise --experts", param_hint="--k")
    run(ctx, "measure_experts", **given)


@main.group("async", cls=CommandGroup)
def asynchronous() -> None:
    """Measure synchronous training, training with flushes, and asynchronous training of a network.

    The ops of the network are placed on threads and on simulated workers. In asynchronous training, several instances
    are in flight, and each op updates itself.
    """


def trained(
    instance_size: int, samples: int, width: int = 0, steps: int = 0, target: click.ParamType = SHARE
) -> Callable:
    """Return the options of a workload of asynchronous training; there is no option for a width or for steps of 0."""
    of_graphs = option("--steps", type=click.IntRange(1, 64), default=steps, help="Steps of the graph network.")
    keys = "Largest numbers of instances in flight; each is measured with each update frequency."
    calls = "Numbers of calls after which an op is updated; auto: those of the op in an instance, on average."
    weights = "Weights of a backward pass: the current ones, or those of its forward pass."
    replicas = "Ops that N workers hold, named as in the picture of the staleness."
    seeds = "Seeds of the weights and the order of instances; the first also generates the samples."
    return all_of(
        *([of_graphs] if steps else []),
        option("--workers", type=click.IntRange(1, 64), default=2, help="Number of threads on which ops are placed."),
        option("--simulate", type=SIZES, default="4,8", help="Numbers of workers to simulate with measured costs."),
        option("--max-active-keys", type=SIZES, default="4", help=keys),
        option("--min-update-frequency", type=CommaList(UpdateFrequency()), default="auto", help=calls),
        option("--backward-weights", type=click.Choice(BACKWARD_WEIGHTS), default="current", help=weights),
        option("--replicas", type=CommaList(click.STRING), metavar="OP=N[,OP=N...]", help=replicas),
        option("--instance-size", type=SIZE, default=instance_size, help="Samples per instance."),
        option("--samples", type=SIZE, default=samples, help="Samples for training."),
        option("--val-samples", type=SIZE, default=1_000, help="Unseen samples for the score."),
        *([option("--width", type=SIZE, default=width, help="Hidden size.")] if width else []),
        option("--learning-rate", type=click.FloatRange(min=0), default=1e-3, help="Learning rate of Adam."),
        option("--latency", type=click.FloatRange(min=0), default=10.0, help="Simulated microseconds of a message."),
        option("--bandwidth", type=click.FloatRange(0, min_open=True), default=10.0, help="Simulated GB/s of a link."),
        option("--epochs", type=click.IntRange(min=1), default=5, help="Number of epochs of each row and seed."),
        option("--target", type=target, help="Report epochs and seconds until the score of unseen samples is as good."),
        option("--seeds", type=CommaList(SEED), default="0", help=seeds),
        option("--threads", type=click.IntRange(1, 1024), default=1, help="Number of CPU threads of each worker."),
        option("--out", type=DirectoryPath(), help="Directory for the tables, all results (JSON) and pictures."),
    )


def train(ctx: click.Context, **given: Any) -> None:
    """Run the benchmark of a command of `iep-bench async`; a round is an epoch of a seed."""
    rounds = given["epochs"] * len(given["seeds"])
    run(ctx, "measure_async", "async", workload=ctx.info_name, repeat=rounds, max_seconds=1e9, **given)


@asynchronous.command("list-reduction", cls=RecordedCommand)
@option("--layers", type=click.IntRange(1, 64), default=1, help="Recurrent layers, each of which is an op.")
@trained(instance_size=32, samples=10_000, width=128)
@click.pass_context
def list_reduction(ctx: click.Context, **given: Any) -> None:
    """Measure training of a recurrent network on lists.

    It reduces generated lists of digits, which is the first experiment of AMPNet (Gaunt et al. 2017). The score is the
    accuracy.
    """
    train(ctx, **given)


@asynchronous.command("tree-lstm", cls=RecordedCommand)
@trained(instance_size=16, samples=2_000, width=128)
@click.pass_context
def asynchronous_tree_lstm(ctx: click.Context, **given: Any) -> None:
    """Measure training of a Tree-LSTM on sentiment.

    It predicts the sentiment of every phrase of generated sentences with the sizes of the Stanford Sentiment Treebank.
    The cell of leaves and that of inner vertices are ops of their own. The score is the accuracy over all phrases.
    """
    train(ctx, **given)


@asynchronous.command(cls=RecordedCommand)
@trained(instance_size=10, samples=1_000, width=5, steps=2)
@click.pass_context
def deduction(ctx: click.Context, **given: Any) -> None:
    """Measure training of a graph network on deduction.

    A gated graph network answers generated questions like those of task 15 of bAbI. The score is the accuracy.
    """
    train(ctx, **given)


@asynchronous.command(cls=RecordedCommand)
@trained(instance_size=20, samples=2_000, width=100, steps=4, target=click.FloatRange(min=0))
@click.pass_context
def molecules(ctx: click.Context, **given: Any) -> None:
    """Measure training of a graph network on molecules.

    A gated graph network predicts a number of each of generated molecules like those of QM9. The score is the mean
    absolute error relative to the standard deviation of this number, and lower is better.
    """
    train(ctx, **given)


@asynchronous.command("engine", cls=RecordedCommand)
@option("--data", type=PATH, required=True, help="Directory written by iep-preprocess.")
@option("--config", type=PATH, required=True, help="YAML file of settings, or the name of a config, such as mini/ee.")
@trained(instance_size=32, samples=2_000)
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.pass_context
def asynchronous_engine(ctx: click.Context, **given: Any) -> None:
    """Measure training of an execution engine on true programs.

    The stem, every module and the classifier are ops. Of the settings, those of the engine, of its batching and of the
    splits are used. The score is the accuracy.
    """
    config = _trusted(find_config(given.pop("config")), given.pop("settings"))
    train(ctx, **given, config=config)


def _trusted(file: Path | None, settings: Sequence[str]) -> Config:
    """Return the settings of a file and of KEY=VALUE arguments, which alone may name modules of another package.

    Raises:
        InputError: the file names such modules, and the arguments do not, or the settings are invalid.
    """
    config = read_config(file, settings)
    modules = config.engine.modules
    if is_outside(modules) and not any(each.startswith("engine.modules=") for each in settings):
        what = f"its modules are {modules!r}, code of another package, which is executed only if you name it"
        raise InputError(f"{file}: {what}; if you trust it, give engine.modules={modules!r}")
    return config


if __name__ == "__main__":
    main()
