"""Have the C library keep freed memory, so that large tensors, which PyTorch allocates anew at every step, are cheap.

By default glibc maps a large block for itself and returns it to the system when it is freed. The system clears the
pages of the next one again, one by one, at their first touch: several percent of a step at full size on a CPU.
"""

import ctypes
import os

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""Parameters of mallopt(3)."""


def keep_freed_memory() -> None:
    """Have this process keep up to two gigabytes of freed memory for later allocations.

    Does nothing if the user has set one of glibc's MALLOC_ variables, or the C library is not glibc.
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
