"""`python -m benchmarks`: measure the data loader, several processes, and the experiments of papers."""

from collections.abc import Callable
from typing import Any

import click

from iep.asynchronous.conductor import BACKWARD_WEIGHTS
from iep.bench.strategy import DEFER, SHARING
from iep.cli.bench import (
    SIZE,
    SIZES,
    TRIPLE,
    RecordedCommand,
    batching,
    choices,
    data,
    exclude,
    measured,
    option,
    out,
    phases,
    run,
    seed,
    threads,
    trusted_config,
)
from iep.cli.command import CommandGroup
from iep.cli.options import PATH, CommaList, UpdateFrequency, all_of
from iep.config import find_config

STRATEGIES = "height,agenda,lookahead,height+defer,agenda+defer,lookahead+defer"
NAME_OF_CONFIG = "YAML file of settings, or the name of a config, such as mini/ee."
config = option("--config", type=PATH, required=True, help=NAME_OF_CONFIG)
preprocessed = option("--data", type=PATH, required=True, help="Directory written by iep-preprocess.")


@click.group("python -m benchmarks", cls=CommandGroup)
def main() -> None:
    """Measure the data loader, several processes, and the experiments of papers.

    benchmarks/README.md explains the rows and columns of the tables.
    """


def command(name: str, *options: Callable, group: click.Group = main) -> Callable:
    """Return a decorator that makes a command of a function of its context and of its options."""
    return lambda function: group.command(name, cls=RecordedCommand)(all_of(*options)(click.pass_context(function)))


@command(
    "loader",
    data,
    option("--images", type=SIZE, default=10_000, help="Generated images, 0.4 GB per thousand; removed at the end."),
    choices("--features", "sources", ("cold", "warm", "memory"), "Features from disk (cold), cache (warm) or memory."),
    choices("--order", "orders", ("image", "random"), "image: all questions by image; random: one per image."),
    option("--workers", type=CommaList(click.IntRange(min=0)), default="1,2", help="Numbers of worker processes."),
    option("--batch-size", type=SIZE, default=256, help="Questions per batch."),
    option("--batches", type=SIZE, default=200, help="Largest number of batches of a pass."),
    seed,
    threads,
    measured(3, 600.0),
)
def loader(ctx: click.Context, **given: Any) -> None:
    """Measure the data loader alone, in questions and bytes per second; a round is a pass."""
    exclude(ctx, "images")
    from benchmarks.loader import loader

    run(ctx, loader, directory=given["out"], **given)


@command(
    "processes",
    preprocessed,
    config,
    option("--processes", type=SIZES, default="1,2", help="Comma-separated list of numbers of processes."),
    option("--iterations", type=click.IntRange(min=2), default=100, help="Number of training steps of each run."),
    measured(3, 3600.0),
    click.argument("settings", nargs=-1, metavar="[KEY=VALUE]..."),
)
def processes(ctx: click.Context, **given: Any) -> None:
    """Measure training by one process and by several processes; a round is a run."""
    from benchmarks.processes import processes

    run(ctx, processes, **given | {"config": find_config(given["config"])})


def network(words: int) -> Callable:
    """Return the options that the networks of trees and of sentences share."""
    vocabulary = option("--words", type=click.IntRange(2, 10**9), default=words, help="Size of the made-up vocabulary.")
    return all_of(vocabulary, batching(STRATEGIES, SHARING, DEFER), phases, seed, threads, measured(7))


@command(
    "tree-lstm",
    option("--batch-sizes", type=SIZES, default="1,4,16,64,256", help="Trees or pairs per minibatch."),
    option("--cell", type=click.Choice(["binary", "child-sum"]), default="binary", help="Kind of Tree-LSTM."),
    option("--width", type=SIZE, help="Hidden size.  [default: 256 for binary, 150 for child-sum]"),
    option("--data", type=PATH, help="File of SST, or directory of SICK for child-sum.  [default: generate trees]"),
    network(words=16_000),
)
def tree_lstm(ctx: click.Context, **given: Any) -> None:
    """Measure a Tree-LSTM per instance, batched, and by hand (binary only), and the limit of the hardware.

    The binary Tree-LSTM classifies sentiment and uses vertex functions. The child-sum Tree-LSTM predicts relatedness
    and uses a lazy scope.
    """
    exclude(ctx, "words")
    from benchmarks.networks import tree_lstm

    run(ctx, tree_lstm, **given)


