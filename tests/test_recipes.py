"""The recipes in `scripts/` run whole on small data, leave their files, and resume where they were killed."""

import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from signal import SIGKILL

import pytest
from batching_cases import assert_same
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
from tiny_data import tiny

import iep
from iep.config import Config, read_config
from iep.evaluation.json_report import Report, read_report
from iep.models.checkpoint import BEST, load_checkpoint
from iep.preprocess.backbones import Scenes
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
    """Where `train_clevr.sh` has trained on few programs, killed once and resumed, and how it ended."""
    out = tmp_path_factory.mktemp("trained") / "data"
    arguments, variables = (clevr, out, *SMALL), {"PROGRAMS": 200, "PREPROCESS": PREPROCESS}
    killed = recipes.run("train_clevr.sh", *arguments, kill=2, **variables)
    assert (killed.returncode, len(killed.commands)) == (-SIGKILL % 256, 3), killed.output
    return out, recipes.run("train_clevr.sh", *arguments, **variables)


def config(run: Path) -> Config:
    return read_config(run / "config.yaml")


def report(directory: Path) -> Report:
    return read_report(directory / "report.json")


# CLEVR


def test_closure_is_evaluated_file_by_file_with_predicted_and_true_programs(recipes, clevr, trained, tmp_path: Path):
    out, _ = trained
    options = resolve("mini", {"min_objects": 3}, train=0, val=8, test=0, questions_per_image=14, families="closure")
    synthesize(tmp_path / "closure", options)
    shutil.rmtree(tmp_path / "closure" / "images")  # the download has no images, and these are those of `clevr`
    run = out / "runs/200/joint"
    recipe = recipes.run("evaluate_closure.sh", tmp_path / "closure", out, run, run, tmp_path / "out")
    assert recipe.returncode == 0, recipe.output
    rows = [line.split() for line in (tmp_path / "out/closure.txt").read_text().splitlines()[1:]]
    assert [row[0] for row in rows] == sorted(f"{group}_val" for group in CLOSURE_GROUPS)
    for group, _, *percentages in rows:
        found = [report(tmp_path / "out/eval" / kind / group) for kind in ("predicted", "true")]
        assert percentages == [f"{each.accuracy.overall:.1%}" for each in found]


def test_few_programs_train_the_generator_whose_programs_train_the_engine_then_both_learn_jointly(trained):
    out, recipe = trained
    assert recipe.returncode == 0, recipe.output
    assert [command[0] for command in recipe.commands] == ["iep-preprocess", *["iep-train"] * 3, *["iep-eval"] * 2]
    runs = out / "runs/200"
    pg, ee, joint = (config(runs / name) for name in ("pg", "ee", "joint"))
    assert (pg.model, pg.num_train_samples, pg.iterations) == ("pg", 200, 2)
    assert (ee.model, ee.programs, ee.num_train_samples, ee.pg) == ("ee", "predicted", None, f"{runs}/pg")
    assert (joint.model, joint.pg, joint.ee) == ("joint", f"{runs}/pg", f"{runs}/ee")
    assert report(runs / "eval/val").checkpoints == {"pg": f"{runs}/joint", "ee": f"{runs}/joint"}
    assert len((runs / "eval/test/answers.txt").read_text().splitlines()) == SIZES["test"] * QUESTIONS_PER_IMAGE


def test_all_programs_train_generator_and_engine_apart(recipes: Recipes, clevr: Path, trained):
    out, _ = trained
    recipe = recipes.run("train_clevr.sh", clevr, out, *SMALL, PROGRAMS=700000, PREPROCESS=PREPROCESS)
    assert recipe.returncode == 0, recipe.output
    runs = out / "runs/700000"
    assert config(runs / "ee").programs == "ground-truth"
    assert not (runs / "joint").exists()
    assert report(runs / "eval/val").checkpoints == {"pg": f"{runs}/pg", "ee": f"{runs}/ee"}


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
    before, after = (load_checkpoint(run / BEST)["networks"] for run in (joint, out / "runs/joint"))
    assert_same(before["engine"]["weights"], after["engine"]["weights"], 0)
    assert after["generator"]["weights"]["encoder_embed.weight"].shape[0] == len(expanded)
    for when in ("before", "after"):
        assert report(out / "eval" / when / "val").questions == SIZES["val"] * QUESTIONS_PER_IMAGE // 5


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
    for name, run in (("trained", runs / "joint"), ("fine-tuned", on_b_runs / "joint")):
        a, b = (report(on_b_runs / "eval" / name / condition) for condition in "AB")
        assert a.checkpoints["pg"] == b.checkpoints["pg"] == str(run)
        assert (a.split, a.selection, b.split, b.selection) == ("valA", "", "valB", "without the first 60")


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
    for name, run in (("trained", "ee"), ("fine-tuned", "joint")):
        short, long = (report(runs / "eval" / name / families) for families in ("short", "long"))
        assert long.checkpoints["ee"] == f"{runs / run}"
        assert (short.selection, long.selection) == ("families short", "families long")
        assert short.questions + long.questions == SIZES["val"] * QUESTIONS_PER_IMAGE


# Synthetic data


def test_engines_of_synthetic_data_answer_its_questions_and_those_about_other_images(
    recipes: Recipes, clevr: Path, tmp_path: Path
):
    made = "--train 12 --val 4 --max-objects 4 --width 96 --height 64 --questions-per-image 5"
    recipe = recipes.run("train_synth.sh", tmp_path, "--small", *SMALL, SYNTH=made, REAL=clevr)
    assert recipe.returncode == 0, recipe.output
    assert [config(tmp_path / name).model for name in ("pg", "ee", "pooled")] == ["pg", "ee", "ee"]
    for data, count in (("synth", 4 * 5), ("real-train", SIZES["train"] * 20), ("real-val", SIZES["val"] * 20)):
        true, predicted = (report(tmp_path / "eval" / data / each) for each in ("ee", "ee-predicted"))
        assert (true.questions, true.programs, predicted.programs) == (count, "ground-truth", "predicted")
    assert iep.load(tmp_path / "networks").ask(next(clevr.rglob("*.png")), "How big is it?").answer
    assert "precision" in recipe.output, "of the backbone on the other images"
    assert len(re.findall("^overall", recipe.output, re.MULTILINE)) == 3, "one table for each split"


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
    assert Scenes(str(tmp_path / "synth.safetensors")).network.kwargs["widths"] == [4, 4, 8]
    assert "precision" in recipe.output


# How they are called

RECIPES = sorted(path.name for path in SCRIPTS.glob("*.sh") if "\nexpect " in path.read_text())


@pytest.mark.parametrize(("arguments", "code"), [("abcdef", 2), (("a", "--help"), 0)])
@pytest.mark.parametrize("script", RECIPES)
def test_a_recipe_shows_its_usage_where_asked_or_given_wrong_arguments(recipes: Recipes, script, arguments, code):
    recipe = recipes.run(script, *arguments)
    assert (recipe.returncode, recipe.commands) == (code, [])
    assert re.fullmatch(rf"usage: .*scripts/{script} \S.*\n", recipe.output)
