"""The devices that tests run on. `pytest -m gpu` runs the tests that need a GPU and are skipped elsewhere."""

from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch

ONE_GPU = pytest.mark.gpu(1)
TWO_GPUS = pytest.mark.gpu(2)
HAS_TRITON = pytest.mark.skipif(
    find_spec("triton") is None or (not torch.cuda.is_available() and version("triton") < "3.5"),
    reason="needs Triton; without a GPU its interpreter, which does not work with NumPy 2.4 before Triton 3.5",
)
DEVICES = ["cpu", pytest.param("cuda", marks=ONE_GPU)]
