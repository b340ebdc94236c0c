"""The limit that the hardware sets to a computation, measured beside its competitors."""

import torch

from iep.bench.compare import CPU, LIMIT, Competitor, seconds

PROBE_BYTES = 1 << 28
"""The size of the array that measures the speed of memory; it must be larger than the caches."""


def arithmetic_limit(flop: float, moved: int = 0, device: torch.device = CPU) -> Competitor:
    """Return the limit of `flop` operations and of moving `moved` bytes, the longer of the two times.

    Operations run at the speed of the fastest square float32 product seen, and bytes move at the speed of the fastest
    read or copy.
    """
    side, speeds = (1024 if device.type == "cpu" else 8192), [0.0, 0.0]
    left, right, out = (torch.randn(side, side, device=device) for _ in range(3))

    def measure() -> dict[str, float]:
        product = seconds(lambda: torch.mm(left, right, out=out), device)
        speeds[0] = max(speeds[0], 2 * side**3 / product)
        if moved:
            source = torch.ones(PROBE_BYTES // 4, device=device)
            target = torch.zeros_like(source)
            read, copied = seconds(source.sum, device), seconds(lambda: target.copy_(source), device)
            speeds[1] = max(speeds[1], source.nbytes / read, 2 * source.nbytes / copied)
        return {"computation": max(flop / speeds[0], moved / speeds[1] if moved else 0.0)}

    return Competitor(LIMIT, measure)
