"""A checkpoint of the original IEP toolkit -> the networks of a checkpoint of this one.

The original toolkit saves a dictionary by torch. For each of `program_generator`, `execution_engine` and `baseline` it
holds the constructor's arguments (`_kwargs`) and the weights (`_state`), both None if there is no such network. It also
holds `vocab`, the command line `args`, and statistics. Weights keep their names; those of modules that never run are
left out. Most arguments are settings of this toolkit under another name. `checkpoint.py` reads the file.
"""

import argparse
from collections.abc import Mapping
from typing import Any

from iep.config import CnnLstmConfig, CnnLstmSaConfig, EngineConfig, GeneratorConfig, LstmConfig, update
from iep.errors import InputError, nearest
from iep.models.network import Packed, settings_of_network
from iep.vocab import END, NULL, START, Vocab

PARTS = ("program_generator", "execution_engine", "baseline")
"""The original toolkit's names of networks."""
_POOLS = {"none": 1, "maxpool2": 2, "maxpool4": 4}
_OTHERS: Mapping[str, Any] = {
    "feature_dim": (1024, 14, 14),
    "stem_num_layers": 2,
    "module_batchnorm": False,
    "classifier_downsample": "maxpool2",
}
"""The arguments of the original that are not settings of this toolkit, with their defaults."""
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
_NETWORKS = {
    "program_generator": ("generator", GeneratorConfig(), _GENERATOR),
    "execution_engine": ("engine", EngineConfig(), _ENGINE),
    "LSTM": ("lstm", LstmConfig(), _LSTM),
    "CNN+LSTM": ("cnn_lstm", CnnLstmConfig(), _CNN_LSTM),
    "CNN+LSTM+SA": ("cnn_lstm_sa", CnnLstmSaConfig(), _CNN_LSTM_SA),
}
"""The original's name of a network or baseline -> our name, our default settings, and our setting for each of the
original's arguments."""


class _Ignored:
    """A placeholder for numbers and arrays of numpy in the original's files, of which nothing is kept."""

    def __init__(self, *_: object):
        pass

    def __setstate__(self, state: object) -> None:
        """Keep nothing."""


def safe_globals() -> list[Any]:
    """Return the globals that the original's files may use, for `torch.serialization.safe_globals`.

    No numpy object is made, because numpy would trust the file's description of raw bytes. Only statistics hold any.
    """
    functions = [f"{core}.multiarray.{name}" for core in ("core", "_core") for name in ("scalar", "_reconstruct")]
    return [argparse.Namespace, *((_Ignored, f"numpy.{name}") for name in ("dtype", "ndarray", *functions))]


def is_original(content: object) -> bool:
    """Return whether the content of a torch file is a checkpoint of the original toolkit."""
    return isinstance(content, Mapping) and any(f"{part}_kwargs" in content for part in PARTS)


def from_original(content: Mapping[str, Any]) -> tuple[dict[str, Packed], Vocab]:
    """Return the networks and the vocabulary of a checkpoint of the original, as checkpoints of this toolkit hold them.

    Raises:
        InputError: there is no network, an option is unknown or has an invalid value, or sizes do not fit the
            vocabulary.
        Exception: a part is missing or of another type.
    """
    vocab = Vocab.from_json(content.get("vocab"), "vocab")
    networks = {}
    for part in PARTS:
        options: Any = content.get(f"{part}_kwargs")
        weights: Any = content.get(f"{part}_state")
        if options is None and weights is None:
            continue
        values, weights, source = dict(options), dict(weights), f"{part}_kwargs"
        kind = content.get("baseline_type") if part == "baseline" else part
        known = [each for each in _NETWORKS if (each in PARTS) == (part != "baseline")]
        if kind not in known:
            raise InputError(f"{source}: baseline_type is {kind!r}, expected one of {', '.join(known)}")
        name, config, names = _NETWORKS[kind]
        if name == "generator":
            counts = {"encoder_vocab_size": len(vocab.question), "decoder_vocab_size": len(vocab.program)}
            for option, expected in {**counts, "null_token": NULL, "start_token": START, "end_token": END}.items():
                if (value := values.pop(option, expected)) != expected:
                    raise InputError(f"{source}: {option} is {value!r}, expected {expected}, as in vocab")
        values.pop("vocab", None)  # the checkpoint's own
        config, others = _settings(config, values, names, source)
        settings = settings_of_network(name, config, vocab, others["feature_dim"])
        if name == "engine":
            settings |= _engine_settings(others, config.module_dim)
            idle = tuple(f"{vocab.program[index]}." for index in (NULL, START))  # modules that never run
            weights = {key: value for key, value in weights.items() if not key.startswith(idle)}
        networks[name] = Packed(settings, weights)
    if not networks:
        raise InputError("is a checkpoint of the original toolkit without any network")
    return networks, vocab


def _engine_settings(others: Mapping[str, Any], module_dim: int) -> dict[str, Any]:
    """Return the settings of the engine that have another meaning in the original, or that are fixed there."""
    return {
        # The original runs one example at a time, and its batch norm sees one.
        "module_norm": "example" if others["module_batchnorm"] else "none",
        "scene": "module",
        "stem": "conv" if others["stem_num_layers"] else "none",
        "stem_widths": [module_dim] * max(0, others["stem_num_layers"] - 1),
        "stem_bias": True,
        "classifier_pool": _POOLS[others["classifier_downsample"]],
        "classifier_pool_rest": False,
    }


def _settings(config: Any, values: dict[str, Any], names: Mapping[str, str], source: str) -> tuple[Any, dict[str, Any]]:
    """Return the arguments `values` of the original as settings of this toolkit, and those of `_OTHERS`.

    `config` holds the defaults. The original accepts None for 0, and 0 and 1 for flags.

    Raises:
        InputError: an argument has an invalid value, or is unknown, so that it might change what the network computes.
    """
    values.pop("verbose", None)
    others = dict(_OTHERS)
    for name, value in values.items():
        if name not in names:
            raise InputError(f"{source}: unknown option {name!r}{nearest(name, names)}")
        ours = names[name]
        held = others[ours] if ours in others else getattr(config, ours)
        if (type(held) is bool and value in (0, 1)) or (type(held) is int and value is None):
            value = type(held)(value or 0)
        if ours in others:
            others[ours] = value
        else:
            config = update(config, {ours: value}, f"{source}: {name}")
    return config, others
