"""The recipes in `scripts/` run whole on small data, leave their files, and resume where they were killed."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import torch
from recipe_cases import (
    NEW_WORDS,
    QUESTIONS_PER_IMAGE,
    RARE_WORD,
    SCRIPTS,
    Recipe,
    Recipes,
    write_clevr,
    write_cogent,
    write_humans,
)
from safetensors.torch import load_file
from tiny_data import tiny

import iep
from iep.config import Config, read_config
from iep.evaluation.json_report import Report, read_report
from iep.models.checkpoint import BEST, load_checkpoint
from iep.preprocess.backbones import Scenes
from iep.programs import json_to_prefix
from iep.synth.presets import resolve
from iep.synth.synthesize import synthesize
from iep.synth.templates import CLOSURE_GROUPS
from iep.vocab import Vocab

LEARNING = "learning_rate=0.01"  # of which the recipes have their own
SMALL = (
    *(setting for setting in tiny("joint") if setting != LEARNING),
    "iterations=2",
    "validate_every=1",
    "max_program_length=8",
)
PREPROCESS = "--backbone patches --dtype float16"
SIZES = {"train": 30, "val": 8, "test": 2}


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recipes]:
    with closing(Recipes(tmp_path_factory.mktemp("recipes"))) as recipes:
        yield recipes


@pytest.fixture(scope="module")
def clevr(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clevr(tmp_path_factory.mktemp("clevr") / "CLEVR", **SIZES)


@pytest.fixture(scope="module")
def trained(recipes: Recipes, clevr: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recipe]:
    """Where `train_clevr.sh` has trained on few programs, and how it ended."""
    out = tmp_path_factory.mktemp("trained") / "data"
    return out, recipes.run("train_clevr.sh", clevr, out, *SMALL, PROGRAMS=200, PREPROCESS=PREPROCESS)


def config(run: Path) -> Config:
    return read_config(run / "config.yaml")


def networks(run: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The weights of a run's best checkpoint, by network."""
    return {name: packed["weights"] for name, packed in load_checkpoint(run / BEST)["networks"].items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def report(directory: Path) -> Report:
    return read_report(directory / "report.json")


def predictions(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "predictions.jsonl").read_text().splitlines()]


def questions(clevr: Path, split: str) -> list[dict[str, Any]]:
    return json.loads((clevr / f"questions/CLEVR_{split}_questions.json").read_text())["questions"]


# CLEVR


def test_closure_is_evaluated_file_by_file_with_predicted_and_true_programs(
    recipes: Recipes, clevr: Path, trained, tmp_path: Path
):
    """About images of its own, and about those that the models know."""
    out, _ = trained
    options = resolve("mini", {"min_objects": 3}, train=0, val=8, test=0, questions_per_image=14, families="closure")
    synthesize(tmp_path / "closure", options)
    shutil.rmtree(tmp_path / "closure" / "images")  # the download has no images, and these are those of `clevr`
    run = out / "runs/200/joint"
    recipe = recipes.run("evaluate_closure.sh", tmp_path / "closure", out, run, run, tmp_path / "out")
    assert recipe.returncode == 0, recipe.output
    rows = [line.split() for line in (tmp_path / "out/closure.txt").read_text().splitlines()[1:]]
    assert [row[0] for row in rows] == sorted(f"{group}_val" for group in CLOSURE_GROUPS)
    assert sum(int(row[1]) for row in rows) == 8 * 14
    for group, _, *percentages in rows:
        found = [report(tmp_path / "out/eval" / kind / group) for kind in ("predicted", "true")]
        assert percentages == [f"{each.accuracy.overall:.1%}" for each in found]
        assert [each.programs for each in found] == ["predicted", "ground-truth"]


