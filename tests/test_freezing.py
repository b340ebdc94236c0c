"""`--freeze`: what is frozen keeps weights and running statistics and computes as in evaluation; the rest learns."""

from pathlib import Path

import pytest
import torch
from device_cases import DEVICES
from tiny_data import CHANNELS, GRID, VOCAB, newest, tiny_config
from torch import Tensor, nn
from train_cases import iep_train

from iep.config import MODELS, Config
from iep.errors import InputError
from iep.models.checkpoint import read_checkpoint
from iep.models.network import NETWORKS, Network
from iep.training.freezing import freeze, parts_of, train_mode
from iep.training.run_training import train

SETTINGS = {
    "pg": ("generator.dropout=0.5", "generator.num_layers=2"),
    "ee": (
        "engine.stem_norm=true",
        "engine.module_norm=example",
        "engine.classifier_norm=true",
        "engine.classifier_dropout=0.2",
    ),
    "joint": (),
    "cnn-lstm": ("cnn_lstm.cnn_res_blocks=1", "cnn_lstm.classifier_norm=true", "cnn_lstm.classifier_dropout=0.2"),
    "cnn-lstm-sa": ("cnn_lstm_sa.classifier_norm=true",),
}
PREFIXES = {
    ("pg", "encoder"): ("generator.encoder_",),
    ("pg", "decoder"): ("generator.decoder_",),
    ("ee", "stem"): ("engine.stem.",),
    ("ee", "classifier"): ("engine.classifier.",),
    ("joint", "generator"): ("generator.",),
    ("joint", "engine"): ("engine.",),
    ("cnn-lstm-sa", "cnn"): ("cnn_lstm_sa.image_proj.",),
    ("cnn-lstm-sa", "attention"): ("cnn_lstm_sa.stacked-attn-",),
}
CASES = [(model, part) for model in ("pg", "ee", "joint", "cnn-lstm-sa") for part in parts_of(NETWORKS[model])]


def belongs(key: str, model: str, part: str) -> bool:
    """Is a weight, by network and name, of a part?"""
    if (model, part) == ("ee", "modules"):
        return not key.startswith(("engine.stem.", "engine.classifier."))
    return key.startswith(PREFIXES.get((model, part), (f"{NETWORKS[model][0]}.{part}.",)))


def weights(path: Path) -> dict[str, Tensor]:
    """Return the weights of all networks of a checkpoint."""
    networks = read_checkpoint(path).networks
    return {f"{name}.{key}": value for name, net in networks.items() for key, value in net.weights.items()}


def config_of(data: Path, parts: list[str], model: str, *settings: str) -> Config:
    starts = parts if model == "joint" else []
    return tiny_config(data, model, "weight_decay=0.1", "validate_every=1", *SETTINGS[model], *starts, *settings)


def networks_of(model: str) -> dict[str, nn.Module]:
    config = tiny_config(Path(), model, *SETTINGS[model])
    shape = (CHANNELS, GRID, GRID)
    return {name: Network.new(name, getattr(config, name), VOCAB, shape).module for name in NETWORKS[model]}


@pytest.mark.parametrize(("model", "part"), CASES)
def test_only_what_is_frozen_stays_weights_and_running_statistics(data, parts, tmp_path: Path, model: str, part: str):
    train(config_of(data, parts, model, "iterations=1", f"freeze={part}"), tmp_path, resume=False)
    before = weights(newest(tmp_path))
    train(config_of(data, parts, model, "iterations=4", f"freeze={part}"), tmp_path, resume=True)
    after = weights(newest(tmp_path))
    moved = {key for key, value in after.items() if not torch.equal(before[key], value)}
    frozen = {key for key in after if belongs(key, model, part)}
    assert frozen
    assert not moved & frozen
    others = set(parts_of(NETWORKS[model])) - {part}
    assert all(any(belongs(key, model, other) for key in moved) for other in others)
    assert len(read_checkpoint(newest(tmp_path)).state.optimizer["param_groups"][0]["params"]) < len(after)


@pytest.mark.parametrize("frozen", ["stem", "modules"])
@pytest.mark.parametrize("how", [("defer_weight_grads=true",), ("placement=balanced", "devices=cpu,cpu")])
def test_however_the_engine_runs_what_is_frozen_stays_and_the_rest_learns_the_same(data, parts, tmp_path, frozen, how):
    plain = ("engine.initialization=torch", "learning_rate=0.001", f"freeze={frozen}")
    train(tiny_config(data, "ee", *plain), tmp_path / "plain", resume=False)
    train(tiny_config(data, "ee", *plain, *how, "device=auto"), tmp_path / "how", resume=False)
    expected, found = (weights(newest(tmp_path / out)) for out in ("plain", "how"))
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=2e-3, atol=1e-4)
        assert not any(belongs(key, "ee", part) for part in frozen.split(",")) or torch.equal(found[key], value)


# What a frozen part computes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_a_frozen_lstm_drops_nothing_and_lets_gradients_through(device: str, part: str):
    (generator,) = networks_of("pg").values()
    generator.to(device)
    freeze({"generator": generator}, [part])
    questions, programs = torch.tensor([[1, 5, 6, 2]] * 40, device=device), torch.tensor([[1, 7, 8, 2]] * 40)
    train_mode(generator, True)
    hidden = {
        "encoder": lambda: generator.encode(questions),
        "decoder": lambda: generator.decode(torch.ones(40, 10, device=device), programs.to(device))[0],
    }
    for name, run in hidden.items():
        rows = run().flatten(1)
        assert torch.allclose(rows, rows[:1].expand_as(rows), atol=1e-6) == (name == part)
    generator.loss(questions, programs.to(device)).backward()
    for key, parameter in generator.named_parameters():
        assert (parameter.grad is None) == key.startswith(part), key


# A resumed run has frozen what it froze


def test_the_order_of_names_does_not_matter_to_a_run_that_goes_on(data, parts, tmp_path: Path):
    train(config_of(data, parts, "cnn-lstm", "iterations=1", "freeze=cnn,rnn"), tmp_path, resume=False)
    assert train(config_of(data, parts, "cnn-lstm", "iterations=2", "freeze=rnn,cnn"), tmp_path, resume=True)
    with pytest.raises(InputError, match="was trained with freeze cnn, rnn, cannot resume with freeze cnn"):
        train(config_of(data, parts, "cnn-lstm", "iterations=3", "freeze=cnn"), tmp_path, resume=True)


def test_help_names_the_parts_of_every_model():
    text = " ".join(iep_train("--help").output.split())
    for model in MODELS:
        assert f"{model}: {', '.join(parts_of(NETWORKS[model]))}" in text