@command(
    "tree-fc",
    option("--leaves", type=CommaList(click.IntRange(2, 10**9)), default="32,64,128,256,512,1024", help="Per tree."),
    option("--batch-size", type=SIZE, default=16, help="Trees per minibatch."),
    option("--width", type=SIZE, default=512, help="Hidden size."),
    network(words=1_000),
)
def tree_fc(ctx: click.Context, **given: Any) -> None:
    """Measure Tree-FC on complete binary trees per instance, batched and by hand, and the limit of the hardware."""
    from benchmarks.networks import tree_fc

    run(ctx, tree_fc, **given)


@command(
    "tagger",
    option("--batch-sizes", type=SIZES, default="1,4,16,64", help="Sentences per minibatch."),
    option("--characters/--no-characters", default=False, help="Read rare words letter by letter."),
    option("--width", type=SIZE, default=256, help="Hidden size."),
    option("--data", type=PATH, help="File of WikiNER with words as word|POS|tag.  [default: generate sentences]"),
    network(words=16_000),
)
def tagger(ctx: click.Context, **given: Any) -> None:
    """Measure a BiLSTM tagger per instance, batched and with packed nn.LSTM, and the limit of the hardware."""
    exclude(ctx, "words")
    from benchmarks.networks import tagger

    run(ctx, tagger, **given)


@command(
    "moe",
    option("--experts", type=SIZES, default="1,10,100,1000", help="Comma-separated list of numbers of experts."),
    option("--tokens", type=SIZES, default="1,10,100,1000,10000", help="Tokens per minibatch."),
    option("--k", type=SIZE, default=1, help="Experts per token."),
    option("--width", type=TRIPLE, metavar="INPUTS HIDDEN OUTPUTS", default=(256, 256, 256), help="Sizes of experts."),
    option("--device", default="cpu", help="Device: auto, cpu, cuda, cuda:1, ..."),
    phases,
    seed,
    threads,
    measured(7),
)
def moe(ctx: click.Context, **given: Any) -> None:
    """Measure a layer of experts token by token, batched and by hand, and the limit of the hardware."""
    k, few = given["k"], min(given["experts"])
    if k > few:
        raise click.BadParameter(f"{k} different experts of {few}: lower it, or raise --experts", param_hint="--k")
    from benchmarks.experts import moe

    run(ctx, moe, **given)


@command(
    "dynet",
    choices("--networks", "names", ("tree-lstm", "tree-fc", "tagger"), "Comma-separated list of networks."),
    option("--batch-sizes", type=SIZES, default="1,16,64,256", help="Samples per minibatch."),
    measured(7, 30.0),
)
def dynet(ctx: click.Context, names: tuple[str, ...], **given: Any) -> None:
    """Measure DyNet, PyTorch by hand and iep on trees and sentences, on one thread."""
    from benchmarks.dynet import dynet

    for name in names:
        ctx.info_name = name
        run(ctx, dynet, name=name, threads=1, **given)


@main.group("async", cls=CommandGroup)
def asynchronous() -> None:
    """Measure synchronous training, training with flushes, and asynchronous training of a network.

    The ops of the network are placed on threads and on simulated workers. In asynchronous training, several instances
    are in flight, and each op updates itself.
    """


