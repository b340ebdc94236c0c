"""A checkpoint of the original IEP toolkit -> the content of a checkpoint of this one.

The original saves with torch a dictionary of, for each of `program_generator`, `execution_engine` and `baseline`, the
constructor's arguments (`_kwargs`) and the weights (`_state`), either None where there is no such network; `vocab`;
`args`, its command line; and statistics. Weights keep their names but for modules that never run. What the arguments
mean there is written down here; reading the file safely is `checkpoint.py`'s.
"""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from iep.errors import InputError, nearest
from iep.vocab import END, NULL, START, Vocab

PARTS = ("program_generator", "execution_engine", "baseline")
"""The original's names of networks."""
_POOLS = {"none": 1, "maxpool2": 2, "maxpool4": 4}
_NUMBER = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248])")
"""Codes of numpy's dtypes that are numbers."""


class _Dtype:
    """Stands for one of numpy's dtypes in the original's files: its code and byte order alone."""

    def __init__(self, code: object, *_: object):
        self.code = code if isinstance(code, str) else ""

    def __setstate__(self, state: object) -> None:
        order = state[1] if isinstance(state, tuple) and len(state) > 1 else ""
        self.code = f"{order}{self.code}" if isinstance(order, str) else ""


class _Ignored:
    """Stands for one of numpy's arrays: nothing of it is kept."""

    def __init__(self, *_: object):
        pass

    def __setstate__(self, state: object) -> None:
        """Keep nothing."""


def _number(dtype: object = None, content: object = b"") -> object:
    """One of numpy's numbers as Python's; anything else that is said to be one is ignored."""
    if isinstance(dtype, _Dtype) and _NUMBER.fullmatch(dtype.code) and isinstance(content, bytes):
        values = np.frombuffer(content, dtype=dtype.code) if len(content) == int(dtype.code[-1]) else ()
        return values[0].item() if len(values) else _Ignored()
    return _Ignored()


def safe_globals() -> list[Any]:
    """What the original's files may hold besides plain containers and tensors, for `torch.serialization.safe_globals`.

    Nothing of numpy's is made, which would trust what the file says of bytes: its numbers are read here, its arrays,
    which only statistics hold, are passed over.
    """
    inert = [(_Dtype, "numpy.dtype"), (_Ignored, "numpy.ndarray")]
    for core in ("core", "_core"):
        inert += [(_number, f"numpy.{core}.multiarray.scalar"), (_Ignored, f"numpy.{core}.multiarray._reconstruct")]
    return [argparse.Namespace, *inert]


def is_original(content: object) -> bool:
    """Is the content of a loaded torch file a checkpoint of the original toolkit?"""
    return isinstance(content, Mapping) and any(f"{part}_kwargs" in content for part in PARTS)


def from_original(content: Mapping[str, Any], path: object) -> dict[str, Any]:
    """The networks and the vocabulary of one of the original's checkpoints as a checkpoint of this toolkit has them.

    Args:
        content: of the torch file.
        path: names the file in errors.

    Raises:
        InputError: there is no network, a part is missing or of another kind, an option is unknown or has a value that
            the original does not know, or sizes do not fit the vocabulary.
    """
    vocab = Vocab.from_json(content.get("vocab"), f"{path}: vocab")
    networks = {}
    for part in PARTS:
        if content.get(f"{part}_kwargs") is None and content.get(f"{part}_state") is None:
            continue
        options = Options(content.get(f"{part}_kwargs"), f"{path}: {part}_kwargs")
        weights = _weights(content.get(f"{part}_state"), f"{path}: {part}_state")
        if part == "program_generator":
            networks["generator"] = {"kwargs": _generator(options, vocab), "weights": weights}
        elif part == "execution_engine":
            kwargs = _engine(options, vocab)
            weights = _without_idle_modules(weights, vocab, f"{path}: {part}_state")
            networks["engine"] = {"kwargs": kwargs, "weights": weights}
        else:
            name, kwargs = _baseline(content.get("baseline_type"), options, vocab)
            networks[name] = {"kwargs": kwargs, "weights": weights}
        options.none_left()
    if not networks:
        raise InputError(f"{path}: a checkpoint of the original toolkit without any network")
    return {"networks": networks, "vocab": vocab.to_json()}


