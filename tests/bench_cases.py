"""An engine and minibatches so small that a benchmark of them takes moments, for the tests of `iep-bench`."""

from click.testing import CliRunner, Result

from iep.cli.bench import main

TINY_ENGINE = (
    "engine.module_dim=2",
    "engine.stem_widths=[]",
    "engine.classifier_projection=2",
    "engine.classifier_hidden=[3]",
)
TINY_DATA = ("--feature-shape", "3", "3", "3")


def iep_bench(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def measure(*arguments: object) -> Result:
    """`iep-bench engine` on the tiny engine and made data, one round unless `arguments` say otherwise."""
    return iep_bench("engine", "--device", "cpu", "--repeat", 1, *TINY_DATA, *TINY_ENGINE, *arguments)
