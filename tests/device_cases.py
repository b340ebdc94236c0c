"""The devices that tests run on. `pytest -m gpu` runs the tests that need a GPU and are skipped elsewhere."""

from importlib.util import find_spec

import pytest

ONE_GPU = pytest.mark.gpu(1)
TWO_GPUS = pytest.mark.gpu(2)
HAS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
DEVICES = ["cpu", pytest.param("cuda", marks=ONE_GPU)]
