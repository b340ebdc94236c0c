"""Tree-LSTM, Tree-FC and a BiLSTM tagger in DyNet with automatic batching, by hand in torch, and by iep, in one run.

    pip install dynet38
    OMP_NUM_THREADS=1 python scripts/compare_dynet.py --out runs/dynet

DyNet batches what it finds as it goes (Neubig et al. 2017, On-the-fly Operation Batching in Dynamic Computation Graphs;
the agenda strategy). Each network is written for it twice, with one matrix for all gates and with one for each, as now
the one and now the other is faster. All ways run the same equations and sizes on the same minibatches, take turns, and
use one thread; weights of DyNet's are those of the network by hand, and that the losses agree is checked first. A
training step is forward, loss and backward, without an update.
"""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor

from iep.allocator import keep_freed_memory
from iep.bench.contest import PHASES, Comparison, Samples, Way, compare
from iep.bench.contest_report import format_comparison, write_report
from iep.bench.hand_tagger import PackedTagger
from iep.bench.hand_trees import HandTreeFC, HandTreeLSTM
from iep.bench.machine import describe_machine, machine_line
from iep.bench.measure import Effort
from iep.bench.samples import tagger_samples, tree_fc_samples, tree_lstm_samples
from iep.bench.strategy import BEST, Strategy
from iep.bench.tagger import EMBEDDING, HIDDEN, TAGS, tagger_models, tagger_ways
from iep.bench.tree_fc import tree_fc_models, tree_fc_ways
from iep.bench.tree_lstm import binary_models, binary_ways
from iep.cli.options import CommaList
from iep.files import check_writable, write_bytes
from iep.workloads.sentences import Sentence, wikiner_like
from iep.workloads.trees import SENTIMENTS, Tree, complete_trees, sst_like

try:
    import _dynet as dy
except ImportError:
    dy = None

WORDS = 16_000
TREE_LSTM_WIDTH, TREE_FC_WIDTH, TREE_FC_LEAVES = 256, 512, 256
TAGGER_WIDTH = 256
OURS = (Strategy(BEST), Strategy(BEST, defer=True))
WORKLOADS = ("tree-lstm", "tree-fc", "tagger")
ONE_MATRIX, MATRIX_A_GATE = "DyNet, one matrix", "DyNet, a matrix a gate"
DYNET_MEGABYTES = 2048
REPORT, TABLE = "dynet.json", "dynet.txt"

Graph = Any
"""An expression of DyNet's: the loss."""


def dynet_way(name: str, weights: "Weights", build: Callable[[Sequence[Any]], Graph]) -> Way:
    """DyNet's way: its graph is constructed in Python, then batched and computed at once.

    Parameters last no longer than `weights`, which the way therefore keeps.
    """

    def construct(minibatch: Sequence[Any], keep: Weights = weights) -> Graph:
        dy.renew_cg()
        return build(minibatch)

    def compute(loss: Graph, training: bool) -> float:
        value = loss.value()
        if training:
            loss.backward()
        return value

    return Way(name, construct, compute)


class Weights:
    """Parameters of DyNet's with the values of torch's."""

    def __init__(self) -> None:
        self.collection = dy.ParameterCollection()

    def lookup(self, table: Tensor) -> Any:
        return self.collection.lookup_parameters_from_numpy(table.detach().numpy())

    def put(self, *tensors: Tensor | np.ndarray) -> list[Any]:
        arrays = [tensor.detach().numpy() if isinstance(tensor, Tensor) else tensor for tensor in tensors]
        return [self.collection.parameters_from_numpy(np.ascontiguousarray(array)) for array in arrays]


def part(x: Any, number: int, width: int, count: int = 1) -> Any:
    """The `number`-th piece, of `width`, of a vector; or `count` pieces."""
    return dy.pick_range(x, number * width, (number + count) * width)


