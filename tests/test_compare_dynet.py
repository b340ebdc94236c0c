"""`scripts/compare_dynet.py` without DyNet is an error of one line; with it, all competitors compute the same loss."""

import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "compare_dynet.py"
HAS_DYNET = importlib.util.find_spec("dynet") is not None


@pytest.mark.skipif(HAS_DYNET, reason="DyNet is installed")
def test_without_dynet_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert (end.value.code, capsys.readouterr().err) == (1, "Error: DyNet is not installed: pip install dynet38\n")


@pytest.mark.skipif(not HAS_DYNET, reason="needs dynet38")
@pytest.mark.parametrize("network", ["tree-lstm", "tree-fc", "tagger"])
def test_with_dynet_losses_agree_and_a_table_is_written(network: str, tmp_path: Path):
    """DyNet can be started only once in a process."""
    arguments = ["--networks", network, "--batch-sizes", "2", "--repeat", "1", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "\nDyNet " in (tmp_path / f"{network}.txt").read_text()
