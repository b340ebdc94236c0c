"""The recipes in `scripts/` run whole on small data, leave their files, and resume where they stopped."""

import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import processes
import pytest
from batching_cases import assert_same
from features_cases import SMALL as SMALL_FEATURES
from recipe_cases import (
    NEW_WORDS,
    QUESTIONS_PER_IMAGE,
    RARE_WORD,
    SCRIPTS,
    Recipes,
    write_clevr,
    write_cogent,
    write_humans,
)
from tiny_data import tiny

import iep
from iep.config import Config, read_config
from iep.evaluation.json_report import Report, read_report
from iep.models.checkpoint import BEST, read_checkpoint
from iep.programs import CLOSURE_GROUPS
from iep.synth.presets import resolve
from iep.synth.synthesize import synthesize
from iep.vocab import Vocab

SMALL = [setting for setting in tiny("joint") if not setting.startswith("learning_rate")]
SMALL += ["iterations=2", "validate_every=1", "max_program_length=8"]
PREPROCESS = " ".join(map(str, (*SMALL_FEATURES, "--dtype", "float16")))
SIZES = {"train": 30, "val": 8, "test": 2}


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recipes]:
    with closing(Recipes(tmp_path_factory.mktemp("recipes"))) as recipes:
        yield recipes


@pytest.fixture(scope="module")
def clevr(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clevr(tmp_path_factory.mktemp("clevr") / "CLEVR", **SIZES)


@pytest.fixture(scope="module")
def trained(recipes: Recipes, clevr: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """The directory of a `train_clevr.sh` on few programs, stopped once and resumed, and the commands that it ran."""
    out = tmp_path_factory.mktemp("trained") / "data"
    arguments, variables = (clevr, out, *SMALL), {"PROGRAMS": 200, "PREPROCESS": PREPROCESS}
    _, commands = recipes.run("train_clevr.sh", *arguments, "engine.module_dim=0", code=1, **variables)
    assert len(commands) == 3, "the first that fails, which trains an engine, is the last"
    return out, recipes.run("train_clevr.sh", *arguments, **variables)[1]


def config(run: Path) -> Config:
    return read_config(run / "config.yaml")


def report(directory: Path) -> Report:
    return read_report(directory / "report.json")


def test_closure_is_evaluated_file_by_file_with_predicted_and_true_programs(recipes, clevr, trained, tmp_path: Path):
    out, _ = trained
    options = resolve("mini", {"min_objects": 3}, train=0, val=8, test=0, questions_per_image=14, families="closure")
    synthesize(tmp_path / "closure", options)
    shutil.rmtree(tmp_path / "closure" / "images")  # the download has no images, and these are those of `clevr`
    run = out / "runs/200/joint"
    recipes.run("evaluate_closure.sh", tmp_path / "closure", out, run, run, tmp_path / "out")
    rows = [line.split() for line in (tmp_path / "out/closure.txt").read_text().splitlines()[1:]]
    assert [row[0] for row in rows] == sorted(f"{group}_val" for group in CLOSURE_GROUPS)
    for group, _, *percentages in rows:
        found = [report(tmp_path / "out/eval" / kind / group) for kind in ("predicted", "true")]
        assert percentages == [f"{each.accuracy.overall:.1%}" for each in found]


def test_few_programs_train_the_generator_whose_programs_train_the_engine_then_both_learn_jointly(trained):
    out, commands = trained
    assert [command[0] for command in commands] == ["iep-preprocess", *["iep-train"] * 3, *["iep-eval"] * 2]
    runs = out / "runs/200"
    pg, ee, joint = (config(runs / name) for name in ("pg", "ee", "joint"))
    assert (pg.model, pg.num_train_samples, pg.iterations) == ("pg", 200, 2)
    assert (ee.model, ee.programs, ee.num_train_samples, ee.pg) == ("ee", "predicted", None, f"{runs}/pg")
    assert (joint.model, joint.pg, joint.ee) == ("joint", f"{runs}/pg", f"{runs}/ee")
    assert report(runs / "eval/val").checkpoints == {"pg": f"{runs}/joint", "ee": f"{runs}/joint"}
    assert len((runs / "eval/test/answers.txt").read_text().splitlines()) == SIZES["test"] * QUESTIONS_PER_IMAGE


def test_all_programs_train_generator_and_engine_apart(recipes: Recipes, clevr: Path, trained):
    runs = trained[0] / "runs/700000"
    recipes.run("train_clevr.sh", clevr, trained[0], *SMALL, PROGRAMS=700000, PREPROCESS=PREPROCESS)
    assert config(runs / "ee").programs == "ground-truth"
    assert report(runs / "eval/val").checkpoints == {"pg": f"{runs}/pg", "ee": f"{runs}/ee"}


def test_fine_tuning_on_humans_teaches_the_generator_new_words_and_keeps_the_engine(recipes, clevr, trained, tmp_path):
    humans, out = write_humans(tmp_path / "CLEVR-Humans", clevr), tmp_path / "data"
    joint = trained[0] / "runs/200/joint"
    settings = (*SMALL, "iterations=12", "validate_every=12")  # without a reward, the generator learns nothing
    output, _ = recipes.run("train_humans.sh", humans, trained[0], joint, joint, out, *settings, UNK_THRESHOLD=2)
    known, expanded = Vocab.load(trained[0] / "vocab.json").question, Vocab.load(out / "vocab.json").question
    assert expanded == (*known, *sorted({*NEW_WORDS, ","} - set(known)))
    assert RARE_WORD not in expanded
    assert f"{joint}: {len(expanded) - len(known)} new question words" in output
    before, after = (read_checkpoint(run / BEST).networks for run in (joint, out / "runs/joint"))
    assert_same(before["engine"].weights, after["engine"].weights, 0)
    assert after["generator"].weights["encoder_embed.weight"].shape[0] == len(expanded)
    for when in ("before", "after"):
        assert report(out / "eval" / when / "val").questions == SIZES["val"] * QUESTIONS_PER_IMAGE // 5


def test_cogent_is_trained_on_a_fine_tuned_on_a_part_of_b_and_evaluated_on_both(recipes: Recipes, tmp_path: Path):
    cogent, out = write_cogent(tmp_path / "CoGenT", **SIZES), tmp_path / "data"
    variables = {"PROGRAMS": 150, "QUESTIONS_OF_B": 60, "PREPROCESS": PREPROCESS}
    recipes.run("train_cogent.sh", cogent, out, *SMALL, **variables)
    runs, on_b_runs = out / "runs/150", out / "runs/150/on_b/60"
    pg, on_b = config(runs / "pg"), config(on_b_runs / "joint")
    assert (pg.train_split, pg.val_split, pg.num_train_samples) == ("trainA", "valA", 150)
    assert (on_b.train_split, on_b.num_train_samples, on_b.val_split, on_b.skip_val_samples) == ("valB", 60, "valB", 60)
    assert on_b.pg == on_b.ee == f"{runs}/joint"
    for name, run in (("trained", runs / "joint"), ("fine-tuned", on_b_runs / "joint")):
        a, b = (report(on_b_runs / "eval" / name / condition) for condition in "AB")
        assert a.checkpoints["pg"] == b.checkpoints["pg"] == str(run)
        assert (a.split, a.selection, b.split, b.selection) == ("valA", "", "valB", "without the first 60")


def test_short_families_train_and_long_ones_come_with_joint_training(recipes: Recipes, clevr: Path, trained):
    recipes.run("train_short_long.sh", clevr, trained[0], *SMALL, PROGRAMS=100, PREPROCESS=PREPROCESS)
    runs = trained[0] / "runs/short_long/100"
    pg, ee, joint = (config(runs / name) for name in ("pg", "ee", "joint"))
    assert (pg.families, pg.num_train_samples, ee.families, joint.families) == ("short", 100, "short", None)
    for name, run in (("trained", "ee"), ("fine-tuned", "joint")):
        short, long = (report(runs / "eval" / name / families) for families in ("short", "long"))
        assert long.checkpoints["ee"] == f"{runs / run}"
        assert (short.selection, long.selection) == ("families short", "families long")
        assert short.questions + long.questions == SIZES["val"] * QUESTIONS_PER_IMAGE


def test_engines_of_synthetic_data_answer_its_questions_and_those_about_other_images(recipes: Recipes, tmp_path: Path):
    made = "--train 12 --val 4 --max-objects 4 --width 96 --height 64 --questions-per-image 5"
    real = write_clevr(tmp_path / "real", train=0, val=4, test=0)
    output, _ = recipes.run("train_synth.sh", tmp_path, "--small", *SMALL, SYNTH=made, REAL=real)
    assert [config(tmp_path / name).model for name in ("pg", "ee", "pooled")] == ["pg", "ee", "ee"]
    for data, count in (("synth", 4 * 5), ("real-val", 4 * QUESTIONS_PER_IMAGE)):
        true, predicted = (report(tmp_path / "eval" / data / each) for each in ("ee", "ee-predicted"))
        assert (true.questions, true.programs, predicted.programs) == (count, "ground-truth", "predicted")
    assert iep.load(tmp_path / "networks").ask(next(real.rglob("*.png")), "How big is it?").answer
    assert "precision" in output, "of the backbone on the other images"
    assert len(re.findall("^overall", output, re.MULTILINE)) == 2, "one table for each split"


def test_generalization_is_measured_in_one_table_and_only_once(recipes: Recipes, tmp_path: Path):
    sizes = [each for each in tiny("joint", "backbone")[-9:] if not each.startswith("generator")]
    settings = ("iterations=2", "validate_every=1", "batch_size=4", "workers=0", "curriculum=[]", *sizes)
    variables = {"MODELS": "lstm symbolic vector", "IMAGES": 40, "VAL": 8}
    variables["SYNTH"] = "--width 96 --height 64 --max-objects 4"
    recipes.run("generalize.sh", tmp_path, *settings, **variables)
    table = (tmp_path / "table.txt").read_text()
    cells = {row[0]: row[1:] for row in (re.split(r"\s{2,}", line.strip()) for line in table.splitlines())}
    assert [*cells] == ["A->A", "lstm", "symbolic", "vector", "programs exact"]
    missing = {name: [number for number, cell in enumerate(row) if cell == "-"] for name, row in cells.items()}
    tuned, true_programs = 2, [4, 8, 9, 10]
    assert missing.pop("lstm") == true_programs
    assert missing.pop("symbolic") == [tuned]
    assert missing.pop("programs exact") == [tuned, *true_programs]
    assert not any(missing.values())
    groups = [report(path).accuracy.overall for path in (tmp_path / "eval/vector/closure").glob("*-true")]
    assert len(groups) == len(CLOSURE_GROUPS)
    assert cells["vector"][4] == f"{100 * sum(groups) / len(groups):.1f}"
    assert config(tmp_path / "runs/1/vector").num_train_samples == 40 * 20 // 100
    assert config(tmp_path / "runs/B/vector").ee == str(tmp_path / "runs/A/vector")
    _, commands = recipes.run("generalize.sh", tmp_path, *settings, **variables)
    assert "iep-eval" not in {command[0] for command in commands}
    assert (tmp_path / "table.txt").read_text() == table


def test_the_demo_compares_all_its_models(recipes: Recipes, tmp_path: Path):
    settings = [setting for setting in SMALL if not setting.startswith("max_program_length")]
    made = "--train 12 --val 3 --max-objects 4 --width 96 --height 64 --questions-per-image 20"
    output, _ = recipes.run("demo.sh", tmp_path, *settings, SYNTH=made)
    table = [re.split(r"\s{2,}", line.strip()) for line in output.splitlines()]
    models = ["lstm", "cnn-lstm", "symbolic", "true programs", "end to end", "joint"]
    assert table[table.index(["questions", "most common answer", *models]) + 1][:2] == ["overall", "60"]
    (command,) = re.findall(r"^  iep-ask ((?:.*\\\n)*.*)$", output, re.MULTILINE)
    asked = processes.run("ask", shlex.split(command.replace("\\\n", "")))
    assert asked.returncode == 0, asked.output
    assert (tmp_path / "ask.png").exists(), "the command that the demo ends with"


def test_a_backbone_is_made_from_nothing_and_exported(recipes: Recipes, tmp_path: Path):
    settings = ("iterations=2", "validate_every=1", "batch_size=2", *tiny("backbone")[-3:])
    made = "--train 4 --val 2 --max-objects 4 --width 96 --height 64"
    output, _ = recipes.run("train_backbone.sh", tmp_path, *settings, SYNTH=made)
    assert read_checkpoint(tmp_path / "synth.safetensors").networks["backbone"].settings["widths"] == [4, 4, 8]
    assert "precision" in output


RECIPES = sorted(path.name for path in SCRIPTS.glob("*.sh") if "\nexpect " in path.read_text())


@pytest.mark.parametrize(("arguments", "code"), [("abcdef", 2), (("a", "--help"), 0)])
@pytest.mark.parametrize("script", RECIPES)
def test_a_recipe_shows_its_usage_where_asked_or_given_wrong_arguments(recipes: Recipes, script, arguments, code):
    output, commands = recipes.run(script, *arguments, code=code)
    assert commands == []
    assert re.fullmatch(rf"usage: .*scripts/{script} \S.*\n", output)