class Options:
    """The original's constructor arguments, each asked for once by its name, kind and default there.

    Every method raises InputError, beginning with `source`, where a value is not of its kind.
    """

    def __init__(self, values: object, source: str):
        if not isinstance(values, Mapping):
            raise InputError(f"{source}: {_said(values)}, expected the network's options by name")
        self.source = source
        self._values = dict(values)

    def _check(self, fits: bool, name: str, value: Any, expected: str) -> None:
        if not fits:
            raise InputError(f"{self.source}: {name} is {_said(value)}, expected {expected}")

    def whole(self, name: str, default: int | None, minimum: int = 0) -> int:
        """A whole number; None stands for 0."""
        value = self._values.pop(name, default)
        value = 0 if value is None else value
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
        self._check(fits, name, value, f"a whole number from {minimum} on")
        return value

    def wholes(self, name: str, default: Sequence[int], count: int | None = None) -> list[int]:
        """Whole numbers from 1 on, so many."""
        values = self._values.pop(name, default)
        fits = isinstance(values, (tuple, list)) and all(type(value) is int and value > 0 for value in values)
        expected = "whole numbers from 1 on" if count is None else f"{count} whole numbers from 1 on"
        self._check(fits and count in (None, len(values)), name, values, expected)
        return list(values)

    def flag(self, name: str, default: bool) -> bool:
        """True or false, also as 1 or 0."""
        value = self._values.pop(name, default)
        self._check(isinstance(value, int) and value in (0, 1), name, value, "true or false")
        return bool(value)

    def share(self, name: str) -> float:
        """A probability, 0 unless given."""
        value = self._values.pop(name, 0)
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1
        self._check(fits, name, value, "a probability from 0 to below 1")
        return float(value)

    def choice(self, name: str, choices: Mapping[str, Any], default: str) -> Any:
        """What `choices` has for the value."""
        value = self._values.pop(name, default)
        known = isinstance(value, str) and value in choices
        hint = "" if known else nearest(str(value), choices)
        self._check(known, name, value, f"one of {', '.join(choices)}{hint}")
        return choices[value]

    def must_be(self, name: str, expected: int, why: str) -> None:
        """A number that is as expected, if it is given."""
        value = self._values.pop(name, expected)
        self._check(type(value) is int and value == expected, name, value, f"{expected}, {why}")

    def vocab(self, vocab: Vocab, kinds: Sequence[str]) -> None:
        """The network's own vocabulary, if it has one: in the kinds that it uses that of the checkpoint."""
        value = self._values.pop("vocab", None)
        own = vocab if value is None else Vocab.from_json(value, f"{self.source}: vocab")
        for kind in kinds:
            if getattr(own, kind) != getattr(vocab, kind):
                raise InputError(f"{self.source}: vocab has other {kind} tokens than the checkpoint's own vocab")

    def none_left(self) -> None:
        """Refuse options that nothing has asked for: they might change what the network computes."""
        self._values.pop("verbose", None)
        if self._values:
            raise InputError(f"{self.source}: unknown option {next(iter(self._values))!r}")


