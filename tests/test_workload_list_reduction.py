"""List reduction: answers are right, and a batched and a placed network equal a walk token by token."""

import numpy as np
import torch

from iep.batching.execute import execute
from iep.workloads.list_reduction import DIGITS, ListReducer, list_reductions


def test_answers_are_the_reductions_modulo_ten():
    by_hand = [sum, min, max, lambda digits: (2 * sum(digits) + len(digits)) // (2 * len(digits))]
    sequences = list_reductions(400, np.random.default_rng(0))
    assert {int(each.tokens[0]) - DIGITS for each in sequences} == {0, 1, 2, 3}
    for each in sequences:
        kind, *digits = each.tokens.tolist()
        assert each.answer == by_hand[kind - DIGITS](digits) % 10


def test_batched_and_placed_networks_equal_the_walk():
    torch.manual_seed(0)
    sequences, model = list_reductions(9, np.random.default_rng(1)), ListReducer(8, layers=2)
    expected = torch.stack([model.one(each) for each in sequences])
    torch.testing.assert_close(model(sequences), expected)
    for workers in (1, 2, 3, 6):
        plan = model.plan(sequences, model.placement(workers))
        (actual,) = execute(plan, dict(enumerate(model.ops)), model.inputs(sequences))
        torch.testing.assert_close(actual, expected)
