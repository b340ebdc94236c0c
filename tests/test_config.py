"""Settings: what overrides what, what is refused and how, and that nothing is lost on the way to YAML and back."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tiny_data import refused

from iep.config import (
    LEARNING_RATES,
    MODELS,
    PLACES,
    Config,
    EngineConfig,
    check_used,
    flat,
    given_settings,
    read_config,
    settings_of,
    to_dict,
    to_yaml,
)
from iep.models.network import NETWORKS


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_options_override_assignments_which_override_the_file_which_overrides_the_base(tmp_path: Path):
    file = write(tmp_path / "run.yaml", "batch_size: 2\nworkers: 2\nseed: 2\n")
    base = replace(Config(), prefetch=7, seed=7)
    config = read_config(file, ["workers=3", "seed=3", "keep=4", "keep=5"], {"seed": 4, "device": None}, base=base)
    assert config == replace(base, batch_size=2, workers=3, seed=4, keep=5)


def test_nested_settings_change_what_they_name_and_nothing_beside_it(tmp_path: Path):
    file = write(tmp_path / "run.yaml", "engine:\n  module_dim: 64\n  stem_widths: [16, 32]\n")
    engine = read_config(file, ["engine.module_dim=32", "engine.scene=stem"]).engine
    assert engine == EngineConfig(module_dim=32, scene="stem", stem_widths=(16, 32))


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("learning_rate=1e-4", 1e-4),
        ("learning_rate=null", None),
        ("curriculum=[[0, 4], [100, 30]]", ((0, 4), (100, 30))),
        ("data=a=b", "a=b"),
        ("freeze=rnn, cnn", ("rnn", "cnn")),
        ("freeze=[rnn, cnn]", ("rnn", "cnn")),
    ],
)
def test_assignments_are_read_as_the_type_of_their_key(assignment: str, value: object):
    read = getattr(read_config(None, [assignment]), assignment.partition("=")[0])
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("assignment", "problem"),
    [
        ("batchsize=3", "unknown key 'batchsize'; did you mean 'batch_size'?"),
        ("modules=tbd", "unknown key 'modules'; did you mean 'engine.modules'?"),
        ("batch_size=many", "batch_size is 'many', expected a whole number"),
        ("learning_rate=-1", "learning_rate is -1.0, expected at least 0"),
        ("learning_rate=.inf", "learning_rate is inf, expected a finite number"),
        ("weight_decay=nan", "weight_decay is nan, expected a finite number"),
        ("engine.stem_widths=16", "engine.stem_widths is 16, expected a list, each item a whole number"),
        ("backbone.image_size=[64]", "backbone.image_size is [64], expected (a whole number, a whole number)"),
        ("engine=3", "engine is 3, expected a mapping of settings"),
        ("seed=2020-13-45", "not YAML"),
        ("seed", "expected key=value"),
    ],
)
def test_a_bad_assignment_is_named_with_what_was_expected(assignment: str, problem: str):
    with refused("", assignment, problem):
        read_config(None, [assignment])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("engine: {module_dim: 0}", "engine.module_dim is 0, expected at least 1"),
        ("- a\n- b", "expected a YAML mapping of settings, found list"),
        ("a: [1\nb: 2", "not YAML"),
    ],
)
def test_a_bad_file_is_named_with_the_key_and_what_was_expected(tmp_path: Path, text: str, problem: str):
    file = write(tmp_path / "run.yaml", text)
    with refused(f"{file}: ", problem):
        read_config(file)


CHANGED = Config(
    model="joint",
    data="data/a b",
    pg="1",
    freeze=("engine",),
    learning_rate=1e-4,
    num_train_samples=3,
    curriculum=((0, 4), (50, 30)),
    engine=EngineConfig(stem_widths=(), stem_norm=True, classifier_hidden=(3, 4)),
)


@pytest.mark.parametrize("config", [Config(), CHANGED])
def test_a_config_survives_its_yaml(tmp_path: Path, config: Config):
    assert read_config(write(tmp_path / "config.yaml", to_yaml(config))) == config
    assert yaml.safe_load(to_yaml(config)) == settings_of(config)


def test_every_model_has_networks_a_learning_rate_and_a_recipe():
    assert set(MODELS) == set(LEARNING_RATES) == set(NETWORKS) == {read_config(recipe).model for recipe in RECIPES}


@pytest.mark.parametrize(("model", "rate"), [("pg", 5e-4), ("ee", 1e-4), ("joint", 5e-5), ("cnn-lstm-sa", 5e-4)])
def test_the_learning_rate_is_the_published_one_unless_given(model: str, rate: float):
    """Johnson et al. 2017, Inferring and Executing Programs, supplementary material (baselines: the original's)."""
    assert read_config(None, [f"model={model}"]).peak_learning_rate == rate
    assert read_config(None, [f"model={model}", "learning_rate=3e-3"]).peak_learning_rate == 3e-3


def test_a_config_of_the_package_is_found_by_its_name_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mini" / "pg").mkdir(parents=True)  # a run, say
    expected = next(read_config(recipe) for recipe in RECIPES if recipe.match("mini/pg.yaml"))
    assert read_config(Path("mini/pg")) == read_config(Path("mini/pg.yaml")) == expected
    with refused("", "nor the name of a config of this package; did you mean 'clevr/joint'"):
        read_config(Path("clevr/joimt"))


RECIPES = sorted((Path(__file__).parents[1] / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_recipe_in_configs_is_read_and_trains_the_model_that_it_is_named_for(recipe: Path):
    config = read_config(recipe)
    check_used(config, {name for _, name, _ in given_settings(recipe)})
    assert config != Config(), "changes nothing"
    name = recipe.stem.removesuffix("_small")
    assert config.model in name or (config.model, config.engine.modules) == ("ee", name)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_uses_its_own_settings_and_is_refused_all_others(model: str):
    used, every = flat(settings_of(Config(model=model))), flat(to_dict(Config()))
    check_used(Config(model=model), used)
    unused = every.keys() - used.keys() - set(PLACES)
    assert unused
    with refused("", f"which training {model} does not use", *(f"{name} is " for name in unused)):
        check_used(Config(model=model), unused)
