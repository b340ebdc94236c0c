"""Count the work of a training step on a fake GPU (`fake_gpu/`), under which all of PyTorch's own code runs.

The budgets are counts measured with PyTorch 2.14, plus a margin. A step that mixes devices, or that waits while a CUDA
graph is captured, fails.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import environment, free_port
from tiny_data import tiny

ROOT = Path(__file__).parent.parent
IS_SUPPORTED = (torch.version.cuda or "").startswith("13.") and find_spec("nvidia") and find_spec("triton")
pytestmark = pytest.mark.skipif(
    not (IS_SUPPORTED and shutil.which("gcc") and shutil.which("nm")),
    reason="the fake GPU needs gcc, nm and PyTorch for CUDA 13 with its headers, as pip installs them",
)
LOSS = {"iep/training/parallel.py backward": 1}
"""The only wait of the host in a step that trains on true programs: it reads the loss."""
JOINT = LOSS | {
    "iep/program_generator/decode.py _unroll": 1,  # for each token but the first; samples have one on the fake GPU
    "iep/batching/graph.py _checked_tokens": 1,
    "iep/training/tasks.py loss": 1,
}
BFLOAT16 = ("precision=bfloat16",)


def train(
    data: Path, folder: Path, model: str, *arguments: object, gpus: int = 1, processes: int = 1
) -> list[dict[str, Any]]:
    """Train for five steps, and return the counts of each but the first two, in which things are set up."""
    settings = [each for each in tiny(model) if each != "device=cpu"]
    settings += ["iterations=5", "validate_every=5", "log_every=5"]
    where = ("--model", model, "--data", data, "--out", folder / "run")
    given = ["iep.cli.train", *map(str, (*where, *settings, *arguments))]
    fake, port = os.environ | {"FAKE_GPUS": str(gpus), "PYTHONPATH": str(ROOT)}, free_port()
    started = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "fake_gpu"), str(folder / f"{rank}.json"), *given],
            cwd=ROOT,
            env=fake | environment(rank, processes, port),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    errors = [each.communicate()[1] for each in started]
    assert not any(each.returncode for each in started), "\n".join(errors)
    return [step for rank in range(processes) for step in json.loads((folder / f"{rank}.json").read_text())[2:]]


CUDA = "device=cuda:0"
STEPS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "float32": ((CUDA,), {"kernels": 470}),
    "bfloat16": ((CUDA, *BFLOAT16), {"kernels": 670}),
    "tbd": ((CUDA, "engine.modules=tbd"), {"kernels": 515}),
    "pooled": ((CUDA, "engine.modules=pooled"), {"kernels": 570}),
    "triton": ((CUDA, *BFLOAT16, "execution=triton"), {"kernels": 200}),
    "cuda_graph": ((CUDA, *BFLOAT16, "execution=cuda_graph"), {"kernels": 86, "graphs": 2}),
    "two devices": (("placement=balanced", "devices=[cuda:0,cuda:1]"), {"kernels": 490, "gpus": 2}),
    # Gloo copies the gradients to the host and back, which NCCL does not; its waits are not in iep's code.
    "two processes": (("device=cuda",), {"kernels": 540, "gpus": 2, "processes": 2, "by_gloo": 11}),
    # The plan of sampled programs is made in the step, so that its one copy is not from pinned memory. Half of the
    # kernels are the encoder's LSTM: without cuDNN, 14 for each of the 17 tokens of a question.
    "joint": ((CUDA, "pg={pg}", "ee={ee}"), {"kernels": 425, "model": "joint", "waits": JOINT, "pageable": 1}),
}
"""The settings of trainings, and what a step of each may cost."""


@pytest.mark.parametrize("name", STEPS)
def test_a_step_waits_where_it_reads_results_and_launches_no_more_than_its_budget(name, data, runs, tmp_path) -> None:
    settings, budget = STEPS[name]
    waits, processes, kernels = budget.get("waits", LOSS), budget.get("processes", 1), budget["kernels"]
    given = [setting.format(**runs) for setting in settings]
    if name == "triton":  # a first training tunes the kernels for the sizes of each step; Triton keeps what it finds
        (tmp_path / "tuning").mkdir()
        train(data, tmp_path / "tuning", "ee", *given)
    steps = train(data, tmp_path, budget.get("model", "ee"), *given, gpus=budget.get("gpus", 1), processes=processes)
    assert len(steps) == 3 * processes
    for step in steps:
        assert step["places"] == waits
        assert step["waits"] == sum(waits.values()) + budget.get("by_gloo", 0)
        assert (step["graphs"], step["pageable"]) == (budget.get("graphs", 0), budget.get("pageable", 0))
    assert kernels / 2 < max(step["kernels"] for step in steps) <= kernels
