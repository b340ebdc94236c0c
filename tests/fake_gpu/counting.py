"""Run a module on the fake GPU, and write the counts of each optimiser step as JSON.

A convolution, which cuDNN would run, counts as one kernel in the forward pass and one for each of its gradients.
"""

import collections
import ctypes
import json
import os
import runpy
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

DRIVER = ctypes.CDLL(os.environ["LD_PRELOAD"])
COUNTS = {name: ctypes.c_long.in_dll(DRIVER, name) for name in ("kernels", "graphs", "waits", "copied", "pageable")}
PLACES: collections.Counter[str] = collections.Counter()  # the functions of iep in which the host has waited
STEPS: list[dict[str, Any]] = []
ROOT = f"{os.getcwd()}/"


def convolve(x: Tensor, weight: Tensor, padding: list[int], stride: list[int], dilation: list[int], *_: Any) -> Tensor:
    COUNTS["kernels"].value += 1
    result = torch.nn.functional.conv2d(x.to("meta"), weight.to("meta"), None, stride, padding, dilation)
    is_last = x.is_contiguous(memory_format=torch.channels_last)
    kept = torch.channels_last if is_last else torch.contiguous_format
    return torch.empty_like(result, device=x.device, memory_format=kept)


def differentiate(of_result: Tensor, x: Tensor, weight: Tensor, *more: Any) -> list[Tensor | None]:
    COUNTS["kernels"].value += sum(more[-1])
    gradients = torch.empty_like(x), torch.empty_like(weight), of_result.new_empty(len(weight))
    return [each if is_wanted else None for each, is_wanted in zip(gradients, more[-1], strict=True)]


def note_wait(message: Warning | str, *_: Any, **__: Any) -> None:
    """Count a wait that PyTorch warns of at the innermost function of iep."""
    if "synchronizing" in str(message):
        frames = [each for each in traceback.extract_stack() if each.filename.startswith(f"{ROOT}iep/")]
        PLACES[f"{frames[-1].filename.removeprefix(ROOT)} {frames[-1].name}" if frames else "elsewhere"] += 1


def note_step(*_: Any) -> None:
    STEPS.append({name: count.value for name, count in COUNTS.items()} | {"places": dict(PLACES)})
    PLACES.clear()
    for count in COUNTS.values():
        count.value = 0


if __name__ == "__main__":
    library, out, code = torch.library.Library("aten", "IMPL"), Path(sys.argv[1]), 1
    library.impl("cudnn_convolution", convolve, "CUDA")
    library.impl("convolution_backward", differentiate, "CUDA")
    torch.backends.cudnn.is_acceptable = lambda _: False  # for LSTMs, which PyTorch has other kernels for
    library.impl("cudnn_is_acceptable", torch.backends.cudnn.is_acceptable, "CUDA")
    # Processes exchange gradients by gloo, as NCCL needs hardware. DDP would compare sizes that it reads from the GPU.
    torch.distributed.is_nccl_available = lambda: False
    torch.nn.parallel.distributed._verify_param_shape_across_processes = lambda *_: None
    warnings.showwarning = note_wait
    warnings.simplefilter("always")
    torch.cuda.set_sync_debug_mode("warn")
    register_optimizer_step_post_hook(note_step)
    sys.path[0], sys.argv = os.getcwd(), sys.argv[2:]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    out.write_text(json.dumps(STEPS, indent=1))
    sys.stdout.flush()
    os._exit(code)  # PyTorch's threads would not end
