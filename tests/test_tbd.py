"""Attention modules: what they compute, what programs mean to them, well-formed or not, and the sum of attentions."""

import itertools

import numpy as np
import pytest
import torch
from batching_cases import assert_same, quick, results
from engine_cases import FULL_SIZE, INDEX, MANY_BL, TOKENS, any_programs, features, placed_copy, programs, small_engine
from hypothesis import example, given, settings
from tiny_data import build

from iep.execution_engine.choices import make_module_set
from iep.execution_engine.pooled import NEAR_ZERO
from iep.execution_engine.roles import tree_run
from iep.execution_engine.tbd import SameModule
from iep.execution_engine.trace import run_tree
from iep.programs import tokens_run
from iep.vocab import Vocab

IEP, TBD, POOLED = (
    make_module_set(name, dim=4, residual=True, norm="none", scene="module") for name in ("iep", "tbd", "pooled")
)


def default_engine(tokens, **kwargs):
    return build("engine", {"program_tokens": tokens, "num_answers": 28} | FULL_SIZE | kwargs)


def test_the_default_engine_has_the_published_layers():
    """Mascharka et al. 2018, table 1, for 128 channels."""
    shapes = {name: tuple(value.shape) for name, value in default_engine(TOKENS, modules="tbd").state_dict().items()}
    layers = {
        "stem.0": (128, 1024, 3, 3),
        "stem.2": (128, 128, 3, 3),
        "classifier.0": (512, 128, 1, 1),
        "classifier.4": (1024, 512 * 7 * 7),
        "classifier.6": (28, 1024),
        "filter_color[red].conv3": (1, 128, 1, 1),
        "relate[left].conv6": (1, 128, 1, 1),
        "same_shape.conv": (1, 129, 1, 1),
    }
    convolutions = {"filter_color[red]": 2, "count": 2, "exist": 2, "query_size": 2, "relate[left]": 5}
    convolutions |= {"equal_integer": 2, "greater_than": 2}
    for token, count in convolutions.items():
        layers |= {f"{token}.conv{number + 1}": (128, 128, 3, 3) for number in range(count)}
    layers |= {f"{token}.projection": (128, 256, 1, 1) for token in ("equal_integer", "greater_than")}
    expected = {f"{layer}.weight": shape for layer, shape in layers.items()}
    expected |= {f"{layer}.bias": shape[:1] for layer, shape in layers.items()}
    assert shapes == expected


def test_modules_compute_what_the_paper_says():
    engine = small_engine(modules="tbd")
    x, y = torch.randn(2, 1, 3, 3, 4, dtype=torch.float64)
    a, b = torch.rand(2, 1, 1, 3, 4, dtype=torch.float64)
    look, query, compare = (engine.get_submodule(name) for name in ("filter_color[red]", "count", "greater_than"))
    inner = torch.relu(look.conv2(torch.relu(look.conv1(x * a))))
    torch.testing.assert_close(look(x, a), torch.sigmoid(look.conv3(inner)))
    torch.testing.assert_close(query(x, a), torch.relu(query.conv2(torch.relu(query.conv1(x * a)))))
    joined = torch.relu(compare.projection(torch.cat([x, y], dim=1)))
    torch.testing.assert_close(compare(x, y), torch.relu(compare.conv2(torch.relu(compare.conv1(joined)))))
    assert engine.get_submodule("intersect")(a, b).equal(torch.where(a < b, a, b))
    assert engine.get_submodule("union")(a, b).equal(torch.where(a < b, b, a))


def test_every_function_of_clevr_has_its_module_and_scene_unique_and_special_tokens_have_none():
    tokens = Vocab.clevr().program
    with torch.device("meta"):
        engine = default_engine(tokens, modules="tbd")
    kinds = {token: type(getattr(engine, token)).__name__ for token in engine.parts[1:-1]}
    assert set(tokens) - set(kinds) == {"scene", "unique", "<NULL>", "<START>", "<END>", "<UNK>"}
    named = {"filter_size[large]": "Attention", "relate[behind]": "Relate", "same_material": "Same"}
    named |= {"query_color": "Query", "exist": "Query", "count": "Query", "intersect": "And", "union": "Or"}
    named |= {"equal_integer": "Comparison", "equal_shape": "Comparison", "greater_than": "Comparison"}
    assert {token: kinds[token] for token in named} == {token: f"{kind}Module" for token, kind in named.items()}


