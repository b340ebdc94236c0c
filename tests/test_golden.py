"""Seeded trainings have the losses of a golden file, and the shipped networks answer the questions of `data/sample`.

If the losses are meant to change, `python tests/test_golden.py` writes them anew.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tiny_data import tiny_config, write_data
from train_cases import rows

import iep
from iep.training.run_training import train

ROOT = Path(__file__).parents[1]
LOSSES = Path(__file__).with_name("golden_losses.json")
STEPS = 20
TRAININGS = {
    "pg": ("pg",),
    "ee": ("ee", "engine.stem_norm=true", "sharing=true", "questions_per_image=2"),
    "pooled": ("ee", "engine.modules=pooled", "clip_gradients=1", "curriculum=[[0,6],[10,40]]"),
}
"""By name, the model and the settings of a training."""


def seeded_losses(data: Path, out: Path, name: str) -> list[float]:
    """Return the losses of the first steps of a training."""
    settings = (f"iterations={STEPS}", "validate_every=20", "learning_rate=1e-3", "warmup=5")
    train(tiny_config(data, *TRAININGS[name], *settings), out, resume=False)
    return [row["loss"] for row in rows(out) if "loss" in row]


@pytest.mark.parametrize("name", TRAININGS)
def test_seeded_losses_stay_the_same(data: Path, tmp_path: Path, name: str):
    losses = seeded_losses(data, tmp_path, name)
    assert len(losses) == STEPS
    assert losses == pytest.approx(json.loads(LOSSES.read_text())[name], rel=1e-6)


def test_the_shipped_networks_answer_at_least_18_of_20_questions():
    questions = json.loads((ROOT / "data/sample/questions/CLEVR_val_questions.json").read_text())["questions"]
    images = ROOT / "data/sample/images/val"
    model, right = iep.load(), []
    for question in questions[::4]:  # five about each image
        answer = model.ask(images / question["image_filename"], question["question"])
        right.append(answer.answer == question["answer"])
    assert len(right) == 20
    assert sum(right) >= 18


if __name__ == "__main__":
    with TemporaryDirectory() as directory:
        data = write_data(Path(directory) / "data")
        losses = {name: seeded_losses(data, Path(directory) / name, name) for name in TRAININGS}
    LOSSES.write_text(json.dumps(losses, indent=1) + "\n")
