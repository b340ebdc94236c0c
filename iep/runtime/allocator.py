"""A setting of the C library under which large tensors, which PyTorch allocates anew at every step, are cheap.

By default glibc maps each large block separately and returns it to the system when it is freed. The system then clears
the pages of the next block one by one, when they are first used. This takes several percent of the time of a full-size
training step on a CPU.
"""

import ctypes
import os

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""Parameters of mallopt(3)."""


def keep_freed_memory() -> None:
    """Make this process keep up to two gigabytes of freed memory for later allocations.

    This has no effect if the user has set one of glibc's MALLOC_ variables, or the C library is not glibc.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_MAX, 0)  # no separate mappings: the threshold for these cannot exceed 32 MB
    mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
    mallopt(M_TOP_PAD, 1 << 25)
