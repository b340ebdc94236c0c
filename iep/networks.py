"""The networks that a model consists of: built from a config and the data's shapes, or loaded from a checkpoint.

A checkpoint keeps each network's constructor arguments beside its weights, so that loading needs no config. Names:
`generator`, `engine` and `lstm`; model `pg` has a generator, `ee` an engine, `joint` both, `lstm` the baseline.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from iep.baselines.lstm import LSTMBaseline
from iep.config import EngineConfig, GeneratorConfig, LstmConfig, to_dict
from iep.errors import InputError
from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.placement import Placement
from iep.program_generator.seq2seq import Seq2Seq
from iep.training.checkpoint import PARTS_OF_A_MODEL, load_checkpoint
from iep.vocab import Vocab

CLASSES: dict[str, type[nn.Module]] = {"generator": Seq2Seq, "engine": ExecutionEngine, "lstm": LSTMBaseline}
DESCRIPTIONS = {"generator": "a program generator", "engine": "an execution engine", "lstm": "a question-only LSTM"}


def generator_kwargs(config: GeneratorConfig, vocab: Vocab) -> dict[str, Any]:
    """Constructor arguments of the program generator."""
    return {
        "num_question_tokens": len(vocab.question),
        "num_program_tokens": len(vocab.program),
        **to_dict(config),
    }


def engine_kwargs(config: EngineConfig, vocab: Vocab, feature_shape: tuple[int, int, int]) -> dict[str, Any]:
    """Constructor arguments of the execution engine for features of shape (C, H, W)."""
    return {
        "program_tokens": list(vocab.program),
        "num_answers": len(vocab.answer),
        "feature_dim": feature_shape[0],
        "feature_height": feature_shape[1],
        "feature_width": feature_shape[2],
        **to_dict(config),
    }


def lstm_kwargs(config: LstmConfig, vocab: Vocab) -> dict[str, Any]:
    """Constructor arguments of the question-only baseline."""
    return {"num_question_tokens": len(vocab.question), "num_answers": len(vocab.answer), **to_dict(config)}


def build(name: str, kwargs: Mapping[str, Any]) -> nn.Module:
    """The network `name` with new weights, its constructor arguments kept as `kwargs` for its checkpoints.

    Raises:
        InputError: the arguments do not fit together (too few convolutions for the stride, say), or one is unknown.
    """
    try:
        network = CLASSES[name](**kwargs)
    except (TypeError, ValueError) as error:
        raise InputError(f"{DESCRIPTIONS[name]} cannot be built: {error}") from None
    network.kwargs = dict(kwargs)
    return network


def pack(networks: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Constructor arguments and weights of `networks`, for a checkpoint."""
    return {name: {"kwargs": net.kwargs, "weights": net.state_dict()} for name, net in networks.items()}


def unpack(checkpoint: Mapping[str, Any], name: str, path: Path | str) -> nn.Module:
    """The network `name` of a loaded checkpoint.

    Raises:
        InputError: the checkpoint holds other networks, or weights that do not fit its own arguments.
    """
    packed = checkpoint.get("networks", {})
    if name not in packed:
        held = ", ".join(DESCRIPTIONS.get(key, key) for key in packed) or "no network"
        raise InputError(f"{path}: holds {held}, expected a checkpoint with {DESCRIPTIONS[name]}")
    network = build(name, packed[name]["kwargs"])
    try:
        network.load_state_dict(packed[name]["weights"])
    except RuntimeError as error:
        what = " ".join(str(error).split())
        raise InputError(f"{path}: the weights do not make {DESCRIPTIONS[name]} of its settings ({what})") from None
    return network


def load_network(path: Path | str, name: str, vocab: Vocab, device: torch.device) -> nn.Module:
    """The network `name` of the checkpoint at `path`, in evaluation mode.

    Raises:
        InputError: as `load_checkpoint` and `unpack`, or the checkpoint was trained with another vocabulary.
    """
    checkpoint = load_checkpoint(Path(path), PARTS_OF_A_MODEL)
    network = unpack(checkpoint, name, path)
    check_vocab(Vocab.from_json(checkpoint["vocab"], f"{path} (vocabulary)"), vocab, name, path)
    return place(network, device).eval()


MEMORY_FORMATS = {"channels-first": torch.contiguous_format, "channels-last": torch.channels_last}


def place(network: nn.Module, device: torch.device, memory_format: str | None = None) -> nn.Module:
    """`network` on `device`, its convolutions in a format of `MEMORY_FORMATS`; None for channels last on a CPU, where
    they are faster so (`iep-bench engine --memory-format` compares), and channels first elsewhere."""
    if memory_format is None:
        memory_format = "channels-last" if device.type == "cpu" else "channels-first"
    return network.to(device, memory_format=MEMORY_FORMATS[memory_format])


def place_parts(engine: ExecutionEngine, placement: Placement, memory_format: str | None = None) -> ExecutionEngine:
    """`engine` with each part on its device, its convolutions in a format as `place` gives them."""
    for part in engine.parts:
        place(getattr(engine, part), placement.device(part), memory_format)
    engine.placement = placement
    return engine


def check_vocab(trained: Vocab, given: Vocab, name: str, path: Path | str) -> None:
    """Compare the vocabularies that the network `name` depends on.

    Raises:
        InputError: they differ; names the first index where they do.
    """
    kinds = {
        "generator": ("question", "program"),
        "engine": ("program", "answer"),
        "lstm": ("question", "answer"),
    }[name]
    for kind in kinds:
        ours, theirs = getattr(trained, kind), getattr(given, kind)
        if ours == theirs:
            continue
        index = next(
            (i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
            min(len(ours), len(theirs)),
        )
        there, here = (repr(tokens[index]) if index < len(tokens) else "missing" for tokens in (ours, theirs))
        raise InputError(
            f"{path}: trained with another vocabulary: {kind} token {index} is {there} there and {here} in the data"
        )


def check_features(engine: nn.Module, feature_shape: tuple[int, int, int], path: Path | str) -> None:
    """Compare the feature shape that the engine was built for with the data's.

    Raises:
        InputError: they differ.
    """
    expected = tuple(engine.kwargs[f"feature_{side}"] for side in ("dim", "height", "width"))
    if expected != tuple(feature_shape):
        raise InputError(f"{path}: features are {tuple(feature_shape)} an image, but the engine is made for {expected}")
