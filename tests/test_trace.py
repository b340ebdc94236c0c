"""A trace has the output of every function of a program, and maps of it, that a plain computation gives."""

import hypothesis.strategies as st
import pytest
import torch
from batching_cases import quick
from engine_cases import ENGINES, MANY_BL, features, programs, programs_for, small_engine, tokens_of
from hypothesis import given, settings

from iep.execution_engine.trace import saliency_maps, to_unit, trace, unit_maps

FEATURES = features(1)
UNION = programs("count union filter_color[red] scene relate[left] scene")[0].tolist()


def by_hand(engine):
    """The outputs of the nodes of `UNION`, in prefix order, and the logits."""
    stem = engine.stem(FEATURES)
    scene = stem if engine.module_set.scene == "stem" else engine.scene(stem)
    red, left = getattr(engine, "filter_color[red]")(scene), getattr(engine, "relate[left]")(scene)
    union = engine.union(red, left)
    count = engine.count(union)
    return [count, union, red, scene, left, scene], engine.classifier(count)


@pytest.mark.parametrize("name", ENGINES)
@given(data=st.data())
@settings(quick, max_examples=15)
def test_a_traced_program_has_the_references_answer_and_a_map_for_every_function(name, data):
    engine = small_engine(**ENGINES[name])
    for program_L in data.draw(st.just(MANY_BL) | programs_for(tokens_of(name))):
        traced = trace(engine, FEATURES, program_L.tolist())
        assert torch.equal(traced.logits, engine.reference(FEATURES, program_L[None]))
        for saliency in ("norm", "gradient"):
            maps = saliency_maps(traced, saliency)
            shapes = {map_HW.shape for map_HW in maps}
            assert len(maps) == len(traced.tree.nodes)
            assert shapes <= ({(3, 4), (1, 1)} if name == "pooled" else {(3, 4)})
            assert all(bool(map_HW.isfinite().all()) for map_HW in maps)


@pytest.mark.parametrize("scene", ["module", "stem"])
def test_outputs_are_those_of_the_modules_and_maps_their_norms_or_the_likeliest_answers_gradients(scene):
    engine = small_engine(scene=scene)
    traced = trace(engine, FEATURES, UNION)
    outputs, logits = by_hand(engine)
    assert [node.token for node in traced.tree.nodes[:2]] == ["count", "union"]
    assert torch.equal(traced.logits, logits)
    for output in outputs:
        output.retain_grad()
    logits[0, logits.argmax()].backward()
    norms, gradients = saliency_maps(traced, "norm"), saliency_maps(traced, "gradient")
    for number, output in enumerate(outputs):
        assert torch.equal(traced.outputs[number], output)
        assert torch.allclose(norms[number], output[0].square().sum(0).sqrt().float())
        if scene == "stem" or number not in (3, 5):  # By hand, both scenes are one value, which a module makes twice.
            assert torch.allclose(gradients[number], output.grad[0].square().sum(0).sqrt().float())


def test_a_map_fills_zero_to_one_and_an_attention_stays_as_it_is():
    assert torch.equal(to_unit(torch.tensor([[1.0, 3.0], [2.0, 1.0]]), False), torch.tensor([[0.0, 1.0], [0.5, 0.0]]))
    assert torch.equal(to_unit(torch.full((2, 2), 4.0), False), torch.zeros(2, 2))
    assert torch.equal(to_unit(torch.tensor([[0.25, 0.5]]), True), torch.tensor([[0.25, 0.5]]))
    assert torch.equal(to_unit(torch.ones(2, 2), True), torch.zeros(2, 2))


def test_a_function_without_attention_shows_the_one_that_it_reads_and_the_scene_nothing():
    engine = small_engine(modules="tbd")
    (program_L,) = programs("greater_than count unique filter_color[red] scene count scene")
    traced = trace(engine, FEATURES, program_L.tolist())
    greater, count, unique, red, scene, other_count, other_scene = unit_maps(traced)
    attention = traced.outputs[3][0, 0].float()
    assert all(torch.equal(each, attention) for each in (count, unique, red))
    assert not any(each.any() for each in (scene, other_count, other_scene))
    assert torch.equal(greater, to_unit(traced.outputs[0][0].float().norm(dim=0), False))
    (gradient,) = torch.autograd.grad(traced.logits.max(), traced.outputs[1], retain_graph=True)
    assert torch.allclose(unit_maps(traced, "gradient")[1], to_unit(gradient[0].norm(dim=0), False).float())


def test_a_function_without_module_shows_what_it_hands_on_and_the_scene_is_ones():
    engine = small_engine(modules="tbd")
    (program_L,) = programs("query_size unique filter_color[red] scene")
    traced = trace(engine, FEATURES, program_L.tolist())
    query, unique, red, scene = traced.outputs
    stem = engine.stem(FEATURES)
    assert torch.equal(scene, torch.ones(1, 1, 3, 4, dtype=torch.float64))
    assert torch.equal(red, getattr(engine, "filter_color[red]")(stem, scene))
    assert unique is red
    assert torch.equal(query, engine.query_size(stem, red))
    norms = saliency_maps(traced, "norm")
    assert torch.allclose(norms[2], red[0, 0].float())
    gradients = saliency_maps(traced, "gradient")
    assert gradients[3].count_nonzero() == 0
    assert torch.equal(gradients[1], gradients[2])
    assert gradients[2].count_nonzero() > 0
