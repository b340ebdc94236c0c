"""Batch norm in training with several processes, and in an engine's modules.

On GPUs, the batch norms that every process runs once a step are over the batches of all processes (`SyncBatchNorm`), so
that several processes train as one would. PyTorch has no such norm for CPUs, where a batch norm is over the process's
own part of the minibatch. The norms of an engine's modules cannot be synchronised anywhere, because each process calls
a module as often as its own schedule says. Norms that are not synchronised have the mean running statistics of all
processes.
"""

from collections.abc import Mapping

import torch
from torch import nn

from iep.config import Config
from iep.errors import InputError
from iep.execution_engine.engine import ExecutionEngine
from iep.runtime.distributed import total, world_size
from iep.training.freezing import is_trained


def check_norms(networks: Mapping[str, nn.Module], config: Config, device: torch.device) -> str | None:
    """Return a warning if an engine's batch norm is over several examples, or None.

    Raises:
        InputError: there are several processes, and batch norm that is trained is over the rows of a call of an
            engine's module or, on CPUs, over questions.
    """
    are_separate = world_size() > 1 and device.type == "cpu"
    for name, network in networks.items() if are_separate else ():
        if any(type(each) is nn.BatchNorm1d and is_trained(each) for each in network.modules()):
            what = f"{name}.classifier_norm normalises over questions, which may be too few for each of the processes"
            raise InputError(f"{what}: train in one process, or on GPUs")
    engines = [network for network in networks.values() if isinstance(network, ExecutionEngine)]
    modules = [getattr(engine, part) for engine in engines for part in engine.parts[1:-1]]
    layers = (layer for module in modules for layer in module.modules())
    if not any(type(layer) is nn.BatchNorm2d and is_trained(layer) for layer in layers):
        return None
    if world_size() > 1:
        raise InputError(
            "engine.module_norm=batch normalises over the examples of a call, and no process sees all of them: train "
            "in one process, or with engine.module_norm=example"
        )
    if config.batching == "vanilla" and not config.sharing:
        return None
    return (
        "engine.module_norm=batch normalises over all examples of a call, not over one as the original toolkit does: "
        "engine.module_norm=example is exact, and so is --batching vanilla --no-sharing"
    )


def synchronize_norms(networks: Mapping[str, nn.Module]) -> None:
    """Replace the batch norms on GPUs by `SyncBatchNorm`, except those in an engine's modules."""
    for network in networks.values():
        parts = (network.stem, network.classifier) if isinstance(network, ExecutionEngine) else (network,)
        for part in parts:
            if next(network.parameters()).is_cuda:
                nn.SyncBatchNorm.convert_sync_batchnorm(part)


@torch.no_grad()
def average_statistics(networks: Mapping[str, nn.Module]) -> None:
    """Replace the running statistics of norms in training mode that are not synchronised by their means over the
    processes, which must call this together."""
    layers = (layer for network in networks.values() for layer in network.modules())
    norms = [layer for layer in layers if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)) and layer.training]
    statistics = [each for norm in norms for each in (norm.running_mean, norm.running_var) if each is not None]
    if statistics:
        means = total(torch.cat(statistics)) / world_size()
        for each, mean in zip(statistics, means.split([len(each) for each in statistics]), strict=True):
            each.copy_(mean)
