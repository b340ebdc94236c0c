"""Small data sets made by iep-synth in the layouts of CLEVR, CLEVR-CoGenT and CLEVR-Humans, and recipes run on them."""

import json
import os
import subprocess
import sys
import threading
from multiprocessing.connection import Client, Listener
from pathlib import Path

from processes import run

from iep.synth.presets import resolve
from iep.synth.synthesize import synthesize

SCRIPTS = Path(__file__).parents[1] / "scripts"
QUESTIONS_PER_IMAGE = 20
NEW_WORDS = ("Excuse", "me", "pretty", "please")
"""Words of the questions of `write_humans` that CLEVR's templates do not have."""
RARE_WORD = "thingamajig"
"""A word of one question only."""


def write_clevr(out: Path, cogent: str | None = None, seed: int = 0, **images: int) -> Path:
    """A directory in CLEVR's layout with so many images a split, two or three objects on each."""
    options = resolve("mini", {"min_objects": None, "max_objects": None, "cogent": cogent}, seed=seed, **images)
    synthesize(out, options)
    return out


def write_cogent(out: Path, train: int, val: int, test: int) -> Path:
    """A directory in CLEVR-CoGenT's layout: trainA, valA and testA of condition A, valB and testB of condition B."""
    (out / "questions").mkdir(parents=True)
    for seed, (condition, count) in enumerate({"A": train, "B": 0}.items()):
        made = write_clevr(out.with_name(condition), condition, seed=seed, train=count, val=val, test=test)
        for images in sorted((made / "images").iterdir()):
            split = f"{images.name}{condition}"
            (out / "images" / split).mkdir(parents=True)
            for image in images.iterdir():
                image.rename(out / "images" / split / image.name.replace(images.name, split))
            questions = made / "questions" / f"CLEVR_{images.name}_questions.json"
            questions.rename(out / "questions" / f"CLEVR_{split}_questions.json")
    return out


def write_humans(out: Path, clevr: Path) -> Path:
    """A directory in CLEVR-Humans' layout: questions about the images of `clevr` in other words, without programs."""
    out.mkdir(parents=True)
    kept = ("question", "image_index", "image_filename", "split", "answer")
    for split in ("train", "val", "test"):
        questions = json.loads((clevr / f"questions/CLEVR_{split}_questions.json").read_text())["questions"]
        asked = [{key: question[key] for key in kept if key in question} for question in questions[::5]]
        for question in asked:
            question["question"] = f"Excuse me, {question['question'].replace('?', '')} pretty please?"
        asked[0]["question"] = f"What {RARE_WORD} is that?"
        (out / f"CLEVR-Humans-{split}.json").write_text(json.dumps({"info": {}, "questions": asked}))
    return out


# Running a script


COMMANDS = {"iep-train": "train", "iep-eval": "evaluate", "iep-preprocess": "preprocess", "iep-synth": "synth"}
CLIENT = """#!{python} -IS
import os, sys
from multiprocessing.connection import Client

with Client({address!r}, "AF_UNIX") as connection:
    connection.send(({name!r}, sys.argv[1:], os.getcwd()))
    output, code = connection.recv()
sys.stdout.write(output)
sys.exit(code)
"""


class Recipes:
    """The scripts, run as processes of their own; their commands are begun by `processes.run`."""

    def __init__(self, root: Path):
        """`root` is a directory for what stands in for the commands."""
        self._bin = root / "bin"
        self._bin.mkdir()
        self._listener = Listener(str(root / "socket"), "AF_UNIX")
        given = {"python": sys.executable, "address": self._listener.address}
        files = {name: CLIENT.format(name=name, **given) for name in COMMANDS}
        for name, text in (files | {"python": f'#!/bin/sh\nexec {sys.executable} "$@"\n'}).items():
            (self._bin / name).write_text(text)
            (self._bin / name).chmod(0o755)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more commands."""
        with Client(self._listener.address, "AF_UNIX") as connection:
            connection.send(None)
        self._thread.join()
        self._listener.close()

    def run(self, script: str, *arguments: object, code: int = 0, **variables: object) -> tuple[str, list[list[str]]]:
        """Run `scripts/SCRIPT` with arguments and environment `variables`, which must end with `code`.

        Returns what was printed, and the commands that the script ran.
        """
        self._commands: list[list[str]] = []
        path = {"PATH": f"{self._bin}:{os.environ['PATH']}"}
        done = subprocess.run(
            [SCRIPTS / script, *map(str, arguments)],
            env=os.environ | path | {name: str(value) for name, value in variables.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert done.returncode == code, done.stdout
        return done.stdout, self._commands

    def _serve(self) -> None:
        while True:
            with self._listener.accept() as connection:
                if (request := connection.recv()) is None:
                    return
                name, arguments, cwd = request
                self._commands.append([name, *arguments])
                ended = run(COMMANDS[name], arguments, cwd=Path(cwd))
                connection.send((ended.output, ended.returncode % 256))