def test_few_programs_train_the_generator_whose_programs_train_the_engine_then_both_learn_jointly(trained):
    out, recipe = trained
    assert recipe.returncode == 0, recipe.output
    assert [command[0] for command in recipe.commands] == ["iep-preprocess", *["iep-train"] * 3, *["iep-eval"] * 2]
    runs = out / "runs/200"
    pg, ee, joint = (config(runs / name) for name in ("pg", "ee", "joint"))
    assert (pg.model, pg.num_train_samples, pg.iterations) == ("pg", 200, 2)
    assert (ee.model, ee.programs, ee.num_train_samples, ee.pg) == ("ee", "predicted", None, f"{runs}/pg")
    assert (joint.model, joint.pg, joint.ee) == ("joint", f"{runs}/pg", f"{runs}/ee")
    found = report(runs / "eval/val")
    assert found.checkpoints == {"pg": f"{runs}/joint", "ee": f"{runs}/joint"}
    assert (found.questions, found.programs) == (SIZES["val"] * QUESTIONS_PER_IMAGE, "predicted")
    assert len((runs / "eval/test/answers.txt").read_text().splitlines()) == SIZES["test"] * QUESTIONS_PER_IMAGE


def test_all_programs_train_generator_and_engine_apart(recipes: Recipes, clevr: Path, trained):
    out, _ = trained
    recipe = recipes.run("train_clevr.sh", clevr, out, *SMALL, PROGRAMS=700000, PREPROCESS=PREPROCESS)
    assert recipe.returncode == 0, recipe.output
    assert "train_questions.h5: already done" in recipe.output
    runs = out / "runs/700000"
    pg, ee = config(runs / "pg"), config(runs / "ee")
    assert (pg.num_train_samples, ee.num_train_samples) == (None, None)
    assert (ee.programs, ee.pg) == ("ground-truth", None)
    assert not (runs / "joint").exists()
    assert report(runs / "eval/val").checkpoints == {"pg": f"{runs}/pg", "ee": f"{runs}/ee"}


def test_a_killed_recipe_resumes_to_the_same_weights(recipes: Recipes, clevr: Path, trained, tmp_path: Path):
    again = (clevr, tmp_path / "data", *SMALL)
    for kill in (0, 2, 3):
        recipe = recipes.run("train_clevr.sh", *again, kill=kill, PROGRAMS=200, PREPROCESS=PREPROCESS)
        assert recipe.returncode == -SIGKILL % 256, recipe.output
        assert len(recipe.commands) == kill + 1
    recipe = recipes.run("train_clevr.sh", *again, PROGRAMS=200, PREPROCESS=PREPROCESS)
    assert recipe.returncode == 0, recipe.output
    for name in ("pg", "ee", "joint"):
        whole, cut = (networks(out / "runs/200" / name) for out in (trained[0], tmp_path / "data"))
        assert all(same(whole[network], cut[network]) for network in whole)
    evaluated = [out / "runs/200/eval/val" for out in (trained[0], tmp_path / "data")]
    assert report(evaluated[0]).accuracy == report(evaluated[1]).accuracy


# CLEVR-Humans


def test_fine_tuning_on_humans_teaches_the_generator_new_words_and_keeps_the_engine(
    recipes: Recipes, clevr: Path, trained, tmp_path: Path
):
    humans, out = write_humans(tmp_path / "CLEVR-Humans", clevr), tmp_path / "data"
    joint = trained[0] / "runs/200/joint"
    settings = (*SMALL, "iterations=12", "validate_every=12")  # without a reward, the generator learns nothing
    recipe = recipes.run("train_humans.sh", humans, trained[0], joint, joint, out, *settings, UNK_THRESHOLD=2)
    assert recipe.returncode == 0, recipe.output
    known, expanded = Vocab.load(trained[0] / "vocab.json").question, Vocab.load(out / "vocab.json").question
    assert expanded == (*known, *sorted({*NEW_WORDS, ","} - set(known)))
    assert RARE_WORD not in expanded
    assert f"{joint}: {len(expanded) - len(known)} new question words" in recipe.output
    before, after = networks(joint), networks(out / "runs/joint")
    assert same(before["engine"], after["engine"])
    assert after["generator"]["encoder_embed.weight"].shape[0] == len(expanded)
    assert not torch.equal(before["generator"]["decoder_linear.weight"], after["generator"]["decoder_linear.weight"])
    for split in ("val", "test"):
        reports = [report(out / "eval" / when / split) for when in ("before", "after")]
        assert reports[0].questions == reports[1].questions == SIZES[split] * QUESTIONS_PER_IMAGE // 5
    asked = [row["question"] for row in predictions(out / "eval/after/val")]
    assert all(NEW_WORDS[0] in question for question in asked[1:])
    assert "<UNK>" in asked[0]


