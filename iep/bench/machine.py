"""The machine that a benchmark ran on, as plain values for its JSON and a line for its table."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import iep


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return what a reader needs to judge the figures. `cores` are those that this process may use, `load` is how many
    processes wanted one over the last minute."""
    cuda, cpuinfo = device.type == "cuda", Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
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
    """Return one line of the description."""
    cores = f"{machine['threads']} of {machine['cores']} cores, load {machine['load']}"
    where = machine["accelerator"] or f"{machine['processor']}, {cores}"
    return f"{where}; torch {machine['torch']}, iep {machine['iep']}; {machine['date']}"
