"""`--freeze`: parts of a model that training leaves as they are, by name.

A frozen part keeps its weights, and does in training what it does in evaluation: no dropout, and batch norm by running
statistics, which stay too. Where a model has two networks its parts are these, otherwise groups of its network's
children. Whose loss counts no more is the task's business (`tasks.py`).
"""

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from iep.errors import InputError, nearest
from iep.models.build import NETWORKS

REST = None
"""Children that no other part names."""
CHILDREN: dict[str, dict[str, tuple[str, ...] | None]] = {
    "generator": {"encoder": ("encoder_embed", "encoder_rnn"), "decoder": REST},
    "engine": {"stem": ("stem",), "modules": REST, "classifier": ("classifier",)},
    "lstm": {"rnn": ("rnn",), "classifier": ("classifier",)},
    "cnn_lstm": {"rnn": ("rnn",), "cnn": ("cnn",), "classifier": ("classifier",)},
    "cnn_lstm_sa": {"rnn": ("rnn",), "cnn": ("image_proj",), "attention": REST, "classifier": ("classifier",)},
}
"""The parts of each network."""


def parts_of(model: str) -> tuple[str, ...]:
    """What `--freeze` may name of a model."""
    networks = NETWORKS[model]
    return networks if len(networks) > 1 else tuple(CHILDREN[networks[0]])


def check_freeze(model: str, names: Sequence[str]) -> None:
    """See that all names are of parts of `model`, and that some part is left.

    Raises:
        InputError: a name is not, or none is.
    """
    parts = parts_of(model)
    for name in names:
        if name not in parts:
            raise InputError(
                f"freeze: {name!r} is no part of {model}, expected {', '.join(parts)}{nearest(name, parts)}"
            )
    if set(names) == set(parts):
        raise InputError(f"freeze: {', '.join(parts)} are all parts of {model}; nothing is left to train")


def freeze(networks: Mapping[str, nn.Module], names: Iterable[str]) -> None:
    """Leave the named parts of a model, of all its `networks`, out of training.

    Raises:
        InputError: no part that is left has weights.
    """
    for name in names:
        for module in modules_of(networks, name):
            module.requires_grad_(False)
            for rnn in filter(_is_rnn, module.modules()):
                rnn.dropout = 0.0  # its own, which `train_mode` cannot turn off
    if not any(map(is_trained, networks.values())):
        raise InputError(f"freeze: {', '.join(names)} have all the weights of the model; nothing is left to train")


def modules_of(networks: Mapping[str, nn.Module], part: str) -> list[nn.Module]:
    """The modules that make up a part."""
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
    """Is any of its weights trained?"""
    return any(parameter.requires_grad for parameter in module.parameters())


def train_mode(network: nn.Module, on: bool) -> None:
    """Put the network into training mode or out of it, what is frozen always out of it.

    But for LSTMs behind which something is trained: on a GPU a gradient can go back through them in training mode
    alone. Without dropout they do the same in both.
    """
    network.train(on and is_trained(network))
    if not network.training:
        return
    for child in network.children():
        if not is_trained(child):
            for module in child.modules():
                module.train(_is_rnn(module))


def _is_rnn(module: nn.Module) -> bool:
    return isinstance(module, nn.RNNBase)
