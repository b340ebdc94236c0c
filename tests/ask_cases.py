"""`iep-ask` run in this process, and what its tests ask: networks trained for a few steps on `data/sample`."""

from collections.abc import Sequence
from pathlib import Path

from click.testing import CliRunner, Result
from features_cases import SMALL
from tiny_data import content, save_content, tiny

from iep.cli.ask import main
from iep.cli.preprocess import main as preprocess
from iep.cli.train import main as train

SAMPLE = Path(__file__).parent.parent / "data" / "sample"
IMAGE = SAMPLE / "images" / "val" / "CLEVR_val_000002.png"
COUNT = "count filter_size[small] scene"
LONGER = ("batch_size=32", "learning_rate=0.02", "validate_every=200", "num_val_samples=1")


def iep_ask(*arguments: object, typed: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in ("--device", "cpu", *arguments)], input=typed)


def answered(*arguments: object, typed: str | bytes | None = None) -> str:
    """Return what `iep-ask` prints, which must succeed."""
    result = iep_ask(*arguments, typed=typed)
    assert result.exit_code == 0, result.output
    return result.stdout


def done(command: object, *arguments: object) -> None:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output


def sample_data(out: Path, *flags: object) -> Path:
    """`data/sample` preprocessed, its features those of a small ResNet unless `flags` say otherwise."""
    flags = flags or (*SMALL, "--dtype", "float16")
    splits = ("--split", "train", "--split", "val")
    done(preprocess, SAMPLE, "--out", out, "--device", "cpu", "--workers", 0, *splits, *flags)
    return out


def trained(data: Path, model: str, out: Path, iterations: int, *settings: object) -> Path:
    """A run of a tiny model."""
    sizes = (*tiny(model), *LONGER, f"iterations={iterations}")
    done(train, "--model", model, "--data", data, "--out", out, *sizes, *settings)
    return out


def answers_of(output: str) -> list[str]:
    """The likeliest answer of each question, as it was printed."""
    paragraphs: Sequence[str] = output.strip().split("\n\n")
    lines = [next(line for line in text.splitlines() if "% " in line + " ") for text in paragraphs]
    return [line.split()[0] for line in lines]


def changed(run: Path, out: Path, **others: object) -> Path:
    """A run's checkpoint with other content; what is None is left out."""
    held = content(run) | others
    save_content(out, {key: value for key, value in held.items() if value is not None})
    return out