def _said(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _weights(state: object, source: str) -> dict[str, Tensor]:
    if not isinstance(state, Mapping):
        raise InputError(f"{source}: {_said(state)}, expected the network's weights by name")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise InputError(f"{source}: {name} is a {type(value).__name__}, expected a tensor")
    return dict(state)


def _generator(options: Options, vocab: Vocab) -> dict[str, Any]:
    for kind, side in (("question", "encoder"), ("program", "decoder")):
        tokens = getattr(vocab, kind)
        options.must_be(f"{side}_vocab_size", len(tokens), f"as many as there are {kind} tokens in vocab")
    for name, index in (("null_token", NULL), ("start_token", START), ("end_token", END)):
        options.must_be(name, index, "as in every vocabulary")
    return {
        "num_question_tokens": len(vocab.question),
        "num_program_tokens": len(vocab.program),
        "embedding_dim": options.whole("wordvec_dim", 300, 1),
        "hidden_dim": options.whole("hidden_dim", 256, 1),
        "num_layers": options.whole("rnn_num_layers", 2, 1),
        "dropout": options.share("rnn_dropout"),
    }


def _engine(options: Options, vocab: Vocab) -> dict[str, Any]:
    options.vocab(vocab, ("program", "answer"))
    layers, dim = options.whole("stem_num_layers", 2), options.whole("module_dim", 128, 1)
    return {
        "program_tokens": list(vocab.program),
        "num_answers": len(vocab.answer),
        **_feature_sides(options, "feature_dim"),
        "module_dim": dim,
        "module_residual": options.flag("module_residual", True),
        # Its examples run one at a time, and so does its batch norm.
        "module_norm": "example" if options.flag("module_batchnorm", False) else "none",
        "scene": "module",
        "stem": "conv" if layers else "none",
        "stem_widths": [dim] * max(0, layers - 1),
        "stem_norm": options.flag("stem_batchnorm", False),
        "stem_bias": True,
        "classifier_projection": options.whole("classifier_proj_dim", 512),
        "classifier_pool": options.choice("classifier_downsample", _POOLS, "maxpool2"),
        "classifier_pool_rest": False,
        "classifier_hidden": options.wholes("classifier_fc_layers", (1024,)),
        "classifier_norm": options.flag("classifier_batchnorm", False),
        "classifier_dropout": options.share("classifier_dropout"),
    }


def _feature_sides(options: Options, name: str) -> dict[str, int]:
    sides = options.wholes(name, (1024, 14, 14), count=3)
    return dict(zip(("feature_dim", "feature_height", "feature_width"), sides, strict=True))


def _without_idle_modules(weights: dict[str, Tensor], vocab: Vocab, source: str) -> dict[str, Tensor]:
    """The weights but for those of `<NULL>` and `<START>`, which have a module like any other's and never run.

    Raises:
        InputError: these are not like those of `<END>`: the file is damaged, or no such engine's.
    """

    def of(index: int) -> dict[str, torch.Size]:
        start = f"{vocab.program[index]}."
        return {name.removeprefix(start): value.shape for name, value in weights.items() if name.startswith(start)}

    expected = of(END)
    for index in (NULL, START):
        if of(index) != expected:
            token = vocab.program[index]
            raise InputError(f"{source}: the weights of {token} are not of the same shapes as those of <END>")
    idle = tuple(f"{vocab.program[index]}." for index in (NULL, START))
    return {name: value for name, value in weights.items() if not name.startswith(idle)}


def _baseline(kind: object, options: Options, vocab: Vocab) -> tuple[str, dict[str, Any]]:
    """A baseline's name here, and its constructor's arguments."""
    if not isinstance(kind, str) or kind not in _BASELINES:
        raise InputError(f"{options.source}: baseline_type is {_said(kind)}, expected one of {', '.join(_BASELINES)}")
    name, more = _BASELINES[kind]
    options.vocab(vocab, ("question", "answer"))
    return name, {
        "num_question_tokens": len(vocab.question),
        "num_answers": len(vocab.answer),
        "embedding_dim": options.whole("rnn_wordvec_dim", 300, 1),
        "hidden_dim": options.whole("rnn_dim", 256, 1),
        "num_layers": options.whole("rnn_num_layers", 2, 1),
        "dropout": options.share("rnn_dropout"),
        "classifier_dims": options.wholes("fc_dims", (1024,)),
        "classifier_norm": options.flag("fc_use_batchnorm", False),
        "classifier_dropout": options.share("fc_dropout"),
        **more(options),
    }


def _cnn(options: Options) -> dict[str, Any]:
    return {
        **_feature_sides(options, "cnn_feat_dim"),
        "cnn_res_blocks": options.whole("cnn_num_res_blocks", 0),
        "cnn_res_block_dim": options.whole("cnn_res_block_dim", 128, 1),
        "cnn_projection": options.whole("cnn_proj_dim", 512),
        "cnn_pooling": options.choice("cnn_pooling", {name: name for name in ("maxpool2", "none")}, "maxpool2"),
    }


def _stacked_attention(options: Options) -> dict[str, Any]:
    return {
        "feature_dim": _feature_sides(options, "cnn_feat_dim")["feature_dim"],
        "attention_dim": options.whole("stacked_attn_dim", 512, 1),
        "attention_steps": options.whole("num_stacked_attn", 2),
    }


_BASELINES: dict[str, tuple[str, Callable[[Options], dict[str, Any]]]] = {
    "LSTM": ("lstm", lambda options: {}),
    "CNN+LSTM": ("cnn_lstm", _cnn),
    "CNN+LSTM+SA": ("cnn_lstm_sa", _stacked_attention),
}
