"""Compare DyNet with automatic batching, batching by hand in PyTorch, and iep on trees and sentences in one run.

`pip install dynet38`, then `OMP_NUM_THREADS=1 python scripts/compare_dynet.py --out runs/dynet`. The networks are
Tree-LSTM, Tree-FC and a BiLSTM tagger. DyNet batches operations on the fly (Neubig et al. 2017, On-the-fly Operation
Batching). Its networks have a matrix for each gate, which is faster there than one for all gates. All competitors have
the same weights, minibatches and losses, take turns, and use one thread.
"""

import sys
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

from iep.bench.compare import MIN_SAMPLES, Effort
from iep.bench.measure_networks import (
    TAGS,
    Way,
    binary_network,
    minibatches_of,
    network_cases,
    tagger_network,
    tree_fc_network,
)
from iep.bench.strategy import PHASES, parse_strategies
from iep.bench.tables import Benchmark, result_files, run_benchmark
from iep.cli.options import CommaList
from iep.workloads import sentences, trees

try:
    import dynet_config

    dynet_config.set(autobatch=True, mem=2048)
    import dynet as dy
except ImportError:
    dy = None

OURS = (16_000, 256, parse_strategies("lookahead,lookahead+defer"))
NETWORKS = {
    "tree-lstm": (binary_network, lambda count, rng: trees.sst_like(count, OURS[0], rng)),
    "tree-fc": (tree_fc_network, lambda count, rng: trees.complete_trees(count, 256, OURS[0], rng)),
    "tagger": (tagger_network, lambda count, rng: sentences.wikiner_like(count, OURS[0], TAGS, rng)),
}


def affine(parameters, *xs):
    """Return bias + matrix x + ..., for as many of the matrices as there are vectors."""
    return dy.affine_transform([parameters[0], *(x for pair in zip(parameters[1:], xs, strict=False) for x in pair)])


def lstm(gates, hs, cs=()):
    """Return h and c from gates i, o, forgets, u, and the states before."""
    i, o, *forgets, u = (affine(gate, *hs) for gate in gates)
    pairs = ((i, dy.tanh(u)), *((f, c) for f, c in zip(forgets, cs)))  # noqa: B905
    c = dy.esum([dy.cmult(dy.logistic(gate), value) for gate, value in pairs])
    return dy.cmult(dy.logistic(o), dy.tanh(c)), c


def dynet_way(name, model):
    """Return the way to run a network in DyNet, with parameters copied from `model`."""
    collection = dy.ParameterCollection()
    words = collection.lookup_parameters_from_numpy(model.embedding.weight.detach().numpy())

    def layers(count, *parameters):
        """Return `count` layers, each of which has an equal part of the rows of a bias and weights."""
        parts = ([part.contiguous().numpy() for part in each.detach().chunk(count)] for each in parameters)
        return [list(map(collection.parameters_from_numpy, each)) for each in zip(*parts, strict=True)]

    if name == "tagger":
        (hidden,), (tags,) = (layers(1, of.bias, of.weight) for of in (model.hidden, model.tags))
        ways = [layers(4, b_x + b_h, w_x, w_h) for w_x, w_h, b_x, b_h in model.lstm.all_weights]

        def run(gates, xs, state=()):
            return [(state := lstm([gates[n] for n in (0, 3, 1, 2)], [x, *state[:1]], state[1:]))[0] for x in xs]

        def loss_of(sentence):
            xs = [words[word] for word in sentence.words.tolist()]
            hs = map(dy.concatenate, map(list, zip(run(ways[0], xs), run(ways[1], xs[::-1])[::-1], strict=True)))
            scores = (affine(tags, dy.tanh(affine(hidden, h))) for h in hs)
            return dy.esum(list(map(dy.pickneglogsoftmax, scores, sentence.tags.tolist())))

    else:
        bias, *weights = model.inner.bias, *model.inner.weight.chunk(2, dim=1)
        if name == "tree-fc":
            (full,) = layers(1, bias, *weights)
            steps = words.__getitem__, lambda *pair: dy.rectify(affine(full, *pair)), lambda h, _: dy.sum_elems(h)
        else:
            leaf, (out,) = (layers(n, of.bias, of.weight) for n, of in ((3, model.leaf), (1, model.classifier)))
            inner = layers(5, bias, *weights)
            steps = (
                lambda word: lstm(leaf, [words[word]]),
                lambda *pair: lstm(inner, *zip(*pair, strict=True)),
                lambda state, label: dy.pickneglogsoftmax(affine(out, state[0]), label),
            )

        def loss_of(tree):
            made, (of_leaf, of_inner, of_root) = [], steps
            for (left, right), word in zip(tree.children.tolist(), tree.words.tolist(), strict=True):
                made.append(of_leaf(word) if left < 0 else of_inner(made[left], made[right]))
            return of_root(made[-1], tree.label)

    def construct(samples, collection=collection):
        dy.renew_cg()
        return dy.esum(list(map(loss_of, samples)))

    return Way("DyNet", construct, lambda loss, training: (loss.value(), training and loss.backward())[0])


@click.command()
@click.option("--networks", "names", type=CommaList(click.Choice(list(NETWORKS))), default=",".join(NETWORKS))
@click.option("--batch-sizes", type=CommaList(click.IntRange(min=1)), default="1,16,64,256", show_default=True)
@click.option("--repeat", type=click.IntRange(min=1), default=7, show_default=True, help="Rounds of measuring.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Directory for NETWORK.json, .txt, .png.")
def main(names, batch_sizes, repeat, out):
    """Compare DyNet, PyTorch and iep on one thread."""
    if dy is None:
        raise click.ClickException("DyNet is not installed: pip install dynet38")
    for name in names:
        make, draw = NETWORKS[name]
        network, samples = make(*OURS), draw(max(*batch_sizes, MIN_SAMPLES), np.random.default_rng(0))
        network = replace(network, ways=[dynet_way(name, network.model), *network.ways[1:]])
        losses = {way.name: way.compute(way.construct(samples[:2]), True) for way in network.ways}
        assert np.allclose([*losses.values()], losses["DyNet"], rtol=1e-3), losses
        cases = network_cases(network, minibatches_of(samples, batch_sizes), PHASES)
        benchmark, effort = Benchmark(name, cases, "batch", "sample"), Effort(repeat, 30.0)
        run_benchmark(benchmark, effort, " ".join(["python", *sys.argv]), result_files(out, name))


if __name__ == "__main__":
    main()
