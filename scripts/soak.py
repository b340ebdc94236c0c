"""Kill every job a hundred times and train for 2,000 steps: `make soak`. Prints a table; fails where anything is amiss.

The jobs and the killing are the tests' own (`tests/killing.py`); memory is `soak_memory.py`.
"""

import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(Path(__file__).parent)]

import soak_memory  # noqa: E402
from killing import (  # noqa: E402
    Counts,
    Job,
    checkpointing,
    evaluation,
    kill_and_resume,
    preprocessing,
    synthesis,
    training,
)
from processes import run  # noqa: E402
from tiny_data import tiny, write_data  # noqa: E402

from iep.bench.tables import machine_line  # noqa: E402

KINDS = {"kill -9": (signal.SIGKILL,), "TERM, INT": (signal.SIGTERM, signal.SIGINT)}
COLUMNS = ("kills", "writing", "ends")
LEGEND = """\
kills      processes ended by the signal, each at a moment drawn evenly from the whole job's length
writing    of these, while a file was written that is then renamed into place
ends       jobs that came to their end and were compared with the one that was never killed: weights and optimiser bit
           for bit, rows of metrics.jsonl but for speed and memory, best.pt; bytes of all files of the other jobs
mismatch   differences, files left over or not whole, errors, answers to a signal other than one line: must be 0"""


@click.command()
@click.option(
    "--kills",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="With kill -9, for each job; with other signals a quarter.",
)
@click.option("--steps", type=click.IntRange(min=100), default=2000, show_default=True, help="Of the mini engine.")
@click.option("--only", type=click.Choice(["kills", "memory"]), help="Do only this part.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the moments.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File for the table.")
def main(kills: int, steps: int, only: str | None, seed: int, out: Path | None) -> None:
    """Kill and resume every job; watch the memory of a long run."""
    lines = [f"$ python scripts/soak.py --kills {kills} --steps {steps} --seed {seed}"]
    lines.append(machine_line(torch.device("cpu")))
    sound = True

    def say(text: str) -> None:
        click.echo(text)
        lines.append(text)

    with tempfile.TemporaryDirectory(prefix="iep-soak-") as directory:
        work = Path(directory)
        if only != "memory":
            for counts in _kill_all(work, kills, seed, say):
                sound &= not counts.mismatches
            say(f"\n{LEGEND}")
        if only != "kills":
            click.echo(f"\n{steps} steps of the mini engine ...")
            memory = soak_memory.measure(work, steps, click.echo)
            sound &= memory.is_flat()
            say(f"\n{soak_memory.table(memory)}")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("\n".join(lines) + "\n")
    sys.exit(not sound)


def _kill_all(work: Path, kills: int, seed: int, say) -> Iterator[Counts]:
    say(f"\n{'job':<22} {'signals':<10}" + "".join(f"{name:>11}" for name in (*COLUMNS, "mismatch", "seconds")))
    for number, job in enumerate(_jobs(work)):
        for kind, signals in KINDS.items():
            start = time.monotonic()
            root = work / f"job-{number}-{kind[:4]}"
            some = kills if kind == "kill -9" else max(1, kills // 4)
            counts = kill_and_resume(job, root, some, seed + number, signals)
            values = [*(getattr(counts, name) for name in COLUMNS), len(counts.mismatches)]
            figures = "".join(f"{value:>11}" for value in (*values, round(time.monotonic() - start)))
            say(f"{job.name:<22} {kind:<10}{figures}")
            for problem in counts.mismatches:
                say(f"  {problem}")
            yield counts


def _jobs(work: Path) -> Iterator[Job]:
    """Jobs of a second or so, on data sets of a few images."""
    data = write_data(work / "tiny")
    bent = ("engine.stem_norm=true", "warmup=3", "decay=cosine", "curriculum=[[0, 5], [9, 99]]")
    for model in ("pg", "ee"):
        started = run("train", ["--data", data, "--out", work / model, *tiny(model), f"model={model}"])
        assert started.returncode == 0, started.output
    starts = (f"pg={work / 'pg'}", f"ee={work / 'ee'}")
    long = ("iterations=30", "validate_every=7")
    yield training(
        data, *tiny("pg"), *long, "model=pg", "generator.dropout=0.5", "generator.num_layers=2", name="training pg"
    )
    yield training(data, *tiny("ee"), *long, "model=ee", *bent, name="training ee")
    yield training(data, *tiny("ee"), *long, "iterations=15", "model=ee", "workers=2", name="training ee, 2 workers")
    yield training(
        data,
        *tiny("joint"),
        *long,
        "iterations=8",
        "validate_every=3",
        "model=joint",
        "precision=bfloat16",
        *starts,
        name="training joint",
    )
    yield checkpointing(data, *tiny("lstm"))
    clevr = work / "small"
    sizes = ["--preset", "mini", "--train", 60, "--val", 2, "--test", 1, "--width", 64, "--height", 48]
    made = run("synth", [clevr, *sizes])
    assert made.returncode == 0, made.output
    yield preprocessing(clevr)
    yield synthesis(images=20)
    yield evaluation(data, work / "ee")


if __name__ == "__main__":
    main()
