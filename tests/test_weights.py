"""Networks in safetensors files, and `iep.load`."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ask_cases import IMAGE, SAMPLE, answers_of, done, iep_ask, sample_data, trained
from evaluate_cases import iep_eval
from features_cases import SMALL_RESNET
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_data import assert_one_error
from train_cases import iep_train

import iep
from iep.cli.preprocess import main as preprocess
from iep.cli.synth import main as synth
from iep.errors import InputError
from iep.evaluation.predict import Predictor
from iep.models.checkpoint import DEFAULT_FILE, Checkpoint, read_checkpoint, write_weights
from iep.models.network import Packed
from iep.programs import program_tree
from iep.vocab import Vocab

QUESTION = "How many small things are there?"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("weights")
    data = sample_data(root / "data")
    made = {model: trained(data, model, root / model, 2) for model in ("pg", "ee", "lstm")}
    start = ("--pg", made["pg"], "--ee", made["ee"])
    return made | {"joint": trained(data, "joint", root / "joint", 2, *start)}


@pytest.mark.parametrize("model", ["pg", "ee", "joint", "lstm"])
def test_the_safetensors_file_of_a_run_has_the_networks_of_its_best_checkpoint(runs, model):
    held, best = (read_checkpoint(runs[model] / f"best.{kind}") for kind in ("safetensors", "pt"))
    assert (held.vocab, held.recipe, held.run) == (best.vocab, best.recipe, None)
    config = json.loads((runs[model] / "config.json").read_text())
    assert (config["model"], config["step"]) == (model, best.state.step)
    tensors = load_file(runs[model] / "best.safetensors")
    for name, packed in best.networks.items():
        assert held.networks[name].settings == json.loads(json.dumps(packed.settings))
        for key, weight in packed.weights.items():
            assert torch.equal(tensors.pop(f"{name}.{key}"), weight)
    assert not tensors
    with safe_open(runs[model] / "best.safetensors", "pt") as file:
        assert json.loads(file.metadata()["iep"]) == config


def test_a_directory_with_nothing_but_the_safetensors_file_is_evaluated_and_asked_as_the_run(runs, tmp_path):
    shutil.copy(runs["joint"] / "best.safetensors", tmp_path)
    outputs = [
        iep_ask("--pg", where, "--ee", where, "--image", IMAGE, "--question", QUESTION).stdout
        for where in (runs["joint"], tmp_path, tmp_path / "best.safetensors")
    ]
    assert outputs[0] == outputs[1] == outputs[2]
    answer = iep.load(tmp_path).ask(IMAGE, QUESTION)
    assert answer.answer == answers_of(outputs[0])[0]
    assert str(answer) == outputs[0].rstrip("\n")


def test_networks_of_two_runs_are_saved_together_and_a_baseline_alone(runs, tmp_path):
    model = iep.load(runs["ee"], pg=runs["pg"])
    model.save(tmp_path / "both")
    assert str(iep.load(tmp_path / "both").ask(IMAGE, QUESTION)) == str(model.ask(IMAGE, QUESTION))
    baseline = iep.load(runs["lstm"])
    baseline.save(tmp_path / "lstm")
    assert iep.load(tmp_path / "lstm").ask(None, QUESTION) == baseline.ask(None, QUESTION)


def test_saved_networks_and_runs_do_not_replace_each_other(runs, tmp_path):
    model = iep.load(runs["joint"])
    with pytest.raises(InputError, match="already holds a run"):
        model.save(runs["ee"])
    model.save(tmp_path / "saved")
    before = (tmp_path / "saved" / "best.safetensors").read_bytes()
    given = ("--model", "lstm", "--data", runs["ee"].parent / "data", "--out", tmp_path / "saved", "iterations=1")
    assert_one_error(iep_train(*given), "already holds networks (best.safetensors)")
    assert (tmp_path / "saved" / "best.safetensors").read_bytes() == before


def test_images_of_every_type_have_the_answer_of_the_file(runs):
    model = iep.load(runs["joint"])
    expected, image = model.ask(IMAGE, QUESTION), Image.open(IMAGE).convert("RGB")
    pixels_HWC = np.array(image)
    pixels_CHW = torch.from_numpy(pixels_HWC).permute(2, 0, 1)
    for given in (str(IMAGE), image, pixels_HWC, pixels_CHW, pixels_CHW / 255, model.see(IMAGE)):
        assert model.ask(given, QUESTION) == expected


def test_questions_and_programs_of_a_list_are_answered_together_as_one_by_one(runs, monkeypatch):
    model, sizes = iep.load(runs["joint"]), []
    logits = Predictor.logits
    monkeypatch.setattr(Predictor, "logits", lambda self, *of: sizes.append(len(of[1])) or logits(self, *of))
    questions = [QUESTION, "Are there any blue cubes?", "What color is the small thing?"]
    answers = model.ask(IMAGE, questions)
    assert [each.question for each in answers] == questions
    programs = model.ask(IMAGE, questions, program=[each.program for each in answers])
    assert sizes == [3, 3]
    one_by_one = [model.ask(IMAGE, each.question, program=each.program) for each in answers]
    for each, again, alone in zip(answers, programs, one_by_one, strict=True):
        assert each.answer == again.answer == alone.answer
        assert each.probability == pytest.approx(again.probability) == pytest.approx(alone.probability)
    assert model.ask(IMAGE, program="scene").question is None
    assert model.ask(IMAGE, []) == model.ask(IMAGE, program=[]) == []


def test_an_answer_says_what_it_is_in_one_line_and_is_drawn_to_a_figure_or_a_file(runs, tmp_path):
    model = iep.load(runs["joint"])
    answer = model.ask(IMAGE, QUESTION)
    assert repr(answer) == f"<Answer {answer.answer!r} ({100 * answer.probability:.1f}%) to {QUESTION!r}>"
    found = f"'{runs['joint']}', networks=['generator', 'engine'], backbone={SMALL_RESNET}, device='cpu'"
    assert repr(iep.load(runs["joint"], device="cpu")) == f"Model({found})"
    assert [*answer.probabilities.values()] == sorted(answer.probabilities.values(), reverse=True)
    assert sum(answer.probabilities.values()) == pytest.approx(1)
    answer.draw(tmp_path / "one.png")
    answer.draw().savefig(tmp_path / "other.png")
    for name in ("one", "other"):
        assert min(Image.open(tmp_path / f"{name}.png").size) > 200
    asked = ("--image", IMAGE, "--ee", runs["joint"], "--question", QUESTION)
    iep_ask(*asked, "--draw", tmp_path / "command.png")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "command.png").read_bytes()


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda model: model.ask(IMAGE), "there is neither a question nor a program; give one of them"),
        (lambda model: model.ask(IMAGE, [QUESTION], program=["scene"] * 2), "1 questions for 2 programs: .* or none"),
        (lambda model: model.ask(5, QUESTION), "the image is of type int, expected a path, an image of Pillow, an .*"),
        (
            lambda model: model.ask(np.zeros((4, 4, 3)), QUESTION),
            r"the image is ndarray \(4, 4, 3\) of float64, expected .*",
        ),
        (lambda model: model.ask(torch.full((3, 4, 4), 9.0), QUESTION), r".* Tensor \(3, 4, 4\) of torch.float32, .*"),
        (lambda model: model.ask(Image.new("I;16", (4, 4)), QUESTION), "is an image of mode I;16, expected 8 bits .*"),
        (lambda model: model.ask(IMAGE, QUESTION).draw("a.txt"), "a.txt: Format 'txt' is not supported .*"),
        (
            lambda model: model.ask(IMAGE, QUESTION).draw(saliency="x"),
            "saliency is 'x', expected one of norm, gradient",
        ),
    ],
)
def test_what_cannot_be_asked_or_drawn_is_an_input_error_that_says_what_is_expected(runs, use, message: str):
    with pytest.raises(InputError, match=f"^{message}$"):
        use(iep.load(runs["joint"]))


def test_weights_that_two_modules_share_are_saved_for_each(tmp_path):
    weight = torch.randn(3, 2).T
    networks = {"engine": Packed({}, {"count.weight": weight, "exist.weight": weight})}
    write_weights(tmp_path, Checkpoint(tmp_path, networks, Vocab.clevr(), {}))
    found = read_checkpoint(tmp_path).networks["engine"].weights
    assert found.keys() == networks["engine"].weights.keys()
    assert all(torch.equal(each, weight) for each in found.values())


def test_the_networks_of_the_package_are_named_default_unless_a_run_is(runs, tmp_path, monkeypatch):
    """Data that fit them are evaluated on, and training starts from them."""
    monkeypatch.chdir(tmp_path)
    done(synth, "clevr", "--preset", "mini", "--train", 2, "--val", 1, "--test", 0, "--questions-per-image", 2)
    made = ("clevr", "--out", "data", "--backbone", "synth", "--dtype", "float16", "--workers", 0)
    done(preprocess, *made, "--vocab", "default")
    assert Vocab.load(tmp_path / "data/vocab.json") == iep.load().vocab
    networks = ("--pg", "default", "--ee", "default", "--data", "data")
    result = iep_eval(*networks, "--workers", 0)
    assert result.exit_code == 0, result.output
    result = iep_train("--model", "joint", *networks, "--out", "run", "iterations=1", "batch_size=2", "workers=0")
    assert result.exit_code == 0, result.output
    shutil.copytree(runs["ee"], "default")
    assert_one_error(iep_eval(*networks), "default: holds an execution engine, expected a checkpoint with a program")


def test_networks_without_a_generator_or_an_engine_are_errors(runs):
    model = iep.load(runs["ee"])
    assert model.ask(IMAGE, program="exist scene").answer
    with pytest.raises(InputError, match="holds no program generator; give that of another run as pg"):
        model.ask(IMAGE, QUESTION)
    with pytest.raises(InputError, match="a baseline runs no program"):
        iep.load(runs["lstm"]).ask(None, program="exist scene")
    with pytest.raises(InputError, match="holds a program generator, expected a checkpoint with an execution engine"):
        iep.load(runs["pg"])
    with pytest.raises(InputError, match="a baseline runs no program; pg does not apply"):
        iep.load(runs["lstm"], pg=runs["pg"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(format="other"), "holds the weights of something else"),
        (lambda content: content["networks"]["engine"].update(module_dim=5), "the weights do not fit the settings"),
    ],
)
def test_a_safetensors_file_with_other_metadata_is_refused(runs, change, message, tmp_path):
    with safe_open(runs["ee"] / "best.safetensors", "pt") as file:
        content = json.loads(file.metadata()["iep"])
    change(content)
    path = tmp_path / "changed.safetensors"
    save_file(load_file(runs["ee"] / "best.safetensors"), path, {"iep": json.dumps(content)})
    assert_one_error(iep_ask("--ee", path, "--image", IMAGE, "--program", "count scene"), str(path), message)


def test_the_backbone_finds_the_objects_of_an_image(runs):
    found = iep.load().objects(IMAGE)
    scene = json.loads((SAMPLE / "scenes" / "CLEVR_val_scenes.json").read_text())["scenes"][2]
    assert len(found) == len(scene["objects"])
    for each in found:
        distance = [math.dist(each["pixel_coords"][:2], thing["pixel_coords"][:2]) for thing in scene["objects"]]
        thing = scene["objects"][distance.index(min(distance))]
        assert min(distance) < 4
        assert math.dist(each["3d_coords"], thing["3d_coords"]) < 0.5
        for attribute in ("size", "color", "material", "shape"):
            assert each[attribute] == thing[attribute], each
            assert 0.5 < each["confidence"][attribute] <= 1
    with pytest.raises(InputError, match="only the backbone synth finds objects"):
        iep.load(runs["ee"], pg=runs["pg"]).objects(IMAGE)


def test_images_without_objects_are_answered_with_a_warning_and_those_of_ten_without(tmp_path):
    Image.new("RGB", (480, 320), "gray").save(tmp_path / "flat.png")
    ten = SAMPLE / "images" / "val" / "CLEVR_val_000003.png"
    warning = "0 objects found, and CLEVR's images have 3 to 10; the answer is unreliable"
    model = iep.load()
    for path, expected in ((tmp_path / "flat.png", warning), (ten, "")):
        result = iep_ask("--ee", "default", "--image", path, *["--question", QUESTION] * 2, "--json")
        assert result.stderr == ""
        assert [json.loads(line).get("warning", "") for line in result.stdout.splitlines()] == [expected] * 2
        answer = model.ask(path, QUESTION)
        assert answer.warning == expected
        assert ("objects found" in str(answer)) == bool(expected)
    assert (len(model.objects(tmp_path / "flat.png")), len(model.objects(ten))) == (0, 10)
    words = "'smal' is not in the vocabulary and is read as <UNK>; did you mean 'small'?"
    assert model.ask(ten, "How many smal things are there?").warning == words
    assert model.ask(tmp_path / "flat.png", "How many smal things are there?").warning == f"{words}\n{warning}"


def test_an_answer_that_the_found_objects_contradict_has_a_warning_in_python_and_in_its_picture(runs, tmp_path):
    model, question = iep.load(), "Is there a cube left of the red thing?"
    answer, sure = model.ask(IMAGE, [question, "Is there a cube?"])
    assert (answer.warning, sure.warning) == ("no red thing was found", "")
    assert str(answer).splitlines()[2] == "  no red thing was found"
    answer.draw(tmp_path / "a.svg")
    assert "no red thing was found" in (tmp_path / "a.svg").read_text()
    other = replace(sure, probabilities={"no": 1.0})
    assert other.warning == "the objects found in the image give the answer 'yes'"
    for tokens in ("exist", "count <END> filter_color[red]", "unique unique", "filter_color[red] query_size"):
        ill_formed = replace(answer, tree=program_tree(tokens.split()))
        assert ill_formed.warning == ""
    unknown = iep.load(runs["ee"], pg=runs["pg"]).ask(IMAGE, program=answer.program)
    assert (unknown.program, unknown.warning) == (answer.program, "")


def test_networks_come_with_the_package_and_answer_unless_others_are_given():
    asked = ("--image", IMAGE, "--question", "Is there a sphere?")
    result = iep_ask(*asked)
    assert result.exit_code == 0, result.output
    assert "The networks that come with the package answer" in result.stderr
    assert result.stdout == str(iep.load().ask(IMAGE, "Is there a sphere?")) + "\n\n"
    assert str(iep.load("default").ask(IMAGE, "Is there a sphere?")) + "\n\n" == result.stdout
    assert DEFAULT_FILE.stat().st_size < 3 * 2**20
    program = iep_ask("--image", IMAGE, "--program", "exist filter_shape[sphere] scene").stdout
    assert "exist" in program
