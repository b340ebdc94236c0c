"""Fixtures that several test files share: the tiny data set, and finished runs.

Fixtures of a session are made once in each of pytest's processes and only read; a test that damages a file works on a
copy. All processes compute in one thread, since as many of them run as there are cores.
"""

import os
import signal
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; processes that tests start inherit it

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is defined

from clevr_files import write_images
from tiny_data import newest, tiny, tiny_config, write_data
from train_cases import iep_train

from iep.training.run_training import train


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that need more GPUs than there are."""
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is not None and torch.cuda.device_count() < marker.args[0]:
            item.add_marker(pytest.mark.skip(reason=f"needs {marker.args[0]} GPU(s)"))


# A shell ignores some signals in the background processes that it starts, as nohup does, and processes inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
torch.backends.cudnn.allow_tf32 = False  # results on a GPU are those of the CPU


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of runs of a few steps, by model."""
    root = tmp_path_factory.mktemp("runs")
    for model in ("pg", "ee", "lstm"):
        assert train(tiny_config(data, model), root / model, resume=False)
    return {model: root / model for model in ("pg", "ee", "lstm")}


@pytest.fixture(scope="session")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The last checkpoint of a run of each model, long enough that some answers and programs are right, some wrong."""
    root = tmp_path_factory.mktemp("learnt")
    starts = ["--pg", root / "pg", "--ee", root / "ee"]
    for model, iterations, more in (("pg", 150, []), ("ee", 40, []), ("lstm", 30, []), ("joint", 1, starts)):
        settings = (f"iterations={iterations}", "validate_every=50", "learning_rate=0.02", "num_val_samples=1")
        where = ("--model", model, "--data", data, "--out", root / model)
        result = iep_train(*where, *more, *tiny(model), *settings)
        assert result.exit_code == 0, result.output
    return {model: newest(root / model) for model in ("pg", "ee", "lstm", "joint")}


@pytest.fixture(scope="session")
def parts(run: dict[str, Path]) -> list[str]:
    """Settings that name a generator and an engine to start from."""
    return [f"{model}={run[model].parent}" for model in ("pg", "ee")]


@pytest.fixture
def clevr(tmp_path: Path) -> Path:
    """A directory like CLEVR's, with the images of a small split."""
    write_images(tmp_path / "CLEVR", "val", 7)
    return tmp_path / "CLEVR"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A directory that a command is to write, which does not exist yet."""
    return tmp_path / "data"