def dynet_tree_lstm(hand: HandTreeLSTM, one_matrix: bool) -> Way:
    """Gates as `HandTreeLSTM` orders them: i, o, u at leaves, i, o, f_left, f_right, u above."""
    weights, width = Weights(), hand.width
    embedding = weights.lookup(hand.embedding.weight)
    w_leaf, b_leaf = weights.put(hand.leaf.weight, hand.leaf.bias)
    w_inner, b_inner = weights.put(hand.inner.weight, hand.inner.bias)
    w_out, b_out = weights.put(hand.classifier.weight, hand.classifier.bias)
    leaf_gates = [weights.put(*each) for each in zip(hand.leaf.weight.chunk(3), hand.leaf.bias.chunk(3), strict=True)]
    inner_gates = [
        weights.put(weight[:, :width], weight[:, width:], bias)
        for weight, bias in zip(hand.inner.weight.chunk(5), hand.inner.bias.chunk(5), strict=True)
    ]

    def leaf(word: int) -> tuple[Any, Any]:
        x = embedding[word]
        if one_matrix:
            z = dy.affine_transform([b_leaf, w_leaf, x])
            i, o, u = (part(z, n, width) for n in range(3))
        else:
            i, o, u = (dy.affine_transform([b, w, x]) for w, b in leaf_gates)
        c = dy.cmult(dy.logistic(i), dy.tanh(u))
        return dy.cmult(dy.logistic(o), dy.tanh(c)), c

    def inner(left: tuple[Any, Any], right: tuple[Any, Any]) -> tuple[Any, Any]:
        (h_left, c_left), (h_right, c_right) = left, right
        if one_matrix:
            z = dy.affine_transform([b_inner, w_inner, dy.concatenate([h_left, h_right])])
            i, o, f_left, f_right, u = (part(z, n, width) for n in range(5))
        else:
            i, o, f_left, f_right, u = (
                dy.affine_transform([b, w_left, h_left, w_right, h_right]) for w_left, w_right, b in inner_gates
            )
        c = dy.cmult(dy.logistic(i), dy.tanh(u))
        c = c + dy.cmult(dy.logistic(f_left), c_left) + dy.cmult(dy.logistic(f_right), c_right)
        return dy.cmult(dy.logistic(o), dy.tanh(c)), c

    def loss(tree: Tree) -> Graph:
        made: list[tuple[Any, Any]] = []
        for (left, right), word in zip(tree.children.tolist(), tree.words.tolist(), strict=True):
            made.append(leaf(word) if left < 0 else inner(made[left], made[right]))
        return dy.pickneglogsoftmax(dy.affine_transform([b_out, w_out, made[-1][0]]), tree.label)

    name = ONE_MATRIX if one_matrix else MATRIX_A_GATE
    return dynet_way(name, weights, lambda trees: dy.esum([loss(each) for each in trees]))


def dynet_tree_fc(hand: HandTreeFC, one_matrix: bool) -> Way:
    """With a matrix for both children, or for each its own."""
    weights, width = Weights(), hand.width
    embedding = weights.lookup(hand.embedding.weight)
    weight = hand.inner.weight
    w, w_left, w_right, b = weights.put(weight, weight[:, :width], weight[:, width:], hand.inner.bias)

    def loss(tree: Tree) -> Graph:
        made: list[Any] = []
        for (left, right), word in zip(tree.children.tolist(), tree.words.tolist(), strict=True):
            if left < 0:
                made.append(embedding[word])
            elif one_matrix:
                made.append(dy.rectify(dy.affine_transform([b, w, dy.concatenate([made[left], made[right]])])))
            else:
                made.append(dy.rectify(dy.affine_transform([b, w_left, made[left], w_right, made[right]])))
        return dy.sum_elems(made[-1])

    name = ONE_MATRIX if one_matrix else "DyNet, a matrix a child"
    return dynet_way(name, weights, lambda trees: dy.esum([loss(each) for each in trees]))