@pytest.mark.parametrize(("modules", "own"), [("tbd", TBD), ("pooled", POOLED)])
@given(programs_BL=any_programs)
@example(programs_BL=MANY_BL)
@settings(quick, max_examples=12)
def test_scene_in_the_place_of_values_of_the_wrong_kind_changes_nothing_and_leaves_none(modules, own, programs_BL):
    engine = small_engine(modules=modules, module_dim=4)
    for program_L in programs_BL:
        fitting = tokens_run(tree_run([TOKENS[token] for token in program_L], own))
        assert not any(node.unused for node in tree_run(fitting, own).nodes)
        fitting_BL = programs(" ".join(fitting))
        assert torch.equal(*(engine.reference(features(1), each) for each in (program_L[None], fitting_BL)))
        ours, theirs = (engine.plan(each).graph.op for each in (program_L[None], fitting_BL))
        ours, theirs = (op[op != INDEX["scene"]].tolist() for op in (ours, theirs))
        assert ours == theirs, "what leads to nothing does not run"


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("query_size unique filter_color[red] scene", [""] * 4),
        ("greater_than count scene scene", [""] * 4),
        ("scene", [""]),
        ("filter_color[red] scene", ["not used: an attention, not an encoding", "not used"]),
        ("unique filter_color[red] scene", ["not used: an attention, not an encoding", "not used", "not used"]),
        ("count unique count scene", ["", "not used: an encoding, not an attention", "not used", "not used"]),
        (
            "equal_integer count scene filter_color[red] count scene",
            ["", "", "", "not used: an attention, not an encoding", "not used", "not used"],
        ),
    ],
)
def test_values_of_the_wrong_kind_and_what_leads_to_them_are_not_used(program, expected):
    def unused(own):
        return [node.unused for node in tree_run(program.split(), own).nodes]

    assert unused(TBD) == expected
    assert unused(POOLED) == [reason.replace("an encoding", "a vector") for reason in expected]
    assert not any(unused(IEP))


# The sum of attentions


def test_same_takes_the_place_where_each_examples_own_attention_is_greatest():
    torch.manual_seed(0)
    module = SameModule(3)
    features_GCHW, attention_G1HW = torch.randn(2, 3, 2, 2), torch.zeros(2, 1, 2, 2)
    for row, y, x in ((0, 0, 1), (0, 1, 0), (1, 1, 1)):  # the first of two counts
        attention_G1HW[row, 0, y, x] = 0.5
    weight, bias = module.conv.weight[0, :, 0, 0], module.conv.bias
    for row, (y, x) in enumerate([(0, 1), (1, 1)]):
        thing = features_GCHW[row, :, y, x]
        score = torch.einsum("c,chw->hw", weight[:3] * thing, features_GCHW[row]) + weight[3] * attention_G1HW[row, 0]
        by_hand = torch.sigmoid(score + bias)
        torch.testing.assert_close(module(features_GCHW, attention_G1HW)[row, 0], by_hand)


def test_same_begins_as_an_attention_to_what_is_similar_and_not_attended():
    module = default_engine(TOKENS, modules="tbd").get_submodule("same_shape")
    features_1CHW, attention_11HW = torch.zeros(1, 128, 2, 2), torch.zeros(1, 1, 2, 2)
    features_1CHW[0, :64, 0] = features_1CHW[0, 64:, 1, 0] = 1.5  # two alike above, another on the left below
    attention_11HW[..., 0, 0] = 1
    (attended, alike), (other, empty) = module(features_1CHW, attention_11HW)[0, 0].tolist()
    assert alike > 0.5 > max(attended, other, empty)


