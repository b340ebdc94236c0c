"""The devices that tests run on. `pytest -m gpu` runs the tests that need a GPU and are skipped elsewhere."""

import pytest

ONE_GPU = pytest.mark.gpu(1)
TWO_GPUS = pytest.mark.gpu(2)
DEVICES = ["cpu", pytest.param("cuda", marks=ONE_GPU)]
