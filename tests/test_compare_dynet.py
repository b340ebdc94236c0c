"""`scripts/compare_dynet.py` without DyNet is one clear line; with it, every way computes the same loss."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

SCRIPT = Path(__file__).parent.parent / "scripts" / "compare_dynet.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_dynet", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_dynet_it_says_what_to_install(script: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(script, "dy", None)
    result = CliRunner().invoke(script.main, [])
    assert (result.exit_code, result.output) == (1, "Error: DyNet is not installed: pip install dynet38\n")


def test_ways_whose_losses_differ_are_not_compared(script: ModuleType):
    ways = [script.Way(name, list, lambda plan, training, loss=loss: loss) for name, loss in (("a", 1.0), ("b", 2.0))]
    with pytest.raises(script.click.ClickException, match="losses differ"):
        script.check_losses(ways, [0])


@pytest.mark.skipif(importlib.util.find_spec("_dynet") is None, reason="needs dynet38")
@pytest.mark.parametrize("workload", ["tree-lstm", "tree-fc", "tagger"])
def test_with_dynet_losses_agree_and_a_table_is_written(workload: str, tmp_path: Path):
    """In a process of its own: DyNet is started once and for all."""
    asked = ["--workloads", workload, "--batch-sizes", "2", "--repeat", "1", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, str(SCRIPT), *asked], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "DyNet, one matrix" in (tmp_path / "dynet.txt").read_text()