def dynet_tagger(hand: PackedTagger, one_matrix: bool) -> Way:
    """With DyNet's own LSTM builder, or written out with a matrix a gate."""
    weights, lstm = Weights(), hand.lstm
    embedding = weights.lookup(hand.embedding.weight)
    w_hidden, b_hidden = weights.put(hand.hidden.weight, hand.hidden.bias)
    w_tags, b_tags = weights.put(hand.tags.weight, hand.tags.bias)
    run_lstm = _builder if one_matrix else _lstm_of_gates
    directions = [
        run_lstm(
            weights,
            getattr(lstm, f"weight_ih_l0{end}"),
            getattr(lstm, f"weight_hh_l0{end}"),
            getattr(lstm, f"bias_ih_l0{end}") + getattr(lstm, f"bias_hh_l0{end}"),
        )
        for end in ("", "_reverse")
    ]

    def losses(sentence: Sentence) -> Iterator[Graph]:
        x = [embedding[word] for word in sentence.words.tolist()]
        ahead, back = directions[0](x), directions[1](x[::-1])[::-1]
        for h_ahead, h_back, tag in zip(ahead, back, sentence.tags.tolist(), strict=True):
            hidden = dy.tanh(dy.affine_transform([b_hidden, w_hidden, dy.concatenate([h_ahead, h_back])]))
            yield dy.pickneglogsoftmax(dy.affine_transform([b_tags, w_tags, hidden]), tag)

    name = ONE_MATRIX if one_matrix else MATRIX_A_GATE
    return dynet_way(name, weights, lambda sentences: dy.esum([loss for each in sentences for loss in losses(each)]))


Lstm = Callable[[Sequence[Any]], list[Any]]


def _builder(weights: Weights, w_input: Tensor, w_state: Tensor, bias: Tensor) -> Lstm:
    """Gates i, f, o, g where torch has i, f, g, o; the builder adds one to f."""
    width = w_state.shape[1]
    builder = dy.CompactVanillaLSTMBuilder(1, w_input.shape[1], width, weights.collection)
    for parameter, tensor in zip(builder.get_parameters()[0], (w_input, w_state, bias), strict=True):
        i, f, g, o = tensor.detach().numpy().reshape(4, width, *tensor.shape[1:])
        parameter.set_value(np.concatenate([i, f - (tensor is bias), o, g]))
    return lambda x: builder.initial_state().transduce(x)


def _lstm_of_gates(weights: Weights, w_input: Tensor, w_state: Tensor, bias: Tensor) -> Lstm:
    parts = (w_input.chunk(4), w_state.chunk(4), bias.chunk(4))
    gates = [weights.put(*each) for each in zip(*parts, strict=True)]

    def run(xs: Sequence[Any]) -> list[Any]:
        made: list[Any] = []
        c = None
        for x in xs:
            state = [made[-1]] if made else []
            i, f, g, o = (dy.affine_transform([b, w_x, x, *(w_h, *state)[: 2 * len(state)]]) for w_x, w_h, b in gates)
            new = dy.cmult(dy.logistic(i), dy.tanh(g))
            c = new if c is None else new + dy.cmult(dy.logistic(f), c)
            made.append(dy.cmult(dy.logistic(o), dy.tanh(c)))
        return made

    return run


