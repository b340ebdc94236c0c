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
    settings = [each for each in tiny(model) if each != "device=cpu"] + [
        "iterations=5",
        "validate_every=5",
        "log_every=5",
    ]
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


def assert_within(
    steps: list[dict[str, Any]],
    kernels: int,
    waits: dict[str, int] = LOSS,
    graphs: int = 0,
    pageable: int = 0,
    by_gloo: int = 0,
) -> None:
    """Check that steps launch at most so many kernels, so many graphs, and wait and copy pageable memory as given."""
    assert len(steps) == (6 if by_gloo else 3)
    for step in steps:
        assert step["places"] == waits
        assert step["waits"] == sum(waits.values()) + by_gloo
        assert step["pageable"] == pageable
        assert step["graphs"] == graphs
    assert kernels / 2 < max(step["kernels"] for step in steps) <= kernels


@pytest.mark.parametrize(
    ("settings", "kernels"),
    [
        ((), 470),
        (BFLOAT16, 670),
        (("engine.modules=tbd",), 515),
        (("engine.modules=pooled",), 570),
        ((*BFLOAT16, "execution=triton"), 200),
    ],
    ids=["float32", "bfloat16", "tbd", "pooled", "triton"],
)
def test_a_step_waits_once_and_launches_no_more_kernels_than_its_budget(settings, kernels, data, tmp_path) -> None:
    assert_within(train(data, tmp_path, "ee", "device=cuda:0", *settings), kernels)


def test_a_step_by_cuda_graphs_launches_two_graphs_and_little_else(data, tmp_path) -> None:
    settings = (*BFLOAT16, "execution=cuda_graph")
    assert_within(train(data, tmp_path, "ee", "device=cuda:0", *settings), kernels=86, graphs=2)


def test_a_placement_on_two_devices_waits_no_more_than_one_device(data, tmp_path) -> None:
    settings = ("placement=balanced", "devices=[cuda:0,cuda:1]")
    assert_within(train(data, tmp_path, "ee", *settings, gpus=2), kernels=490)


def test_processes_wait_only_for_the_loss_and_in_gloo(data, tmp_path) -> None:
    """Gloo copies the gradients to the host and back, which NCCL does not; the waits for that are not in iep's code."""
    steps = train(data, tmp_path, "ee", "device=cuda", gpus=2, processes=2)
    assert_within(steps, kernels=540, by_gloo=11)


def test_a_step_of_joint_training_waits_where_programs_and_rewards_are_read(data, runs, tmp_path) -> None:
    """The plan of sampled programs is made in the step, so that its one copy is not from pinned memory.

    Half of the kernels are the encoder's LSTM: without cuDNN, 14 for each of the 17 tokens of a question.
    """
    settings = [f"{model}={runs[model]}" for model in ("pg", "ee")]
    steps = train(data, tmp_path, "joint", "device=cuda:0", *settings)
    assert_within(steps, kernels=425, waits=JOINT, pageable=1)