def test_a_pooled_filter_can_only_narrow_an_attention():
    torch.manual_seed(0)
    features_GCHW, attention_G1HW = torch.randn(2, 4, 3, 5), torch.rand(2, 1, 3, 5)
    module = POOLED.make("filter_color[red]")
    ours = module(features_GCHW, attention_G1HW)
    assert ((ours > 0) & (ours < attention_G1HW)).all()
    gate = module(features_GCHW, torch.ones(2, 1, 3, 5))  # which reads the features alone
    torch.testing.assert_close(ours, attention_G1HW * gate)


def test_a_pooled_relation_depends_on_the_attended_position():
    torch.manual_seed(0)
    module, features_GCHW, attention_G1HW = (
        POOLED.make("relate[left]"),
        torch.zeros(2, 4, 5, 5),
        torch.zeros(2, 1, 5, 5),
    )
    attention_G1HW[0, 0, 2, 0] = attention_G1HW[1, 0, 2, 4] = 1
    with torch.no_grad():  # keep the horizontal offset alone
        for conv in (module.conv1, module.conv2, module.conv3):
            conv.weight.zero_()
            conv.bias.zero_()
        module.conv1.weight[0, 5], module.conv2.weight[0, 0], module.conv3.weight[0, 0] = -1, 1, 1
    left, right = module(features_GCHW, attention_G1HW)[:, 0, 2]
    assert (left < 0.51).all(), "nothing is left of the leftmost position"
    assert (right[:-1] > 0.8).all()


def test_a_pooled_sameness_compares_with_the_mean_of_the_attended_features():
    torch.manual_seed(0)
    module, features_GCHW, attention_G1HW = POOLED.make("same_shape"), torch.randn(1, 4, 2, 3), torch.zeros(1, 1, 2, 3)
    attention_G1HW[0, 0, 0, :2] = 0.5
    other_GC11 = module.embedding(features_GCHW[..., :1, :2].mean((2, 3), keepdim=True)) * (1 / (1 + NEAR_ZERO))
    own_GCHW = module.embedding(features_GCHW)
    compared = torch.cat([own_GCHW * other_GC11, (own_GCHW - other_GC11).abs(), own_GCHW, attention_G1HW], dim=1)
    by_hand = torch.sigmoid(module.conv2(torch.relu(module.conv1(compared))))
    torch.testing.assert_close(module(features_GCHW, attention_G1HW), by_hand)


@pytest.mark.parametrize("modules", ["tbd", "pooled"])
@given(programs_BL=any_programs)
@example(programs_BL=MANY_BL)
@settings(quick, max_examples=10)
def test_the_sum_of_attentions_and_its_gradients_are_the_references(modules, programs_BL):
    """Also with sharing and on several devices."""
    engine, rows_B = small_engine(modules=modules, module_dim=4), np.arange(len(programs_BL)) // 2
    penalized = {token for token, role in zip(TOKENS, engine.roles, strict=True) if role and role.is_penalized}

    def reference(x):
        results, penalty = [], torch.zeros((), dtype=x.dtype)
        for row, stem in zip(programs_BL.tolist(), engine.stem(x[rows_B]).split(1), strict=True):
            tree = tree_run([TOKENS[token] for token in row], engine.module_set)
            values, result = run_tree(engine, tree, stem)
            results.append(result)
            counted = [node.token in penalized and not node.unused for node in tree.nodes]
            penalty = penalty + sum(
                value.sum() for value, is_counted in zip(values, counted, strict=True) if is_counted
            )
        return torch.cat([engine.classifier(torch.cat(results)).flatten(), 3 * penalty[None]])

    features_NCHW = features(rows_B[-1] + 1)
    expected = results(reference, engine, features_NCHW)
    placed = placed_copy(engine, ("cpu", "cpu", "cpu"))
    for net, name, sharing in itertools.product((engine, placed), ("vanilla", "lookahead"), (False, True)):
        plan = net.plan(programs_BL, rows_B, name, sharing, attentions=True)

        def run(x, net=net, plan=plan):
            logits, attention = net.forward_with_attentions(x, plan)
            return torch.cat([logits.flatten(), 3 * attention[None]])

        assert_same(results(run, net, features_NCHW), expected, 1e-9)
    assert engine.forward_with_attentions(features_NCHW, engine.plan(programs_BL, rows_B))[1] == 0