# CLEVR-CoGenT


def test_cogent_is_trained_on_a_fine_tuned_on_a_part_of_b_and_evaluated_on_both(recipes: Recipes, tmp_path: Path):
    cogent, out = write_cogent(tmp_path / "CoGenT", **SIZES), tmp_path / "data"
    variables = {"PROGRAMS": 150, "QUESTIONS_OF_B": 60, "PREPROCESS": PREPROCESS}
    recipe = recipes.run("train_cogent.sh", cogent, out, *SMALL, **variables)
    assert recipe.returncode == 0, recipe.output
    runs, on_b_runs = out / "runs/150", out / "runs/150/on_b/60"
    pg, on_b = config(runs / "pg"), config(on_b_runs / "joint")
    assert (pg.train_split, pg.val_split, pg.num_train_samples) == ("trainA", "valA", 150)
    assert (on_b.train_split, on_b.num_train_samples, on_b.val_split, on_b.skip_val_samples) == ("valB", 60, "valB", 60)
    assert on_b.pg == on_b.ee == f"{runs}/joint"
    count = SIZES["val"] * QUESTIONS_PER_IMAGE
    for name, run in (("trained", runs / "joint"), ("fine-tuned", on_b_runs / "joint")):
        a, b = (report(on_b_runs / "eval" / name / condition) for condition in "AB")
        assert a.checkpoints["pg"] == b.checkpoints["pg"] == str(run)
        assert (a.split, a.questions, a.selection) == ("valA", count, "")
        assert (b.split, b.questions, b.selection) == ("valB", count - 60, "without the first 60")
        assert "most_common" in a.baselines
    assert re.search(
        r"trained, A +questions +trained, B +questions +fine-tuned, A +questions +fine-tuned, B", recipe.output
    )
    asked = [row["question_index"] for row in predictions(on_b_runs / "eval/fine-tuned/B")]
    assert asked == [question["question_index"] for question in questions(cogent, "valB")][60:]


# Short and long programs


def test_short_families_train_and_long_ones_come_with_joint_training(
    recipes: Recipes, clevr: Path, trained, tmp_path: Path
):
    out, _ = trained
    recipe = recipes.run("train_short_long.sh", clevr, out, *SMALL, PROGRAMS=100, PREPROCESS=PREPROCESS)
    assert recipe.returncode == 0, recipe.output
    runs = out / "runs/short_long/100"
    pg, ee, joint = (config(runs / name) for name in ("pg", "ee", "joint"))
    assert (pg.families, pg.num_train_samples, ee.families, joint.families) == ("short", 100, "short", None)
    lengths = {}
    for question in questions(clevr, "train"):
        lengths.setdefault(question["question_family_index"], []).append(len(json_to_prefix(question["program"])))
    short = {family for family, found in lengths.items() if sum(found) / len(found) < 16}
    for name, run in (("trained", "ee"), ("fine-tuned", "joint")):
        rows = {families: predictions(runs / "eval" / name / families) for families in ("short", "long")}
        assert {row["family"] for row in rows["short"]} & lengths.keys() <= short
        assert not {row["family"] for row in rows["long"]} & short
        assert sum(map(len, rows.values())) == SIZES["val"] * QUESTIONS_PER_IMAGE
        assert report(runs / "eval" / name / "long").checkpoints["ee"] == f"{runs / run}"
        assert report(runs / "eval" / name / "long").selection == "families long"


# Synthetic data


