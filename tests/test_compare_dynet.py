"""`scripts/compare_dynet.py` without DyNet is one clear line; with it, every way computes the same loss."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "compare_dynet.py"


def run(*arguments: object) -> subprocess.CompletedProcess:
    """In a process of its own: DyNet is started once and for all."""
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True)


def test_without_dynet_it_says_what_to_install():
    if importlib.util.find_spec("dynet") is not None:
        pytest.skip("DyNet is there")
    done = run()
    assert (done.returncode, done.stderr) == (1, "Error: DyNet is not installed: pip install dynet38\n")


@pytest.mark.skipif(importlib.util.find_spec("dynet") is None, reason="needs dynet38")
@pytest.mark.parametrize("network", ["tree-lstm", "tree-fc", "tagger"])
def test_with_dynet_losses_agree_and_a_table_is_written(network: str, tmp_path: Path):
    done = run("--networks", network, "--batch-sizes", 2, "--repeat", 1, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\nDyNet " in (tmp_path / f"{network}.txt").read_text()
