"""Tree-LSTM, Tree-FC and a BiLSTM tagger in DyNet with automatic batching, by hand in torch, and by iep, in one run.

`pip install dynet38`, then `OMP_NUM_THREADS=1 python scripts/compare_dynet.py --out runs/dynet`. DyNet batches what it
finds as it goes (Neubig et al. 2017, On-the-fly Operation Batching in Dynamic Computation Graphs). Its networks have a
matrix for each gate, which is faster there than one for all. All ways have the same weights and minibatches, take
turns, and use one thread; that their losses agree is checked first.
"""

import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import numpy as np
import torch

from iep.bench import networks, strategy, tagger, tree_fc, tree_lstm
from iep.bench.compare import MIN_SAMPLES, Effort
from iep.bench.report import Benchmark, result_files, run_benchmark
from iep.cli.options import CommaList
from iep.workloads.sentences import wikiner_like
from iep.workloads.trees import complete_trees, sst_like

try:
    import dynet_config

    dynet_config.set(autobatch=True, mem=2048)
    import dynet as dy
except ImportError:
    dy = None

OURS = (16_000, 256, strategy.parse_strategies("lookahead,lookahead+defer"))
NETWORKS = {
    "tree-lstm": (tree_lstm.binary_network, lambda count, rng: sst_like(count, OURS[0], rng)),
    "tree-fc": (tree_fc.tree_fc_network, lambda count, rng: complete_trees(count, 256, OURS[0], rng)),
    "tagger": (tagger.tagger_network, lambda count, rng: wikiner_like(count, OURS[0], tagger.TAGS, rng)),
}


def affine(parameters, *xs):
    """Return bias + matrix x + ..., for as many of the matrices as there are vectors."""
    pairs = zip(parameters[1:], xs)  # noqa: B905
    return dy.affine_transform([parameters[0], *(each for pair in pairs for each in pair)])


def lstm(gates, hs, cs=()):
    """Return h and c from gates i, o, forgets, u, and the states before."""
    i, o, *forgets, u = (affine(gate, *hs) for gate in gates)
    kept = [dy.cmult(dy.logistic(f), c) for f, c in zip(forgets, cs)]  # noqa: B905
    c = dy.esum([dy.cmult(dy.logistic(i), dy.tanh(u)), *kept])
    return dy.cmult(dy.logistic(o), dy.tanh(c)), c


def root(tree, leaf, inner):
    made = []
    for (left, right), word in zip(tree.children.tolist(), tree.words.tolist(), strict=True):
        made.append(leaf(word) if left < 0 else inner(made[left], made[right]))
    return made[-1]


def dynet_way(name, model):
    """Return DyNet's way to run a network, with the numbers of a model's parameters."""
    collection = dy.ParameterCollection()
    words = collection.lookup_parameters_from_numpy(model.embedding.weight.detach().numpy())

    def layers(count, *parameters):
        """Return the parameters of the layers that equal parts of the rows of a bias and weights are."""
        parts = ([part.contiguous().numpy() for part in each.detach().chunk(count)] for each in parameters)
        return [list(map(collection.parameters_from_numpy, each)) for each in zip(*parts, strict=True)]

    if name == "tagger":
        (hidden,), (tags,) = (layers(1, of.bias, of.weight) for of in (model.hidden, model.tags))
        ways = [layers(4, b_x + b_h, w_x, w_h) for w_x, w_h, b_x, b_h in model.lstm.all_weights]

        def run(gates, xs, state=()):
            i, f, u, o = gates
            return [(state := lstm((i, o, f, u), [x, *state[:1]], state[1:]))[0] for x in xs]

        def loss_of(sentence):
            xs = [words[word] for word in sentence.words.tolist()]
            hs = map(dy.concatenate, map(list, zip(run(ways[0], xs), run(ways[1], xs[::-1])[::-1], strict=True)))
            scores = (affine(tags, dy.tanh(affine(hidden, h))) for h in hs)
            return dy.esum(list(map(dy.pickneglogsoftmax, scores, sentence.tags.tolist())))

    else:
        inner = layers(5 if name == "tree-lstm" else 1, model.inner.bias, *model.inner.weight.chunk(2, dim=1))
        if name == "tree-lstm":
            leaf, (out,) = (layers(n, of.bias, of.weight) for n, of in ((3, model.leaf), (1, model.classifier)))

        def loss_of(tree):
            if name == "tree-fc":
                full = partial(affine, inner[0])
                return dy.sum_elems(root(tree, words.__getitem__, lambda *pair: dy.rectify(full(*pair))))
            h, _ = root(
                tree, lambda word: lstm(leaf, [words[word]]), lambda *pair: lstm(inner, *zip(*pair, strict=True))
            )
            return dy.pickneglogsoftmax(affine(out, h), tree.label)

    def construct(samples, _keep=collection):  # parameters last no longer than their collection
        dy.renew_cg()
        return dy.esum(list(map(loss_of, samples)))

    def compute(total, training):
        value = total.value()
        if training:
            total.backward()
        return value

    return networks.Way("DyNet", construct, compute)


@click.command()
@click.option("--networks", "names", type=CommaList(click.Choice(list(NETWORKS))), default=",".join(NETWORKS))
@click.option("--batch-sizes", type=CommaList(click.IntRange(min=1)), default="1,16,64,256", show_default=True)
@click.option("--repeat", type=click.IntRange(min=1), default=7, show_default=True, help="Rounds of measuring.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Directory for NETWORK.json, .txt, .png.")
def main(names, batch_sizes, repeat, out):
    """Compare with DyNet on one thread."""
    if dy is None:
        raise click.ClickException("DyNet is not installed: pip install dynet38")
    torch.manual_seed(0)
    for name in names:
        make, draw = NETWORKS[name]
        network, samples = make(*OURS), draw(max(*batch_sizes, MIN_SAMPLES), np.random.default_rng(0))
        network = replace(network, ways=[dynet_way(name, network.model), *network.ways[1:]])
        losses = {way.name: way.compute(way.construct(samples[:2]), True) for way in network.ways}
        if not np.allclose([*losses.values()], losses["DyNet"], rtol=1e-3):
            raise click.ClickException(f"losses differ: {losses}")
        sized = [({"batch": size}, networks.minibatches_of(samples, size)) for size in sorted(batch_sizes)]
        benchmark = Benchmark(name, networks.network_cases(network, sized, strategy.PHASES, (1,)), "batch", "sample")
        run_benchmark(benchmark, Effort(repeat, 30.0), shlex.join(["python", *sys.argv]), result_files(out, name))


if __name__ == "__main__":
    main()
