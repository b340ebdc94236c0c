"""Sets of modules of another package: the example of docs/add_a_module.md, trained and evaluated, and errors."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from engine_cases import PROGRAMS_BL, features, small_engine
from tiny_data import assert_one_error, tiny
from train_cases import iep_train

from iep.cli.evaluate import main as evaluate
from iep.execution_engine.roles import MAP, Role, tree_run
from iep.programs import arity
from iep.vocab import index_tokens

PAGE = (Path(__file__).parent.parent / "docs" / "add_a_module.md").read_text()
*CODE, CHECK = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


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
    arguments = ("--ee", tmp_path / "run", "--data", data, "--out", tmp_path / "eval", "--workers", 0)
    result = CliRunner().invoke(evaluate, [str(each) for each in arguments])
    assert result.exit_code == 0, result.output


def test_the_check_of_the_page_holds():
    exec(CHECK, {"torch": torch})


def test_a_set_that_derives_from_another_has_its_functions_and_a_new_one():
    tokens = index_tokens(["count", "filter_color[red]", "not", "scene"])
    engine = small_engine(modules="gated:WithNot", program_tokens=tokens)
    programs_BL = np.array([[tokens.index(token) for token in ("count", "not", "filter_color[red]", "scene")]])
    features_BCHW = torch.rand(1, 5, 3, 4, dtype=torch.float64)
    stem_1CHW = engine.stem(features_BCHW)
    red = getattr(engine, "filter_color[red]")(stem_1CHW, torch.ones_like(stem_1CHW[:, :1]))
    expected_1A = engine.classifier(engine.count(stem_1CHW, 1 - red))
    torch.testing.assert_close(engine(features_BCHW, engine.plan(programs_BL)), expected_1A)


SHIFTED = """
from gated import GatedModules
from torch import nn

class Shifted(nn.Module):
    def __init__(self, dim, step):
        super().__init__()
        self.conv, self.step = nn.Conv2d(dim, dim, 1), step

    def forward(self, *arguments):
        return self.conv(sum(arguments)).roll(self.step, 3)

class ShiftedModules(GatedModules):
    def make(self, token):
        return Shifted(self.dim, len(token))
"""


def test_functions_that_differ_in_more_than_weights_are_not_of_one_family(tmp_path: Path):
    (tmp_path / "shifted.py").write_text(SHIFTED)
    engine, features_NCHW = small_engine(modules="shifted:ShiftedModules"), features(len(PROGRAMS_BL))
    found = engine(features_NCHW, engine.plan(PROGRAMS_BL, execution="grouped"))
    torch.testing.assert_close(found, engine.reference(features_NCHW, PROGRAMS_BL))


def test_values_of_a_kind_of_its_own_that_are_not_used_are_named_by_number():
    modules = SimpleNamespace(role=lambda token: Role((2,) * arity(token), MAP))
    tree = tree_run(("count", "exist", "scene"), modules)
    assert tree.nodes[1].unused.endswith("an encoding, not a value of kind 2")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--modules", "absent:Modules"], "No module named 'absent'; is it installed, or on PYTHONPATH?"),
        (["--modules", "gated:Absent"], "has no attribute 'Absent'"),
        (["--modules", "gated:Gated"], "which has no method 'role' and is no set of modules"),
        (["--modules", "gatd"], "engine.modules is 'gatd', expected one of iep, tbd, vector"),
        (["--modules", "gated:GatedModules", "engine.module_settings.dept=2"], "unexpected keyword argument 'dept'"),
        (["--modules", "gated:GatedModules", "engine.module_settings.depth=0"], "depth is 0, expected 1 or greater"),
        (["--modules", "tbd", "engine.module_settings.depth=2"], "the settings of modules tbd: got an unexpected"),
        (["engine.module_settings=2"], "engine.module_settings is 2, expected a mapping of settings"),
    ],
)
def test_a_set_or_setting_that_does_not_exist_is_one_line(data, given, message, tmp_path):
    result = iep_train("--model", "ee", "--data", data, "--out", tmp_path / "run", *tiny("ee"), *given)
    assert_one_error(result, message)


def test_a_checkpoint_whose_modules_are_gone_is_one_line(data, tmp_path, monkeypatch):
    result = iep_train(
        "--model", "ee", "--data", data, "--out", tmp_path / "run", *tiny("ee"), "--modules", "gated:GatedModules"
    )
    assert result.exit_code == 0, result.output
    (tmp_path / "gated.py").unlink()
    monkeypatch.delitem(sys.modules, "gated")
    result = CliRunner().invoke(evaluate, ["--ee", str(tmp_path / "run"), "--data", str(data)])
    assert_one_error(result, "run: an execution engine cannot be built: modules is 'gated:GatedModules'", "gated")
