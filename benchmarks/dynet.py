"""Compare DyNet with automatic batching and iep on trees and sentences in one run.

The networks are Tree-LSTM, Tree-FC and a BiLSTM tagger. DyNet (`pip install dynet38`) batches operations on the fly
(Neubig et al. 2017, On-the-fly Operation Batching). Its networks have a matrix for each gate, which is faster there
than one for all gates. All competitors have the same weights, minibatches and losses.
"""

from collections.abc import Sequence

import numpy as np

from benchmarks.networks import PER_INSTANCE, Way, minibatches_of, network_cases, ways_of
from benchmarks.tagger import LETTERS, TAGS, Tagger, tagger_ways, wikiner_like
from benchmarks.trees import BinaryTreeLSTM, TreeFC, complete_trees, sst_like
from iep.bench.compare import MIN_SAMPLES, Benchmark
from iep.bench.strategy import PHASES, parse_strategies
from iep.errors import InputError

try:
    import dynet_config

    dynet_config.set(autobatch=True, mem=2048)
    import dynet as dy
except ImportError:
    dy = None

WORDS, WIDTH = 16_000, 256
NETWORKS = {
    "tree-lstm": (BinaryTreeLSTM, ways_of, lambda count, rng: sst_like(count, WORDS, rng)),
    "tree-fc": (TreeFC, ways_of, lambda count, rng: complete_trees(count, 256, WORDS, rng)),
    "tagger": (
        lambda words, width: Tagger(words, TAGS, None, width=width),
        tagger_ways,
        lambda count, rng: wikiner_like(count, WORDS, TAGS, LETTERS, rng),
    ),
}


def dynet(network: str, batch_sizes: Sequence[int]) -> Benchmark:
    """Return the comparisons of a network at every minibatch size.

    Raises:
        InputError: DyNet is not installed.
    """
    if dy is None:
        raise InputError("DyNet is not installed: pip install dynet38")
    make, other_ways, draw = NETWORKS[network]
    model = make(WORDS, WIDTH)
    samples = draw(max(*batch_sizes, MIN_SAMPLES), np.random.default_rng(0))
    ways = {"DyNet": dynet_way(network, model), **other_ways(model, parse_strategies("lookahead,lookahead+defer"))}
    del ways[PER_INSTANCE]
    losses = {each: way.compute(way.construct(samples[:2]), True) for each, way in ways.items()}
    assert np.allclose([*losses.values()], losses["DyNet"], rtol=1e-3), losses
    cases = network_cases(model, ways, minibatches_of(samples, batch_sizes), PHASES)
    return Benchmark(f"{network}, width {WIDTH}, {WORDS} words", cases, "sample")


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
        weights = zip(model.lstm.inputs, model.lstm.recurrent, strict=True)
        ways = [layers(4, of_x.bias, of_x.weight, of_h.weight) for of_x, of_h in weights]

        def run(gates, xs, state=()):
            return [(state := lstm(gates, [x, *state[:1]], state[1:]))[0] for x in xs]

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
            leaf, (out,) = (layers(n, of.bias, of.weight) for n, of in ((3, model.leaf), (1, model.head)))
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

    return Way(construct, lambda loss, training: (loss.value(), training and loss.backward())[0])
