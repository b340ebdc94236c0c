"""A checkpoint of the original IEP toolkit -> the content of a checkpoint of this one.

The original toolkit saves a dictionary by torch. For each of `program_generator`, `execution_engine` and `baseline` it
holds the constructor's arguments (`_kwargs`) and the weights (`_state`), both None if there is no such network. It also
holds `vocab`, the command line `args`, and statistics. Weights keep their names; those of modules that never run are
left out. Most arguments are settings of this toolkit under another name. `checkpoint.py` reads the file.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from iep.config import (
    CnnLstmConfig,
    CnnLstmSaConfig,
    EngineConfig,
    GeneratorConfig,
    LstmConfig,
    setting,
    to_dict,
    update,
)
from iep.errors import InputError, nearest
from iep.vocab import END, NULL, START, Vocab

PARTS = ("program_generator", "execution_engine", "baseline")
"""The original toolkit's names of networks."""
_POOLS = {"none": 1, "maxpool2": 2, "maxpool4": 4}
_RNN = {"rnn_num_layers": "num_layers", "rnn_dropout": "dropout"}
_GENERATOR = {"wordvec_dim": "embedding_dim", "hidden_dim": "hidden_dim", **_RNN}
_ENGINE = {
    "feature_dim": "feature_dim",
    "stem_num_layers": "stem_num_layers",
    "stem_batchnorm": "stem_norm",
    "module_dim": "module_dim",
    "module_residual": "module_residual",
    "module_batchnorm": "module_batchnorm",
    "classifier_proj_dim": "classifier_projection",
    "classifier_downsample": "classifier_downsample",
    "classifier_fc_layers": "classifier_hidden",
    "classifier_batchnorm": "classifier_norm",
    "classifier_dropout": "classifier_dropout",
}
_LSTM = {
    "rnn_wordvec_dim": "embedding_dim",
    "rnn_dim": "hidden_dim",
    **_RNN,
    "fc_dims": "classifier_dims",
    "fc_use_batchnorm": "classifier_norm",
    "fc_dropout": "classifier_dropout",
}
_CNN_LSTM = _LSTM | {
    "cnn_feat_dim": "feature_dim",
    "cnn_num_res_blocks": "cnn_res_blocks",
    "cnn_res_block_dim": "cnn_res_block_dim",
    "cnn_proj_dim": "cnn_projection",
    "cnn_pooling": "cnn_pooling",
}
_CNN_LSTM_SA = _LSTM | {
    "cnn_feat_dim": "feature_dim",
    "stacked_attn_dim": "attention_dim",
    "num_stacked_attn": "attention_steps",
}
_SIDES = ("feature_dim", "feature_height", "feature_width")
_ANSWERS = ("num_question_tokens", "num_answers")
_NETWORKS = {
    "program_generator": ("generator", GeneratorConfig(), _GENERATOR, ("num_question_tokens", "num_program_tokens")),
    "execution_engine": ("engine", EngineConfig(), _ENGINE, ("program_tokens", "num_answers", *_SIDES)),
    "LSTM": ("lstm", LstmConfig(), _LSTM, _ANSWERS),
    "CNN+LSTM": ("cnn_lstm", CnnLstmConfig(), _CNN_LSTM, (*_ANSWERS, *_SIDES)),
    "CNN+LSTM+SA": ("cnn_lstm_sa", CnnLstmSaConfig(), _CNN_LSTM_SA, (*_ANSWERS, *_SIDES[:1])),
}
"""By the original's name of a network or of a kind of baseline: the name here, the default settings, the names here of
the original's arguments, and the sizes of the data that the constructor takes."""
_NUMBER = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248])")
"""Codes of numpy's dtypes that are numbers."""


class _Dtype:
    """The code and byte order of a numpy dtype in the original's files."""

    def __init__(self, code: object, *_: object):
        self.code = code if isinstance(code, str) else ""

    def __setstate__(self, state: object) -> None:
        order = state[1] if isinstance(state, tuple) and len(state) > 1 else ""
        self.code = f"{order}{self.code}" if isinstance(order, str) else ""


class _Ignored:
    """A placeholder for a numpy array in the original's files, of which nothing is kept."""

    def __init__(self, *_: object):
        pass

    def __setstate__(self, state: object) -> None:
        """Keep nothing."""


def _number(dtype: object = None, content: object = b"") -> object:
    """Return a numpy number as a Python number, or a placeholder if it is not a number."""
    if isinstance(dtype, _Dtype) and _NUMBER.fullmatch(dtype.code) and isinstance(content, bytes):
        values = np.frombuffer(content, dtype=dtype.code) if len(content) == int(dtype.code[-1]) else ()
        return values[0].item() if len(values) else _Ignored()
    return _Ignored()


def safe_globals() -> list[Any]:
    """Return the globals that the original's files may use, for `torch.serialization.safe_globals`.

    No numpy object is made, because numpy would trust the file's description of raw bytes. Numbers are read here, and
    arrays, which only statistics hold, are ignored.
    """
    inert = [(_Dtype, "numpy.dtype"), (_Ignored, "numpy.ndarray")]
    for core in ("core", "_core"):
        inert += [(_number, f"numpy.{core}.multiarray.scalar"), (_Ignored, f"numpy.{core}.multiarray._reconstruct")]
    return [argparse.Namespace, *inert]


