"""Sets of modules of another package: the example of docs/add_a_module.md, trained and evaluated, and errors."""

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ask_cases import IMAGE, iep_ask
from bench_cases import iep_bench, laboratory
from device_cases import HAS_TRITON
from engine_cases import INDEX, features, programs, small_engine
from evaluate_cases import iep_eval
from tiny_data import assert_one_error, newest, tiny
from train_cases import iep_train

import iep
from iep.errors import InputError
from iep.execution_engine.assembly import Running, set_execution
from iep.vocab import index_tokens

PAGE = (Path(__file__).parent.parent / "docs" / "add_a_module.md").read_text()
*CODE, _ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(autouse=True)
def gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of the page as the file that it says, which can be imported."""
    (tmp_path / "gated.py").write_text("\n".join(CODE))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "gated", raising=False)


def test_the_example_of_the_page_trains_and_is_evaluated_with_its_own_setting(data: Path, tmp_path: Path):
    given = ("--modules", "gated:GatedModules", "engine.module_settings.depth=2")
    result = iep_train("--model", "ee", "--data", data, "--out", tmp_path / "run", *tiny("ee"), *given)
    assert result.exit_code == 0, result.output
    assert "module_settings:\n    depth: 2" in (tmp_path / "run" / "config.yaml").read_text()
    where = ("--ee", tmp_path / "run", "--data", data, "--out", tmp_path / "eval", "--workers", 0)
    result = iep_eval(*where, "--modules", "gated:GatedModules")
    assert result.exit_code == 0, result.output


def test_a_set_that_derives_from_another_has_its_functions_and_a_new_one():
    tokens = index_tokens(["count", "filter_color[red]", "not", "scene"])
    engine = small_engine(modules="gated:WithNot", program_tokens=tokens)
    programs_BL = np.array([[tokens.index(token) for token in ("count", "not", "filter_color[red]", "scene")]])
    features_BCHW = torch.rand(1, 5, 3, 4, dtype=torch.float64)
    stem_1CHW = engine.stem(features_BCHW)
    red = getattr(engine, "filter_color[red]")(stem_1CHW, torch.ones_like(stem_1CHW[:, :1]))
    expected_1A = engine.classifier(engine.count(stem_1CHW, 1 - red))
    torch.testing.assert_close(engine(features_BCHW, engine.plan(programs_BL)), expected_1A)


ODD = """
from gated import MAP, Conv2d, GatedModules, Role, arity
import torch
from torch import nn

class Chosen(nn.Module):
    def __init__(self, dim, token):
        super().__init__()
        layer = nn.Conv2d if token == "exist" else Conv2d
        self.conv = layer(arity(token) * dim, dim, 3, padding=1)

    def forward(self, *maps):
        return self.conv(torch.cat(maps, 1)).tanh()

class ChosenModules(GatedModules):
    def make(self, token):
        return Chosen(self.dim, token)

class OfPairsModules(GatedModules):
    def role(self, token):
        return Role((MAP, MAP), MAP) if token == "exist" else super().role(token)
"""


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    monkeypatch.delitem(sys.modules, "odd", raising=False)


@HAS_TRITON
def test_modules_with_the_convolution_for_kernels_run_by_them_and_others_by_calls_as_a_line_says(odd, capsys):
    for modules, alone in (("gated:GatedModules", None), ("odd:ChosenModules", "exist")):
        engine, features_NCHW = small_engine(torch.float32, modules=modules), features(2, torch.float32)
        set_execution(engine, Running("cpu", execution="triton"))
        line = f"execution triton: by calls, without convolutions for kernels: {alone}\n"
        assert capsys.readouterr().out == ("" if alone is None else line)
        programs_BL = programs("count filter_color[red] scene", "exist relate[left] scene")
        plan = engine.plan(programs_BL)
        own = {call.op for call in plan.plan.calls} & {*INDEX.values()}
        assert own == (set() if alone is None else {INDEX[alone]})
        torch.testing.assert_close(engine(features_NCHW, plan), engine.reference(features_NCHW, programs_BL))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--modules", "absent:Modules"], "No module named 'absent'; is it installed, or on PYTHONPATH?"),
        (["--modules", "gated:Absent"], "has no attribute 'Absent'"),
        (["--modules", "gatd"], "engine.modules is 'gatd', expected one of iep, tbd, pooled, vector"),
        (["--modules", "gated:GatedModules", "engine.module_settings.dept=2"], "unexpected keyword argument 'dept'"),
        (["--modules", "tbd", "engine.module_settings.depth=2"], "the settings of modules tbd: got an unexpected"),
        (["--modules", "odd:OfPairsModules"], "the role of 'exist' has 2 arguments, expected 1, its arity"),
    ],
)
def test_a_set_or_setting_that_does_not_exist_or_fit_is_one_line(odd, data, given, message, tmp_path):
    result = iep_train("--model", "ee", "--data", data, "--out", tmp_path / "run", *tiny("ee"), *given)
    assert_one_error(result, message)


def test_a_checkpoint_whose_modules_are_gone_is_one_line(data, tmp_path, monkeypatch):
    result = iep_train(
        "--model", "ee", "--data", data, "--out", tmp_path / "run", *tiny("ee"), "--modules", "gated:GatedModules"
    )
    assert result.exit_code == 0, result.output
    (tmp_path / "gated.py").unlink()
    monkeypatch.delitem(sys.modules, "gated")
    result = iep_eval("--ee", tmp_path / "run", "--data", data, "--modules", "gated:GatedModules")
    assert_one_error(result, "run: an execution engine cannot be built: modules is 'gated:GatedModules'", "gated")


# What a file names


OUTSIDE = ("--modules", "traced:TracedModules")
TRACED = """
from gated import GatedModules as TracedModules

