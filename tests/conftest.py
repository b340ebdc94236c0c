"""What several test files share: the tiny data set, and finished runs.

Those of a session are made once and only read; a test that damages something works on a copy.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from clevr_files import write_images
from click.testing import CliRunner
from fork_server import Server
from tiny_data import newest, tiny, tiny_config, write_data

from iep.cli.train import main as train_main
from iep.training.run_training import train


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


@pytest.fixture(scope="session")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run of each model, trained long enough that some answers and programs are right and some are not."""
    root = tmp_path_factory.mktemp("learnt")
    starts = ["--pg", root / "pg", "--ee", root / "ee"]
    for model, iterations, more in (("pg", 150, []), ("ee", 40, []), ("lstm", 30, []), ("joint", 1, starts)):
        settings = [
            *tiny(model),
            f"iterations={iterations}",
            "validate_every=50",
            "learning_rate=0.02",
            "num_val_samples=1",
        ]
        arguments = ["--model", model, "--data", data, "--out", root / model, *more, *settings]
        result = CliRunner().invoke(train_main, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.output
    return {model: newest(root / model) for model in ("pg", "ee", "lstm", "joint")}


@pytest.fixture
def clevr(tmp_path: Path) -> Path:
    """A directory like CLEVR's, with the images of a small split."""
    write_images(tmp_path / "CLEVR", "val", 7)
    return tmp_path / "CLEVR"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where a command writes, not yet there."""
    return tmp_path / "data"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """What begins real processes of the commands quickly."""
    with Server(tmp_path_factory.mktemp("server") / "log") as server:
        yield server
