import itertools

import numpy as np
import torch
from batching_cases import assert_same, quick, results
from hypothesis import example, given, settings
from tbd_cases import PROGRAMS_BL, any_programs, tbd_engine

from iep.batching.schedulers import SCHEDULERS
from iep.vocab import NULL


def features(rows_B, dtype=torch.float64, seed=1):
    return torch.randn(rows_B[-1] + 1, 5, 3, 4, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@given(programs_BL=any_programs)
@example(programs_BL=PROGRAMS_BL)
@example(programs_BL=np.full((2, 3), NULL))
@settings(quick, max_examples=25)
def test_every_scheduler_sharing_and_deferral_matches_the_reference_on_logits_and_all_gradients(programs_BL):
    engine = tbd_engine()
    rows_B = np.arange(len(programs_BL)) // 2
    features_NCHW = features(rows_B)
    expected = results(lambda x: engine.reference(x[rows_B], programs_BL), engine, features_NCHW)
    for name, sharing, defer in itertools.product(SCHEDULERS, (False, True), (False, True)):
        plan = engine.plan(programs_BL, rows_B, name, sharing)
        actual = results(lambda x, plan=plan, defer=defer: engine(x, plan, defer), engine, features_NCHW)
        assert_same(actual, expected, 1e-9)