def cases(workload: str, batch: int, rng: np.random.Generator) -> tuple[Samples, list[Way]]:
    """What to run, and the ways to run it: DyNet's first, then those of `iep-bench`."""
    count = max(64, batch)
    if workload == "tree-lstm":
        samples = tree_lstm_samples(sst_like(count, WORDS, rng), batch, TREE_LSTM_WIDTH, SENTIMENTS)
        models, ways, dynet = binary_models(WORDS, TREE_LSTM_WIDTH), binary_ways, dynet_tree_lstm
    elif workload == "tree-fc":
        samples = tree_fc_samples(complete_trees(batch, TREE_FC_LEAVES, WORDS, rng), batch, TREE_FC_WIDTH)
        models, ways, dynet = tree_fc_models(WORDS, TREE_FC_WIDTH), tree_fc_ways, dynet_tree_fc
    else:
        sentences = wikiner_like(count, WORDS, TAGS, rng)
        samples = tagger_samples(sentences, batch, EMBEDDING, TAGGER_WIDTH, HIDDEN, TAGS)
        models, ways, dynet = tagger_models(WORDS, TAGS, TAGGER_WIDTH), tagger_ways, dynet_tagger
    hand = models[1]
    *here, by_hand = ways(*models, OURS)
    here = [replace(way, name=f"iep, {way.name}") for way in here]
    all_ways = [dynet(hand, one_matrix=True), dynet(hand, one_matrix=False), by_hand, *here]
    check_losses(all_ways, samples.minibatches[0])
    return samples, all_ways


def check_losses(ways: Sequence[Way], minibatch: Sequence[Any]) -> None:
    """Refuse to compare what computes different numbers."""
    losses = {way.name: float(way.compute(way.construct(minibatch), True)) for way in ways}
    first = next(iter(losses.values()))
    if any(abs(loss - first) > 1e-3 * max(1, abs(first)) for loss in losses.values()):
        raise click.ClickException(f"losses differ: {losses}")


@click.command()
@click.option("--workloads", type=CommaList(click.Choice(WORKLOADS)), default=",".join(WORKLOADS), show_default=True)
@click.option(
    "--batch-sizes",
    type=CommaList(click.IntRange(min=1)),
    help="[default: 1,16,64,256 trees for tree-lstm, 16 for tree-fc, 1,64 sentences for tagger]",
)
@click.option("--phase", "phases", type=CommaList(click.Choice(PHASES)), default=",".join(PHASES), show_default=True)
@click.option("--repeat", type=click.IntRange(min=1), default=7, show_default=True, help="Rounds of measuring.")
@click.option("--max-seconds", type=click.FloatRange(min=0), default=30.0, show_default=True, help="Of each way.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help=f"Directory for {REPORT} and {TABLE}.")
def main(
    workloads: tuple[str, ...],
    batch_sizes: tuple[int, ...] | None,
    phases: tuple[str, ...],
    repeat: int,
    max_seconds: float,
    seed: int,
    out: Path | None,
) -> None:
    """Compare with DyNet on one thread."""
    if dy is None:
        raise click.ClickException("DyNet is not installed: pip install dynet38")
    if out is not None:
        check_writable([out / REPORT, out / TABLE])
    keep_freed_memory()  # as the commands do
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    start_dynet(seed)
    machine = describe_machine(torch.device("cpu"))
    command = shlex.join(["python", "scripts/compare_dynet.py", *sys.argv[1:]])
    lines = [f"$ {command}", machine_line(machine)]
    click.echo("\n".join(lines))
    comparisons: list[Comparison] = []
    usual = {"tree-lstm": (1, 16, 64, 256), "tree-fc": (16,), "tagger": (1, 64)}
    for workload in workloads:
        for batch in batch_sizes or usual[workload]:
            samples, ways = cases(workload, batch, np.random.default_rng(seed))
            for phase in phases:
                comparisons.append(compare(ways, samples, phase, 1, Effort(repeat, max_seconds)))
                lines.append(f"\n{workload}: {format_comparison(comparisons[-1])}")
                click.echo(lines[-1])
                if out is not None:
                    write_report(out / REPORT, {"command": command, "machine": machine, "seed": seed}, comparisons)
                    write_bytes(out / TABLE, ("\n".join(lines) + "\n").encode())


def start_dynet(seed: int) -> None:
    parameters = dy.DynetParams()
    parameters.set_autobatch(True)
    parameters.set_mem(DYNET_MEGABYTES)
    parameters.set_random_seed(seed or 1)  # zero is chosen by the clock
    parameters.init()


if __name__ == "__main__":
    main()