open(__file__.replace("traced.py", "imported"), "x").close()
"""


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that `traced.py` writes when it is imported."""
    (tmp_path / "traced.py").write_text(TRACED)
    monkeypatch.delitem(sys.modules, "traced", raising=False)
    return tmp_path / "imported"


@pytest.fixture
def foreign(imported: Path, data: Path, runs: dict[str, Path], tmp_path: Path, monkeypatch) -> dict[str, Path]:
    """A run whose modules are those of `traced.py`, which has not been imported yet, its files, and other runs."""
    out = tmp_path / "foreign"
    result = iep_train("--model", "ee", "--data", data, "--out", out, *tiny("ee"), *OUTSIDE)
    assert result.exit_code == 0, result.output
    imported.unlink()
    monkeypatch.delitem(sys.modules, "traced")
    begun = shutil.copytree(out, tmp_path / "begun", ignore=shutil.ignore_patterns("*.pt", "*.safetensors"))
    files = {"pt": out / "best.pt", "safetensors": out / "best.safetensors"}
    return runs | files | {"run": out, "begun": begun, "new": tmp_path / "new", "data": data}


LOADING = [
    (iep_eval, "--ee {run} --data {data} --workers 0"),
    (iep_eval, "--ee {safetensors} --data {data} --workers 0"),
    (iep_train, "--ee {run} --data {data} --out {new} --model ee iterations=1"),
    (iep_train, "--config {run}/config.yaml --data {data} --out {new} iterations=1"),
    (iep_train, "--resume --data {data} --out {run} iterations=9"),
    (iep_train, "--resume --data {data} --out {begun}"),
]
"""Commands that read the name of modules from a file; in `begun`, only `config.yaml` has it."""


@pytest.mark.parametrize(("command", "arguments"), LOADING)
def test_code_that_a_file_names_is_executed_only_if_the_user_names_it_too(command, arguments, foreign, imported):
    given = [argument.format(**foreign) for argument in arguments.split()]
    assert_one_error(command(*given), "'traced:TracedModules'", "give --modules 'traced:TracedModules'")
    assert not imported.exists()
    result = command(*given, *OUTSIDE)
    assert result.exit_code == 0, result.output
    assert imported.exists()


def test_benchmarks_and_iep_ask_execute_no_code_that_only_a_file_names(foreign, imported):
    config = ("--config", foreign["run"] / "config.yaml")
    for result in (iep_bench("engine", *config), laboratory("async", "engine", *config, "--data", foreign["data"])):
        assert_one_error(result, "give engine.modules='traced:TracedModules'")
    asked = ("--ee", foreign["run"], "--pg", foreign["pg"], "--image", IMAGE, "--question", "What?")
    assert_one_error(iep_ask(*asked), "give --modules 'traced:TracedModules'")
    assert_one_error(iep_ask(*asked, "--modules", "gated:GatedModules"), "not 'gated:GatedModules'")
    assert not imported.exists()


def test_iep_load_executes_code_that_a_file_names_only_if_it_is_given(foreign, imported):
    with pytest.raises(InputError, match=r"in Python modules='traced:TracedModules'"):
        iep.load(foreign["run"], pg=foreign["pg"])
    assert not imported.exists()
    assert iep.load(foreign["run"], pg=foreign["pg"], modules="traced:TracedModules")
    assert imported.exists()


def test_a_checkpoint_to_resume_whose_networks_have_other_modules_than_its_settings_executes_none(
    foreign, imported, data
):
    run = foreign["run"]
    content = torch.load(newest(run), weights_only=True)
    content["config"]["engine"]["modules"] = "iep"
    torch.save(content, newest(run))
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace(OUTSIDE[1], "iep"))
    result = iep_train("--data", data, "--out", run, "--resume", "iterations=9")
    assert_one_error(result, "its modules are 'traced:TracedModules'")
    assert not imported.exists()
