"""Networks batched by hand equal one sample after the other; limits are made of the very products; figures add up."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from iep.bench import contest
from iep.bench.contest import FLOP_LIMIT, INFERENCE, LIMIT, PER_INSTANCE, TRAINING, Samples, Way, compare
from iep.bench.contest_report import HEADINGS, format_comparison
from iep.bench.hand_tagger import PackedTagger, pack
from iep.bench.hand_trees import HandTreeFC, HandTreeLSTM
from iep.bench.limit import Layer, flop, products, tagger_layers, tree_fc_layers, tree_lstm_layers
from iep.bench.measure import Effort
from iep.bench.samples import child_sum_samples, tagger_samples, tree_fc_samples, tree_lstm_samples
from iep.bench.tree_levels import levels_of
from iep.workloads.sentences import Sentence, wikiner_like
from iep.workloads.trees import Tree, complete_trees, sick_like, sst_like

WORDS, WIDTH, CLASSES, TAGS = 20, 6, 5, 4
LONE = Tree(np.array([[-1, -1]]), np.array([3]), 2)
ONCE = Effort(repeat=1, max_seconds=0)


@pytest.fixture
def rng() -> np.random.Generator:
    torch.manual_seed(0)
    return np.random.default_rng(0)


def tree_lstm_of(model: HandTreeLSTM, tree: Tree) -> Tensor:
    """(1, C) by Tai et al. 2015, section 3.2, vertex by vertex."""
    states: list[tuple[Tensor, Tensor]] = []
    for children, word in zip(tree.children, tree.words, strict=True):
        if word >= 0:
            i, o, u = model.leaf(model.embedding.weight[word]).chunk(3)
            c = i.sigmoid() * u.tanh()
        else:
            (h_left, c_left), (h_right, c_right) = (states[child] for child in children)
            i, o, f_left, f_right, u = model.inner(torch.cat([h_left, h_right])).chunk(5)
            c = i.sigmoid() * u.tanh() + f_left.sigmoid() * c_left + f_right.sigmoid() * c_right
        states.append((o.sigmoid() * c.tanh(), c))
    return model.classifier(states[-1][0])[None]


def tree_fc_of(model: HandTreeFC, tree: Tree) -> Tensor:
    made: list[Tensor] = []
    for children, word in zip(tree.children, tree.words, strict=True):
        if word >= 0:
            made.append(model.embedding.weight[word])
        else:
            made.append(model.inner(torch.cat([made[child] for child in children])).relu())
    return made[-1][None]


def gradients(model: nn.Module, results: Tensor) -> list[Tensor]:
    model.zero_grad()
    results.sin().sum().backward()
    found = [parameter.grad for parameter in model.parameters()]
    return [gradient.to_dense() if gradient.is_sparse else gradient for gradient in found]


def assert_same(model: nn.Module, by_hand: Tensor, one_by_one: Tensor) -> None:
    torch.testing.assert_close(by_hand, one_by_one, rtol=0, atol=1e-12)
    for gradient, expected in zip(gradients(model, by_hand), gradients(model, one_by_one), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


# By hand


def test_a_tree_lstm_by_hand_equals_one_tree_after_the_other(rng: np.random.Generator):
    trees = [*sst_like(9, WORDS, rng), LONE]
    model = HandTreeLSTM(WORDS, WIDTH, CLASSES).double()
    assert_same(model, model(levels_of(trees)), torch.cat([tree_lstm_of(model, tree) for tree in trees]))


def test_lone_leaves_need_no_level_above(rng: np.random.Generator):
    model = HandTreeLSTM(WORDS, WIDTH, CLASSES).double()
    levels = levels_of([LONE, LONE])
    assert levels.rows == [2]
    torch.testing.assert_close(model(levels), tree_lstm_of(model, LONE).expand(2, -1))


@pytest.mark.parametrize("leaves", [2, 7, 16])
def test_tree_fc_by_hand_equals_one_tree_after_the_other(rng: np.random.Generator, leaves: int):
    trees = complete_trees(5, leaves, WORDS, rng)
    model = HandTreeFC(WORDS, WIDTH).double()
    assert_same(model, model(levels_of(trees)), torch.cat([tree_fc_of(model, tree) for tree in trees]))


def test_a_level_is_all_vertices_of_a_height(rng: np.random.Generator):
    trees = complete_trees(3, 8, WORDS, rng)
    assert levels_of(trees).rows == [24, 12, 6, 3]


def test_packed_sentences_are_tagged_as_each_by_itself(rng: np.random.Generator):
    sentences = wikiner_like(7, WORDS, TAGS, rng)
    model = PackedTagger(WORDS, TAGS, 5, WIDTH, 3).double()
    alone = [model(pack([sentence])) for sentence in sentences]
    packed = pack(sentences)
    order = np.lexsort((_ranks(sentences), _steps(sentences)))
    assert packed.tags.tolist() == np.concatenate([each.tags for each in sentences])[order].tolist()
    assert_same(model, model(packed), torch.cat(alone)[torch.from_numpy(order)])


def _steps(sentences: Sequence[Sentence]) -> np.ndarray:
    return np.concatenate([np.arange(len(sentence)) for sentence in sentences])


def _ranks(sentences: Sequence[Sentence]) -> np.ndarray:
    """Of each word, how many sentences come before its own, the longest first."""
    lengths = [len(sentence) for sentence in sentences]
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    return np.concatenate([np.full(lengths[n], order.index(n)) for n in range(len(lengths))])


# Limits


def test_a_limits_operations_are_those_of_its_products():
    layer = Layer(inputs=3, outputs=5, rows=(4, 2))
    assert layer.flop == 2 * 3 * 5 * 6
    assert flop([layer], training=True) == 3 * layer.flop
    assert flop([Layer(3, 5, (4, 2), input_gradients=False)], training=True) == 2 * layer.flop


def test_every_product_of_a_limit_has_its_networks_sizes(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch):
    sizes: list[tuple[int, ...]] = []
    monkeypatch.setattr(torch, "mm", lambda a, b, out: sizes.append((*a.shape, b.shape[1], *out.shape)))
    layers = tree_fc_layers(levels_of(complete_trees(2, 4, WORDS, rng)).rows, WIDTH)
    products(layers, training=True)()
    forward = [(rows, 2 * WIDTH, WIDTH, rows, WIDTH) for rows in (4, 2)]
    back = [(rows, WIDTH, 2 * WIDTH, rows, 2 * WIDTH) for rows in (2, 4)]
    assert sizes == [*forward, *back, (WIDTH, 6, 2 * WIDTH, WIDTH, 2 * WIDTH)]


def test_operations_are_those_that_the_network_by_hand_runs(rng: np.random.Generator):
    trees, sentences = sst_like(4, WORDS, rng), wikiner_like(4, WORDS, TAGS, rng)
    lstm, fc = HandTreeLSTM(WORDS, WIDTH, CLASSES), HandTreeFC(WORDS, WIDTH)
    levels = levels_of(trees)
    assert flop(tree_lstm_layers(levels.rows, 4, WIDTH, CLASSES), False) == _flop_of(lstm, levels)
    assert flop(tree_fc_layers(levels.rows, WIDTH), False) == _flop_of(fc, levels)
    layers = tagger_layers([len(sentence) for sentence in sentences], 5, WIDTH, 3, TAGS)
    words = sum(map(len, sentences))
    recurrent = 2 * 2 * words * (5 + WIDTH) * 4 * WIDTH
    assert flop(layers, False) == recurrent + 2 * words * (2 * WIDTH * 3 + 3 * TAGS)


def _flop_of(model: nn.Module, levels: object) -> int:
    """Operations of all linear layers that a call of `model` runs."""
    count = 0

    def add(layer: nn.Linear, arguments: tuple[Tensor], result: Tensor) -> None:
        nonlocal count
        count += 2 * layer.in_features * result.numel()

    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(add)
    model(levels)
    return count


# Contests


def tiny_samples(batch: int = 2, count: int = 4) -> Samples:
    """Samples are numbers of cells."""
    minibatches = tuple([n + 1] * batch for n in range(count))
    layers = tuple([Layer(2, 2, (2,))] for _ in minibatches)
    return Samples(minibatches, layers, cells_of=int, setting={"batch": batch})


def way(name: str, log: list | None = None, **options: object) -> Way:
    def compute(plan: Sequence[int], training: bool) -> None:
        if log is not None:
            log.append((name, tuple(plan), training))

    return Way(name, construct=list, compute=compute, **options)


def test_ways_take_turns_and_each_runs_every_minibatch_in_every_round():
    log: list = []
    samples = tiny_samples()
    effort = Effort(repeat=2, max_seconds=100)
    comparison = compare([way("a", log), way("b", log)], samples, TRAINING, 1, effort)
    each = [[(name, (n, n), True) for n in (1, 2, 3, 4)] for name in ("a", "b")]
    assert log == [*each[0], *each[1]] * 3  # once to warm up
    assert [row.name for row in comparison.rows] == ["a", "b", LIMIT, FLOP_LIMIT]
    assert all(row.computation.repeats == 2 for row in comparison.rows[:-1])


def test_figures_of_a_row_follow_from_its_times(monkeypatch: pytest.MonkeyPatch):
    times = iter([9.0, 9.0, 9.0, 9.0, 9.0, 1.0, 3.0, 0.5, 1.5, 1.0])  # the first five to warm up
    monkeypatch.setattr(contest, "seconds", lambda run, devices: (run(), next(times))[1])
    monkeypatch.setattr(contest, "fastest_product", lambda repeats=3: 64.0)
    ways = [way(PER_INSTANCE, calls=sum), way("batched", calls=lambda plan: 1)]
    samples = tiny_samples(batch=2, count=1)
    comparison = compare(ways, samples, INFERENCE, 1, ONCE)
    one, batched, limit, operations = comparison.rows
    assert (one.construction.median, one.computation.median, one.samples_per_second.median) == (1.0, 3.0, 0.5)
    assert (one.calls, one.batching_ratio, one.speedup, one.share_of_limit) == (2, 1, 1, 0.25)
    assert (batched.calls, batched.batching_ratio, batched.speedup, batched.share_of_limit) == (1, 2, 2, 0.5)
    assert (comparison.flop, comparison.flop_per_second) == (16, 64)
    assert (operations.computation.median, operations.share_of_limit, batched.share_of_flop_limit) == (0.25, 4, 0.125)
    assert (limit.construction, limit.samples_per_second.median, limit.share_of_flop_limit) == (None, 2.0, 0.25)


def test_where_some_samples_are_enough_the_time_of_all_is_reckoned_by_their_cells(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(contest, "seconds", lambda run, devices: (run(), 1.0)[1])
    log: list = []
    samples = Samples(([2, 2, 4, 8],), ([Layer(1, 1, (1,))],), int, {"batch": 4})
    comparison = compare([way("one", log, enough_cells=4, calls=sum)], samples, INFERENCE, 1, ONCE)
    assert {entry[1] for entry in log} == {(2, 2)}
    row = comparison.rows[0]
    assert (row.computation.median, row.calls, row.samples_per_second.median) == (4.0, 16, 0.5)


def test_a_way_that_is_for_training_is_not_measured_in_inference():
    ways = [way("a"), way("b", phases=(TRAINING,))]
    names = [row.name for row in compare(ways, tiny_samples(), INFERENCE, 1, ONCE).rows]
    assert names == ["a", LIMIT, FLOP_LIMIT]


def test_a_table_has_a_line_a_row():
    lines = format_comparison(compare([way("a")], tiny_samples(), TRAINING, 1, ONCE)).splitlines()
    assert len(lines) == 1 + 1 + 3
    assert lines[0].startswith("training, batch 2, 1 thread: 5 cells and 4.8e-08 GFLOP a minibatch")
    assert all(heading in lines[1] for heading in HEADINGS)


def test_samples_make_small_minibatches_of_many_samples_and_large_ones_of_all(rng: np.random.Generator):
    trees = sst_like(70, WORDS, rng)
    assert [len(tree_lstm_samples(trees, size, WIDTH, CLASSES).minibatches) for size in (1, 16, 64, 70)] == [
        64,
        4,
        1,
        1,
    ]
    sentences = wikiner_like(8, WORDS, TAGS, rng)
    samples = tagger_samples(sentences, 4, 5, WIDTH, 3, TAGS)
    assert samples.cells == sum(map(len, sentences))  # two cells a word, two minibatches
    full = tree_fc_samples(complete_trees(2, 8, WORDS, rng), 2, WIDTH)
    assert (full.cells, full.setting) == (14, {"leaves": 8, "batch": 2})


def test_training_losses_of_hand_written_steps_leave_gradients(rng: np.random.Generator):
    from iep.bench.hand_ways import tree_lstm_by_hand

    model = HandTreeLSTM(WORDS, WIDTH, CLASSES)
    hand, trees = tree_lstm_by_hand(model), sst_like(3, WORDS, rng)
    levels = hand.construct(trees)
    loss = hand.compute(levels, True)
    expected = functional.cross_entropy(model(levels), torch.tensor([tree.label for tree in trees]), reduction="sum")
    torch.testing.assert_close(loss, expected.detach())
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert hand.calls(levels) == len(levels.rows)


def test_letters_of_spelled_words_are_cells_and_products_too(rng: np.random.Generator):
    sentences = wikiner_like(6, WORDS, TAGS, rng, characters=9)
    letters = sum(len(word) for sentence in sentences for word in sentence.characters)
    plain, spelled = (tagger_samples(sentences, 6, 4, WIDTH, 3, TAGS, size) for size in (None, 8))
    assert letters > 0
    assert spelled.cells - plain.cells == 2 * letters
    more = flop(spelled.layers[0], False) - flop(plain.layers[0], False)
    assert more == 2 * letters * 2 * (8 + 2) * 4 * 2  # an LSTM each way of width 2


def test_a_child_sum_cell_has_a_product_for_itself_and_one_for_each_child(rng: np.random.Generator):
    pairs = sick_like(3, WORDS, rng)
    samples = child_sum_samples(pairs, 3, 7, WIDTH, 2, 5)
    trees = [tree for pair in pairs for tree in (pair.left, pair.right)]
    vertices = sum(map(len, trees))
    inner = sum(int((tree.children[:, 0] >= 0).sum()) for tree in trees)
    words, cells, edges, *scores = samples.layers[0]
    assert (samples.cells, words.rows, sum(cells.rows), sum(edges.rows)) == (vertices, (vertices,), inner, vertices - 6)
    assert (
        flop([words, cells, edges], False)
        == 2 * (vertices * 7 * 4 + inner * WIDTH * 3 + (vertices - 6) * WIDTH) * WIDTH
    )
    assert flop(scores, False) == 2 * 3 * (2 * WIDTH * 2 + 2 * 5)


def test_construction_within_the_computation_is_told_apart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(contest, "seconds", lambda run, devices: (run(), 2.0)[1])
    row = compare([way("a", constructed_within=lambda: 0.5)], tiny_samples(), TRAINING, 1, ONCE).rows[0]
    assert (row.construction.median, row.computation.median) == (2.5, 1.5)


def test_all_calls_of_one_sample_after_the_other_are_its_cells():
    row = compare([way(PER_INSTANCE)], tiny_samples(), TRAINING, 1, ONCE).rows[0]
    assert (row.calls, row.batching_ratio) == (5, 1)
