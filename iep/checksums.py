"""Arrays -> short numbers that change when they are damaged, kept in the HDF5 files beside what they are of.

Shapes: N rows.
"""

import hashlib
import zlib
from collections.abc import Mapping

import numpy as np


def row_checksums(rows: np.ndarray) -> np.ndarray:
    """(N,) uint32: CRC-32 of the bytes of each row of a C-contiguous array (N, ...)."""
    bytes_NB = rows.reshape(len(rows), -1).view(np.uint8)
    return np.fromiter((zlib.crc32(row_B) for row_B in bytes_NB), dtype=np.uint32, count=len(rows))


def arrays_digest(arrays: Mapping[str, np.ndarray]) -> str:
    """16 hexadecimal digits of the SHA-256 of integer arrays' names, shapes and values, in whatever order and width."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].shape} ".encode())
        digest.update(np.ascontiguousarray(arrays[name], dtype="<i8").data)
    return digest.hexdigest()[:16]