def is_original(content: object) -> bool:
    """Return whether the content of a torch file is a checkpoint of the original toolkit."""
    return isinstance(content, Mapping) and any(f"{part}_kwargs" in content for part in PARTS)


@dataclass(frozen=True)
class _Others:
    """The arguments of the original that are not settings of this toolkit."""

    feature_dim: tuple[int, int, int] = setting((1024, 14, 14), minimum=1)
    stem_num_layers: int = setting(2, minimum=0, maximum=1000)
    module_batchnorm: bool = False
    classifier_downsample: str = setting("maxpool2", choices=tuple(_POOLS))


def from_original(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the networks and the vocabulary of a checkpoint of the original, as checkpoints of this toolkit hold them.

    Raises:
        InputError: there is no network, a part is missing or of another type, an option is unknown or has an invalid
            value, or sizes do not fit the vocabulary.
    """
    vocab = Vocab.from_json(content.get("vocab"), "vocab")
    networks = {}
    for part in PARTS:
        options, weights = content.get(f"{part}_kwargs"), content.get(f"{part}_state")
        if options is None and weights is None:
            continue
        for name, value in ((f"{part}_kwargs", options), (f"{part}_state", weights)):
            if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
                raise InputError(f"{name} is of type {type(value).__name__}, expected names and values")
        for name, value in weights.items():
            if not isinstance(value, Tensor):
                raise InputError(f"{part}_state: {name} is of type {type(value).__name__}, expected Tensor")
        values, weights, source = dict(options), dict(weights), f"{part}_kwargs"
        kind = content.get("baseline_type") if part == "baseline" else part
        known = [each for each in _NETWORKS if (each in PARTS) == (part != "baseline")]
        if kind not in known:
            raise InputError(f"{source}: baseline_type is {kind!r}, expected one of {', '.join(known)}")
        name, config, names, takes = _NETWORKS[kind]
        if name == "generator":
            sizes = {"encoder_vocab_size": len(vocab.question), "decoder_vocab_size": len(vocab.program)}
            for option, expected in {**sizes, "null_token": NULL, "start_token": START, "end_token": END}.items():
                if (value := values.pop(option, expected)) != expected:
                    raise InputError(f"{source}: {option} is {value!r}, expected {expected}, as in vocab")
        else:
            _check_vocab(values, source, vocab, ("program" if name == "engine" else "question", "answer"))
        settings, others = _settings(config, values, names, source)
        sizes = {
            "num_question_tokens": len(vocab.question),
            "num_program_tokens": len(vocab.program),
            "program_tokens": list(vocab.program),
            "num_answers": len(vocab.answer),
            **dict(zip(_SIDES, others.feature_dim, strict=True)),
        }
        kwargs = {size: sizes[size] for size in takes} | settings
        if name == "engine":
            kwargs |= _engine_settings(others, kwargs["module_dim"])
            idle = tuple(f"{vocab.program[index]}." for index in (NULL, START))  # modules that never run
            weights = {key: value for key, value in weights.items() if not key.startswith(idle)}
        networks[name] = {"kwargs": kwargs, "weights": weights}
    if not networks:
        raise InputError("is a checkpoint of the original toolkit without any network")
    return {"networks": networks, "vocab": vocab.to_json()}


def _engine_settings(others: _Others, module_dim: int) -> dict[str, Any]:
    """Return the settings of the engine that have another meaning in the original, or that are fixed there."""
    return {
        # The original runs one example at a time, and its batch norm sees one.
        "module_norm": "example" if others.module_batchnorm else "none",
        "scene": "module",
        "stem": "conv" if others.stem_num_layers else "none",
        "stem_widths": [module_dim] * max(0, others.stem_num_layers - 1),
        "stem_bias": True,
        "classifier_pool": _POOLS[others.classifier_downsample],
        "classifier_pool_rest": False,
    }


def _settings(
    config: Any, values: dict[str, Any], names: Mapping[str, str], source: str
) -> tuple[dict[str, Any], _Others]:
    """Return the arguments `values` of the original as settings of this toolkit, and those that are no settings.

    `config` holds the defaults. The original accepts None for 0, and 0 and 1 for flags.

    Raises:
        InputError: an argument has an invalid value, or is unknown, so that it might change what the network computes.
    """
    values.pop("verbose", None)
    others = _Others()
    for name, value in values.items():
        if name not in names:
            raise InputError(f"{source}: unknown option {name!r}{nearest(name, names)}")
        ours = names[name]
        is_setting = hasattr(config, ours)
        held = getattr(config if is_setting else others, ours)
        if (type(held) is bool and value in (0, 1)) or (type(held) is int and value is None):
            value = type(held)(value or 0)
        if is_setting:
            config = update(config, {ours: value}, f"{source}: {name}")
        else:
            others = update(others, {ours: value}, f"{source}: {name}")
    return to_dict(config), others


def _check_vocab(values: dict[str, Any], source: str, vocab: Vocab, kinds: Sequence[str]) -> None:
    """Check that the network's own vocabulary, if any, is the checkpoint's in the kinds of tokens that it uses.

    Raises:
        InputError: the tokens differ.
    """
    own = values.pop("vocab", None)
    held = vocab if own is None else Vocab.from_json(own, f"{source}: vocab")
    for kind in kinds:
        if getattr(held, kind) != getattr(vocab, kind):
            raise InputError(f"{source}: vocab has other {kind} tokens than the checkpoint's own vocab")
