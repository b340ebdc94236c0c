"""How the C library keeps memory that was given back: for large tensors, which PyTorch asks of it anew at every step.

By default glibc returns large blocks to the system at once, which clears them again page by page when they are next
asked for: a CPU then spends several percent of a training step on memory that it had a moment ago.
"""

import ctypes
import os

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""Parameters of mallopt(3)."""
LARGEST_BLOCK = 1 << 25
"""Larger blocks are always the system's: glibc's own limit."""


def keep_freed_memory() -> None:
    """Have this process keep the memory that it frees, up to two gigabytes, to use again.

    Does nothing where the user has set any of glibc's MALLOC_ variables, or the C library is another.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK)
    mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
    mallopt(M_TOP_PAD, LARGEST_BLOCK)