def trained(instance_size: int, samples: int, most: float | None = 1) -> Callable:
    """Return the options of an experiment of asynchronous training, whose score is at most `most`."""
    keys = "Largest numbers of instances in flight; each is measured with each update frequency."
    calls = "Numbers of calls after which an op is updated; auto: those of the op in an instance, on average."
    weights = "Weights of a backward pass: the current ones, or those of its forward pass."
    seeds = "Seeds of the weights and the order of instances; the first also generates the samples."
    target = "Report epochs and seconds until the score of unseen samples is as good."
    numbers = CommaList(click.IntRange(0, 2**32 - 1))
    return all_of(
        option("--workers", type=click.IntRange(1, 64), default=2, help="Number of threads on which ops are placed."),
        option("--simulate", type=SIZES, default="4,8", help="Numbers of workers to simulate with measured costs."),
        option("--max-active-keys", type=SIZES, default="4", help=keys),
        option("--min-update-frequency", type=CommaList(UpdateFrequency()), default="auto", help=calls),
        option("--backward-weights", type=click.Choice(BACKWARD_WEIGHTS), default="current", help=weights),
        option("--replicas", type=CommaList(click.STRING), metavar="OP=N[,OP=N...]", help="Ops that N workers hold."),
        option("--instance-size", type=SIZE, default=instance_size, help="Samples per instance."),
        option("--samples", type=SIZE, default=samples, help="Samples for training."),
        option("--val-samples", type=SIZE, default=1_000, help="Unseen samples for the score."),
        option("--learning-rate", type=click.FloatRange(min=0), default=1e-3, help="Learning rate of Adam."),
        option("--latency", type=click.FloatRange(min=0), default=10.0, help="Simulated microseconds of a message."),
        option("--bandwidth", type=click.FloatRange(0, min_open=True), default=10.0, help="Simulated GB/s of a link."),
        option("--epochs", type=click.IntRange(min=1), default=5, help="Number of epochs of each row and seed."),
        option("--target", type=click.FloatRange(0, most), help=target),
        option("--seeds", type=numbers, default="0", help=seeds),
        option("--threads", type=click.IntRange(1, 1024), default=1, help="Number of CPU threads of each worker."),
        out,
    )


def train(ctx: click.Context, experiment: Any, threads: int, out: Any, **given: Any) -> None:
    """Run an experiment; a round is an epoch of a seed."""
    from benchmarks.asynchronous import Settings, asynchronous

    settings = Settings(**{name: given.pop(name) for name in Settings.__annotations__})
    rounds = settings.epochs * len(settings.seeds)
    whole = {"threads": threads, "out": out, "repeat": rounds, "max_seconds": float("inf")}
    run(ctx, asynchronous, name=ctx.info_name, experiment=experiment, given=settings, network=given, **whole)


def generated(name: str, about: str, *options: Callable) -> None:
    """Add the command of an experiment on generated data."""

    @command(name, *options, group=asynchronous)
    def function(ctx: click.Context, **given: Any) -> None:
        from benchmarks.asynchronous import EXPERIMENTS

        train(ctx, EXPERIMENTS[name], **given)

    asynchronous.commands[name].help = about


def width(default: int) -> Callable:
    """Return the option for the size of a network."""
    return option("--width", type=SIZE, default=default, help="Hidden size.")


def steps(default: int) -> Callable:
    """Return the option for the steps of a graph network."""
    return option("--steps", type=click.IntRange(1, 64), default=default, help="Steps of the graph network.")


generated(
    "list-reduction",
    "Measure training of a recurrent network that reduces generated lists of digits. The score is the accuracy.",
    option("--layers", type=click.IntRange(1, 64), default=1, help="Recurrent layers, each of which is an op."),
    width(128),
    trained(32, 10_000),
)
generated(
    "tree-lstm",
    "Measure training of a Tree-LSTM that predicts the sentiment of every phrase of generated sentences with the sizes "
    "of the Stanford Sentiment Treebank. The score is the accuracy over all phrases.",
    width(128),
    trained(16, 2_000),
)
generated(
    "deduction",
    "Measure training of a gated graph network on generated questions like those of task 15 of bAbI. The score is the "
    "accuracy.",
    steps(2),
    width(5),
    trained(10, 1_000),
)
generated(
    "molecules",
    "Measure training of a gated graph network that predicts a number of each of generated molecules like those of "
    "QM9. The score is the mean absolute error relative to the standard deviation of this number; lower is better.",
    steps(4),
    width(100),
    trained(20, 2_000, most=None),
)


@command(
    "engine",
    preprocessed,
    config,
    trained(32, 2_000),
    click.argument("settings", nargs=-1, metavar="[KEY=VALUE]..."),
    group=asynchronous,
)
def engine(ctx: click.Context, data: Any, config: Any, settings: tuple[str, ...], **given: Any) -> None:
    """Measure training of an execution engine on true programs.

    The stem, every module and the classifier are ops. Of the settings, those of the engine, of its batching and of the
    splits are used. The score is the accuracy.
    """
    chosen = trusted_config(find_config(config), settings)
    from benchmarks.async_engine import engine_experiment

    train(ctx, engine_experiment(data, chosen), **given)


if __name__ == "__main__":
    main()
