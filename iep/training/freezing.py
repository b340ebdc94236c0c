"""Parts of a model that `--freeze` excludes from training, by name.

A frozen part keeps its weights, and computes the same in training as in evaluation: it has no dropout, and its batch
norm uses the running statistics, which do not change. The parts of a model with two networks are these networks;
otherwise they are groups of its network's children. `tasks.py` leaves out the loss of a frozen network.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TypeGuard

from torch import nn

from iep.errors import InputError, nearest

REST = None
"""The part that consists of all children that are in no other part."""
CHILDREN: dict[str, dict[str, tuple[str, ...] | None]] = {
    "generator": {"encoder": ("encoder_embed", "encoder_rnn"), "decoder": REST},
    "engine": {"stem": ("stem",), "modules": REST, "classifier": ("classifier",)},
    "lstm": {"rnn": ("rnn",), "classifier": ("classifier",)},
    "cnn_lstm": {"rnn": ("rnn",), "cnn": ("cnn",), "classifier": ("classifier",)},
    "backbone": {"trunk": ("trunk",), "head": ("head",)},
    "cnn_lstm_sa": {"rnn": ("rnn",), "cnn": ("image_proj",), "attention": REST, "classifier": ("classifier",)},
}
"""The children that make up each part of a network."""


def parts_of(networks: Collection[str]) -> tuple[str, ...]:
    """Return the names of the parts of a model with these networks, as `--freeze` takes them."""
    return tuple(networks if len(networks) > 1 else CHILDREN[next(iter(networks))])


def freeze(networks: Mapping[str, nn.Module], names: Sequence[str]) -> None:
    """Exclude the parts `names` of the model with these networks from training.

    Raises:
        InputError: a name is unknown, or no other part has weights.
    """
    parts = parts_of(networks)
    for name in names:
        if name not in parts:
            raise InputError(f"freeze: {name!r} is not a part, expected {', '.join(parts)}{nearest(name, parts)}")
        for module in modules_of(networks, name):
            module.requires_grad_(False)
            for rnn in filter(_is_rnn, module.modules()):
                rnn.dropout = 0.0  # an RNN drops values by itself in training mode, which it may have to stay in
    if not any(map(is_trained, networks.values())):
        raise InputError(f"freeze: {', '.join(names)} have all the weights of the model; nothing is left to train")


def modules_of(networks: Mapping[str, nn.Module], part: str) -> list[nn.Module]:
    """Return the modules of a part."""
    if part in networks:
        return [networks[part]]
    ((name, network),) = networks.items()
    children = CHILDREN[name]
    named = children[part]
    if named is not REST:
        return [getattr(network, child) for child in named]
    others = {child for group in children.values() for child in group or ()}
    return [child for name, child in network.named_children() if name not in others]


def is_trained(module: nn.Module) -> bool:
    """Return whether any weight of the module is trained."""
    return any(parameter.requires_grad for parameter in module.parameters())


def train_mode(network: nn.Module, on: bool) -> None:
    """Set the training mode of a network, in which its frozen parts stay in evaluation mode.

    Frozen LSTMs are an exception if another part is trained: on a GPU, gradients through an LSTM can be computed in
    training mode only. They have no dropout, and so compute the same in both modes.
    """
    network.train(on and is_trained(network))
    if not network.training:
        return
    for child in network.children():
        if not is_trained(child):
            for module in child.modules():
                module.train(_is_rnn(module))


def _is_rnn(module: nn.Module) -> TypeGuard[nn.RNNBase]:
    return isinstance(module, nn.RNNBase)
