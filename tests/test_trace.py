"""What every function of a program put out, and the maps made of it, against a plain computation."""

import numpy as np
import pytest
import torch
from batching_cases import quick
from hypothesis import example, given, settings
from tbd_cases import PROGRAMS_BL as ATTENTION_PROGRAMS_BL
from tbd_cases import any_programs as any_attention_programs
from tbd_cases import programs as attention_programs
from tbd_cases import tbd_engine
from test_engine import PROGRAMS_BL, any_programs, program, small_engine

from iep.asking.picture import saliency_maps, to_unit
from iep.execution_engine.trace import trace

FEATURES = torch.randn(1, 5, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
UNION = program("count", "union", "filter_color[red]", "scene", "relate[left]", "scene")


def by_hand(engine):
    """The outputs of the nodes of `UNION`, in prefix order, and the logits."""
    stem = engine.stem(FEATURES)
    scene = stem if engine.module_set.scene == "stem" else engine.scene(stem)
    red, left = getattr(engine, "filter_color[red]")(scene), getattr(engine, "relate[left]")(scene)
    union = engine.union(red, left)
    count = engine.count(union)
    return [count, union, red, scene, left, scene], engine.classifier(count)


@pytest.mark.parametrize("scene", ["module", "stem"])
@given(programs_BL=any_programs)
@settings(quick, max_examples=15)
def test_a_traced_program_gives_the_references_answer_well_formed_or_not(scene, programs_BL):
    engine = small_engine(scene)
    for program_L in programs_BL:
        traced = trace(engine, FEATURES, program_L.tolist())
        assert torch.equal(traced.logits, engine.reference(FEATURES, program_L[None]))
        assert len(traced.outputs) == len(traced.tree.nodes)


@pytest.mark.parametrize("scene", ["module", "stem"])
def test_every_node_has_its_own_modules_output(scene):
    engine = small_engine(scene)
    traced = trace(engine, FEATURES, UNION)
    outputs, logits = by_hand(engine)
    assert [node.token for node in traced.tree.nodes[:2]] == ["count", "union"]
    assert torch.equal(traced.logits, logits)
    for found, expected in zip(traced.outputs, outputs, strict=True):
        assert torch.equal(found, expected)


def test_the_batched_engine_gives_the_traced_answer():
    engine = small_engine().eval()
    for program_L in PROGRAMS_BL:
        batched = engine(FEATURES, engine.plan(np.array(program_L)[None]))
        assert torch.allclose(trace(engine, FEATURES, program_L.tolist()).logits, batched, atol=1e-12)


@pytest.mark.parametrize("scene", ["module", "stem"])
def test_norm_maps_are_norms_over_channels(scene):
    engine = small_engine(scene)
    outputs, _ = by_hand(engine)
    for found, output in zip(saliency_maps(trace(engine, FEATURES, UNION), "norm"), outputs, strict=True):
        assert torch.allclose(found, output[0].square().sum(0).sqrt().float())


@pytest.mark.parametrize("scene", ["module", "stem"])
def test_gradient_maps_are_norms_of_the_likeliest_answers_gradient(scene):
    engine = small_engine(scene)
    outputs, logits = by_hand(engine)
    for output in outputs:
        output.retain_grad()
    logits[0, logits.argmax()].backward()
    found = saliency_maps(trace(engine, FEATURES, UNION), "gradient")
    for place, output in enumerate(outputs[:3] + outputs[4:5]):
        number = [0, 1, 2, 4][place]
        assert torch.allclose(found[number], output.grad[0].square().sum(0).sqrt().float())
    if scene == "stem":  # one value, taken twice
        assert torch.allclose(found[3], outputs[3].grad[0].square().sum(0).sqrt().float())
        assert torch.equal(found[3], found[5])


def test_a_map_fills_zero_to_one_and_an_attention_stays_as_it_is():
    assert torch.equal(to_unit(torch.tensor([[1.0, 3.0], [2.0, 1.0]]), False), torch.tensor([[0.0, 1.0], [0.5, 0.0]]))
    assert torch.equal(to_unit(torch.full((2, 2), 4.0), False), torch.zeros(2, 2))
    assert torch.equal(to_unit(torch.tensor([[0.25, 0.5]]), True), torch.tensor([[0.25, 0.5]]))


@given(programs_BL=any_attention_programs)
@example(programs_BL=ATTENTION_PROGRAMS_BL)
@settings(quick, max_examples=15)
def test_attention_modules_are_traced_too_well_formed_or_not(programs_BL):
    engine = tbd_engine()
    for program_L in programs_BL:
        traced = trace(engine, FEATURES, program_L.tolist())
        assert torch.equal(traced.logits, engine.reference(FEATURES, program_L[None]))
        for saliency in ("norm", "gradient"):
            maps = saliency_maps(traced, saliency)
            assert [map_HW.shape for map_HW in maps] == [(3, 4)] * len(traced.tree.nodes)
            assert all(bool(map_HW.isfinite().all()) for map_HW in maps)


def test_a_function_without_module_shows_what_it_hands_on_and_the_scene_is_ones():
    engine = tbd_engine()
    (program_L,) = attention_programs("query_size unique filter_color[red] scene")
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
