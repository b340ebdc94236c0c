"""Grouped calls (placeholder until the workloads branch lands)."""

import torch


def run_segments(modules, segments, *arguments):
    parts = [modules[s.op](*(a[s.rows] for a in arguments)) for s in segments]
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts)
    return tuple(map(torch.cat, zip(*parts)))
