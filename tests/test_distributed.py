"""Processes of one group: their collectives."""

import torch
from processes import together

from iep.runtime import distributed


def _exchange() -> tuple:
    rank = distributed.rank()
    values = torch.tensor([rank, 10.0])
    found = (
        distributed.world_size(),
        distributed.is_main(),
        distributed.gather({"rank": rank}),
        distributed.broadcast(f"from {rank}"),
        distributed.total(values).tolist(),
    )
    assert values.tolist() == [rank, 10.0]
    distributed.barrier()
    return found


def test_collectives_exchange_values_between_processes():
    with distributed.joined():
        assert _exchange() == (1, True, [{"rank": 0}], "from 0", [0.0, 10.0])
    first, second = together(_exchange)
    assert first == (2, True, [{"rank": 0}, {"rank": 1}], "from 0", [1.0, 20.0])
    assert second == (2, False, None, "from 0", [1.0, 20.0])
