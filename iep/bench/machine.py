"""The machine that a benchmark ran on, as plain values for its JSON and a line for its table."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import iep


def describe_machine(device: torch.device) -> dict[str, Any]:
    """What a reader needs to judge the figures: processor, cores, threads, versions, accelerator and date.

    `cores` are those that this process may use; `load` is how many processes wanted one over the last minute, before
    the benchmark began; `accelerator` is None on a CPU.
    """
    cuda = device.type == "cuda"
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "iep": iep.__version__,
        "device": str(device),
        "accelerator": torch.cuda.get_device_name(device) if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def machine_line(machine: dict[str, Any]) -> str:
    """One line of the description."""
    cores = f"{machine['threads']} of {machine['cores']} cores, load {machine['load']}"
    where = machine["accelerator"] or f"{machine['processor']}, {cores}"
    return f"{where}; torch {machine['torch']}, iep {machine['iep']}; {machine['date']}"


def _processor() -> str:
    """The processor's name as Linux gives it; elsewhere what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