def test_engines_of_synthetic_data_answer_its_questions_and_those_about_other_images(
    recipes: Recipes, clevr: Path, tmp_path: Path
):
    made = "--train 12 --val 4 --max-objects 4 --width 96 --height 64 --questions-per-image 5"
    recipe = recipes.run("train_synth.sh", tmp_path, "--small", *SMALL, SYNTH=made, REAL=clevr)
    assert recipe.returncode == 0, recipe.output
    assert [config(tmp_path / name).model for name in ("pg", "ee", "pooled")] == ["pg", "ee", "ee"]
    for data, count in (("synth", 4 * 5), ("real-train", SIZES["train"] * 20), ("real-val", SIZES["val"] * 20)):
        for name in ("ee", "pooled"):
            true, predicted = (report(tmp_path / "eval" / data / each) for each in (name, f"{name}-predicted"))
            assert (true.questions, true.programs, predicted.programs) == (count, "ground-truth", "predicted")
            assert true.checkpoints["ee"] == predicted.checkpoints["ee"] == f"{tmp_path / name}"
    assert iep.load(tmp_path / "networks").ask(next(clevr.rglob("*.png")), "How big is it?").answer
    batch_size = config(tmp_path / "pooled").batch_size
    assert re.search(
        rf"pooled: validation accuracy .*\n +{batch_size} +[\d.]+\n +{2 * batch_size} +[\d.]+\n", recipe.output
    )
    assert re.search(r"ee +ee-predicted +pooled +pooled-predicted", recipe.output)
    assert "precision" in recipe.output, "of the backbone on the other images"
    assert len(re.findall("^overall", recipe.output, re.MULTILINE)) == 3, "one table for each split"


def test_other_images_that_cannot_be_read_are_an_error_before_the_training(recipes: Recipes, tmp_path: Path):
    made = "--train 2 --val 1 --width 96 --height 64 --questions-per-image 1"
    recipe = recipes.run("train_synth.sh", tmp_path, *SMALL, SYNTH=made, REAL=tmp_path / "nowhere")
    assert recipe.returncode == 2
    assert "nowhere" in recipe.output.splitlines()[-1]
    assert [command[0] for command in recipe.commands] == ["iep-synth", "iep-preprocess", "iep-preprocess"]


def test_a_backbone_is_made_from_nothing_and_exported(recipes: Recipes, tmp_path: Path):
    settings = (
        "iterations=2",
        "validate_every=1",
        "batch_size=2",
        "backbone.widths=[4,4,8]",
        "backbone.image_size=[48,32]",
    )
    recipe = recipes.run("train_backbone.sh", tmp_path, *settings, SYNTH="--train 4 --val 2")
    assert recipe.returncode == 0, recipe.output
    stored = load_file(tmp_path / "synth.safetensors").items()
    network = Scenes(str(tmp_path / "synth.safetensors")).network
    assert network.kwargs["widths"] == [4, 4, 8]
    assert {each.dtype for name, each in stored if not name.endswith("num_batches_tracked")} == {torch.float16}
    assert {each.dtype for each in network.parameters()} == {torch.float32}
    assert "2 images" in recipe.output
    assert "precision" in recipe.output


# How they are called

RECIPES = {path.name: text for path in SCRIPTS.glob("*.sh") if "\nexpect " in (text := path.read_text())}
MAKE_DATA = {name for name, text in RECIPES.items() if "\nexpect 0 " in text}
"""Recipes that need no directory."""


@pytest.mark.parametrize(
    ("script", "arguments", "code"),
    [
        *((script, (), 2) for script in sorted(RECIPES.keys() - MAKE_DATA)),
        *((script, "abcdef", 2) for script in sorted(RECIPES)),
        *((script, ("a", "--help"), 0) for script in sorted(RECIPES)),
    ],
)
def test_a_recipe_shows_its_usage_where_asked_or_given_wrong_arguments(recipes: Recipes, script, arguments, code):
    recipe = recipes.run(script, *arguments)
    assert (recipe.returncode, recipe.commands) == (code, [])
    assert re.fullmatch(rf"usage: .*scripts/{script} \S.*\n", recipe.output)


def test_a_recipe_says_how_to_give_a_setting_of_iep_train(recipes: Recipes):
    recipe = recipes.run("train_clevr.sh", "CLEVR", "--batch-size", "32")
    assert (recipe.returncode, recipe.commands) == (2, [])
    assert recipe.output == "--batch-size: settings of iep-train are given as KEY=VALUE, such as batch_size=32\n"
