"""`python -m benchmarks`: measure the data loader, planning, and the experiments of papers."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import click

from iep.batching.schedulers import SCHEDULERS
from iep.bench.strategy import DEFER, SHARING
from iep.cli import bench
from iep.cli.bench import SIZE, SIZES, TRIPLE, choices, measured, option, phases, run, seed, threads
from iep.cli.command import CommandGroup
from iep.cli.options import PATH, CommaList, UpdateFrequency, all_of

STRATEGIES = "height,agenda,lookahead,height+defer,agenda+defer,lookahead+defer"
NETWORKS = ("tree-lstm", "tree-fc", "tagger")
STRUCTURES = ("chains", "trees", "lattices", "dags", "programs")


@click.group("python -m benchmarks", cls=CommandGroup)
def main() -> None:
    """Measure the data loader, planning, and the experiments of papers.

    benchmarks/README.md explains the rows and columns of the tables.
    """


@main.group("async", cls=CommandGroup)
def asynchronous() -> None:
    """Measure synchronous training, training with flushes, and asynchronous training of a network.

    The ops of the network are placed on threads and on simulated workers. In asynchronous training, several instances
    are in flight, and each op updates itself.
    """


def add(name: str, module: str, help: str, *options: Callable, group: click.Group = main) -> None:
    """Add the command of a benchmark, which the function of its name in a module makes of its options."""

    @all_of(*options)
    @click.pass_context
    def command(ctx: click.Context, **given: Any) -> None:
        function = "asynchronous" if group is asynchronous else name.replace("-", "_")
        make = getattr(import_module(f"benchmarks.{module}"), function)
        if group is asynchronous:  # a round is an epoch of a seed
            given |= {"name": name, "repeat": given["epochs"] * len(given["seeds"]), "max_seconds": float("inf")}
        run(ctx, make, **given)

    group.command(name, cls=bench.RecordedCommand, help=help)(command)


preprocessed = all_of(
    option("--data", type=PATH, required=True, help="Directory written by iep-preprocess."),
    option("--config", type=PATH, required=True, help="YAML file of settings, or the name of a config (mini/ee)."),
    click.argument("settings", nargs=-1, metavar="[KEY=VALUE]..."),
)


def network(words: int, width: int | None, of: str = "Hidden size.") -> Callable:
    """Return the options that the networks of trees and of sentences share."""
    vocabulary = option("--words", type=click.IntRange(2, 10**9), default=words, help="Size of the made-up vocabulary.")
    size = option("--width", type=SIZE, default=width, help=of)
    return all_of(size, vocabulary, bench.batching(STRATEGIES, SHARING, DEFER), phases, seed, threads, measured(7))


add(
    "loader",
    "loader",
    "Measure the data loader alone, in questions and bytes per second; a round is a pass.",
    bench.data,
    option("--images", type=SIZE, default=10_000, help="Images to make up without --data, 0.4 GB per thousand."),
    choices("--features", "sources", ("cold", "warm"), "Features from disk (cold) or cache (warm)."),
    choices("--order", "orders", ("image", "random"), "image: all questions by image; random: one per image."),
    option("--workers", type=CommaList(click.IntRange(min=0)), default="1,2", help="Numbers of worker processes."),
    option("--batch-size", type=SIZE, default=256, help="Questions per batch."),
    option("--batches", type=SIZE, default=200, help="Largest number of batches of a pass."),
    seed,
    threads,
    measured(3, 600.0),
)
add(
    "planning",
    "planning",
    "Measure schedules and plans, in milliseconds and in bytes per node; a round plans one minibatch.",
    choices("--structure", "structures", STRUCTURES, "Structures of the samples."),
    option("--nodes", type=SIZES, default="100,1000,10000,100000", help="Nodes of a minibatch."),
    option("--batch-sizes", type=SIZES, default="1,64", help="Samples per minibatch."),
    option("--functions", type=SIZES, default="1,4,20", help="Numbers of functions."),
    choices("--scheduler", "schedulers", tuple(SCHEDULERS), "Schedulers."),
    seed,
    threads,
    measured(3, 20.0),
)
add(
    "tree-lstm",
    "trees",
    "Measure a Tree-LSTM per instance and batched. The binary Tree-LSTM classifies sentiment and uses vertex "
    "functions. The child-sum Tree-LSTM predicts relatedness and uses a lazy scope.",
    option("--batch-sizes", type=SIZES, default="1,4,16,64,256", help="Trees or pairs per minibatch."),
    option("--cell", type=click.Choice(["binary", "child-sum"]), default="binary", help="Kind of Tree-LSTM."),
    network(16_000, None, "Hidden size.  [default: 256 for binary, 150 for child-sum]"),
)
add(
    "tree-fc",
    "trees",
    "Measure Tree-FC on complete binary trees per instance and batched.",
    option("--leaves", type=CommaList(click.IntRange(2, 10**9)), default="32,64,128,256,512,1024", help="Per tree."),
    option("--batch-size", type=SIZE, default=16, help="Trees per minibatch."),
    network(1_000, 512),
)
add(
    "tagger",
    "tagger",
    "Measure a BiLSTM tagger per instance, batched and with packed nn.LSTM.",
    option("--batch-sizes", type=SIZES, default="1,4,16,64", help="Sentences per minibatch."),
    option("--characters/--no-characters", default=False, help="Read rare words letter by letter."),
    network(16_000, 256),
)
add(
    "dynet",
    "dynet",
    "Measure DyNet and iep on trees or sentences.",
    option("--network", type=click.Choice(NETWORKS), default="tree-lstm", help="Network to compare."),
    option("--batch-sizes", type=SIZES, default="1,16,64,256", help="Samples per minibatch."),
    option("--threads", type=click.IntRange(1, 1024), default=1, help="Number of CPU threads of PyTorch."),
    measured(7, 30.0),
)
add(
    "moe",
    "experts",
    "Measure a layer of experts token by token and batched.",
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


def add_trained(name: str, help: str, size: int, samples: int, *options: Callable, most: float | None = 1) -> None:
    """Add an experiment of asynchronous training, whose score is at most `most`."""
    add(
        name,
        "asynchronous",
        help,
        *options,
        option("--simulate", type=SIZES, default="4,8", help="Numbers of workers to simulate with measured costs."),
        option("--max-active-keys", type=SIZES, default="4", help="Largest numbers of instances in flight."),
        option("--workers", type=click.IntRange(1, 64), default=2, help="Number of threads on which ops are placed."),
        option(
            "--min-update-frequency",
            type=CommaList(UpdateFrequency()),
            default="auto",
            help="Calls after which an op is updated; auto: those of the op in an instance, on average.",
        ),
        option("--instance-size", type=SIZE, default=size, help="Samples per instance."),
        option("--samples", type=SIZE, default=samples, help="Samples for training."),
        option("--val-samples", type=SIZE, default=1_000, help="Unseen samples for the score."),
        option("--learning-rate", type=click.FloatRange(min=0), default=1e-3, help="Learning rate of Adam."),
        option("--epochs", type=click.IntRange(min=1), default=5, help="Number of epochs of each row and seed."),
        option("--target", type=click.FloatRange(0, most), help="Score to count epochs and seconds to."),
        option("--seeds", type=CommaList(click.IntRange(0, 2**32 - 1)), default="0", help="Seeds; the first for data."),
        option("--threads", type=click.IntRange(1, 1024), default=1, help="Number of CPU threads of each worker."),
        bench.out,
        group=asynchronous,
    )


def number(name: str, default: int, help: str, most: int = 10**9) -> Callable:
    """Return the option of a setting of a network."""
    return option(f"--{name}", type=click.IntRange(1, most), default=default, help=help)


add_trained(
    "list-reduction",
    "Measure training of a recurrent network that reduces generated lists of digits. The score is the accuracy.",
    32,
    10_000,
    number("layers", 1, "Recurrent layers, each of which is an op.", 64),
    number("width", 128, "Hidden size."),
)
add_trained(
    "tree-lstm",
    "Measure training of a Tree-LSTM that predicts the sentiment of every phrase of generated sentences with the sizes "
    "of the Stanford Sentiment Treebank. The score is the accuracy over all phrases.",
    16,
    2_000,
    number("width", 128, "Hidden size."),
)
add_trained(
    "deduction",
    "Measure training of a gated graph network on generated questions like those of task 15 of bAbI. The score is the "
    "accuracy.",
    10,
    1_000,
    number("steps", 2, "Steps of the network.", 64),
    number("width", 5, "Hidden size."),
)
add_trained(
    "molecules",
    "Measure training of a gated graph network that predicts a number of each of generated molecules like those of "
    "QM9. The score is the mean absolute error relative to the standard deviation of this number; lower is better.",
    20,
    2_000,
    number("steps", 4, "Steps of the network.", 64),
    number("width", 100, "Hidden size."),
    most=None,
)
add_trained(
    "engine",
    "Measure training of an execution engine on true programs. The stem, every module and the classifier are ops. Of "
    "the settings, those of the engine, of its batching and of the splits are used. The score is the accuracy.",
    32,
    2_000,
    preprocessed,
)

if __name__ == "__main__":
    main()
