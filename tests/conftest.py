"""What several test files share: the tiny data set, and a finished run of each model that starts from nothing.

Both are made once and only read; a test that damages something works on a copy.
"""

from pathlib import Path

import pytest
from tiny_data import tiny_config, write_data

from iep.training.run import train


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run directories by model."""
    root = tmp_path_factory.mktemp("runs")
    for model in ("pg", "ee", "lstm"):
        assert train(tiny_config(data, model), root / model, resume=False)
    return {model: root / model for model in ("pg", "ee", "lstm")}


@pytest.fixture(scope="session")
def parts(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings that name a generator and an engine to start from, the generator good enough to be run."""
    root = tmp_path_factory.mktemp("parts")
    for model, iterations in (("pg", 60), ("ee", 1)):
        config = tiny_config(data, model, f"iterations={iterations}", "num_val_samples=1", "validate_every=100")
        train(config, root / model, resume=False)
    return [f"pg={root / 'pg'}", f"ee={root / 'ee'}"]
