"""Options -> a whole synthetic data set in the layout of CLEVR v1.0: images, questions and scenes of every split.

Images are made in fixed blocks. A block is a pure function of the options and its position, so the bytes of the files
do not depend on the number of workers. Within a block, the answers of every family are balanced. An interrupted run is
resumed where it stopped, and keeps the images that are complete. The world is drawn by `scenes.py` and `renderer.py`,
and annotated by `annotations.py`; questions come from `question_generator.py`.
"""

import json
import multiprocessing
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

from iep.errors import InputError
from iep.runtime.files import atomic_path, is_whole_png, os_errors_name, write_json
from iep.runtime.locks import LOCK
from iep.runtime.reading import read_json, reading
from iep.runtime.signals import become_worker, starting_workers
from iep.synth.annotations import annotate
from iep.synth.executor import facts_of
from iep.synth.presets import SPLITS, Options
from iep.synth.question_generator import Question, ask
from iep.synth.renderer import render, visible_share
from iep.synth.scenes import Scene, image_filename, sample_scene, scene_json
from iep.synth.templates import FAMILIES, FAMILIES_OF
from iep.vocab import Vocab

BLOCK = 50
SCENE_TRIES = 5
RECORD = "synth.json"
GENERATOR = 3  # increased whenever the same options give other bytes
INFO = {"license": "CC0 1.0", "version": "1.0", "date": "2026-11-20"}
Progress = Callable[[str, int], None]


def synthesize(
    out: Path, options: Options, workers: int = 1, progress: Progress = lambda split, images: None
) -> list[str]:
    """Write the data set to the directory `out`; return the splits that an earlier run had finished.

    Args:
        progress: is called with a split and the number of images just made.

    Raises:
        InputError: `out` contains something else, the scenes are too small for that many questions, or a file of
            questions would have none.
        OSError: a file cannot be written (names it).
    """
    splits = [split for split in SPLITS if getattr(options, split)]
    for split in splits:
        make_image(options, split, 0, Counter())  # finds options that do not go together before anything is written
    _claim(out, options)
    finished = [split for split in splits if _is_finished(out, options, split)]
    with _mapping(workers) as run:
        for split in splits:
            count = getattr(options, split)
            if split in finished:
                progress(split, count)
                continue
            blocks = [range(start, min(start + BLOCK, count)) for start in range(0, count, BLOCK)]
            with starting_workers():
                made = run(partial(_make_block, out, options, split), blocks)
            _write_split(out, options, split, zip(blocks, made, strict=True), progress)
    return finished


def make_image(options: Options, split: str, index: int, balance: Counter) -> tuple[Scene, dict, list[Question]]:
    """Return the scene of one image, its JSON and its questions; `balance`, the block's count of answers, is updated.

    Raises:
        InputError: no scene of these sizes allows that many different questions.
    """
    for attempt in range(SCENE_TRIES):
        rng = Random(f"{options.seed}/{split}/{index}/{attempt}")
        scene = sample_scene(rng, options.rules, visible_share)
        entry = scene_json(scene, index, split, options.width, options.height)
        counted = balance.copy()
        questions = ask(facts_of(entry), options.questions_per_image, rng, counted, options.emphasis, options.families)
        if len(questions) == options.questions_per_image:
            balance.update(counted - balance)
            return scene, entry, questions
    raise InputError(
        f"{image_filename(split, index)}: {options.questions_per_image} different questions do not fit scenes of "
        f"{options.rules.min_objects} to {options.rules.max_objects} objects; ask fewer questions or add objects"
    )


def _make_block(out: Path, options: Options, split: str, indices: range) -> dict[Path, str]:
    """Write the images of a block, and return its entries in each of the split's JSON files as text."""
    balance, entries = Counter[tuple[int, str]](), defaultdict(list)
    scenes_paths, _ = _json_paths(out, options, split)
    for index in indices:
        scene, entry, generated = make_image(options, split, index, balance)
        paths = _picture_paths(out, options, split, index)
        _write_png(paths[0], partial(render, scene, options.width, options.height))
        if len(paths) == 2:
            depth_HW = annotate(scene, entry["objects"], options.width, options.height)
            _write_png(paths[1], partial(np.asarray, depth_HW))
        for path in scenes_paths:
            entries[path].append(json.dumps(entry))
        for number, question in enumerate(generated, index * options.questions_per_image):
            path = _questions_path(out, options, split, FAMILIES[question.family].group)
            entries[path].append(json.dumps(question_json(question, split, index, number)))
    return {path: ", ".join(texts) for path, texts in entries.items()}


def _write_png(path: Path, draw: Callable[[], np.ndarray]) -> None:
    """Draw a picture and write it, unless an earlier run did."""
    if not is_whole_png(path):
        with atomic_path(path, durable=False) as temporary:  # flushing would cost more than drawing
            Image.fromarray(draw()).save(temporary, "PNG", compress_level=1)


def question_json(question: Question, split: str, image: int, number: int) -> dict:
    """Return an entry of CLEVR's questions file; in the test split it has no program, answer and family."""
    entry = {
        "image_index": image,
        "program": list(question.program),
        "question_index": number,
        "image_filename": image_filename(split, image),
        "question_family_index": question.family,
        "split": split,
        "answer": question.answer,
        "question": question.text,
    }
    if split == "test":
        for key in ("program", "answer", "question_family_index"):
            del entry[key]
    return entry


def _write_split(
    out: Path, options: Options, split: str, results: Iterator[tuple[range, dict[Path, str]]], progress: Progress
) -> None:
    """Write a split's questions and scenes as its blocks arrive; the files appear when all blocks are written.

    Raises:
        InputError: a file would have no question.
    """
    head = json.dumps({"info": {"split": split, **INFO}})[:-1]
    scenes, questions = _json_paths(out, options, split)
    empty = set(questions)
    with ExitStack() as stack:
        add = {path: stack.enter_context(list_file(path, f'{head}, "questions": [')) for path in questions}
        add |= {path: stack.enter_context(list_file(path, f'{head}, "scenes": [')) for path in scenes}
        for block, made in results:
            for path, texts in made.items():
                add[path](texts)
            empty -= made.keys()
            progress(split, len(block))
        if empty:
            raise InputError(
                f"{min(empty)}: would have no question; make more images, ask more questions about each, or add objects"
            )


def _json_paths(out: Path, options: Options, split: str) -> tuple[list[Path], list[Path]]:
    """Return the paths of a split's scenes, which CLEVR v1.0 does not have for its test split, and of its questions."""
    scenes = [out / "scenes" / f"CLEVR_{split}_scenes.json"] if split != "test" else []
    groups = {family.group: None for family in FAMILIES_OF[options.families]}
    return scenes, list(dict.fromkeys(_questions_path(out, options, split, group) for group in groups))


def _questions_path(out: Path, options: Options, split: str, group: str) -> Path:
    """Return the file of the questions of a group: CLEVR's for all groups, or one for each as CLOSURE has them."""
    is_closure = options.families == "closure"
    return out / (f"{group}_{split}.json" if is_closure else f"questions/CLEVR_{split}_questions.json")


def _picture_paths(out: Path, options: Options, split: str, index: int) -> list[Path]:
    """Return the paths of an image and of its map of depths, if it has one; the test split has no annotations."""
    folders = ("images", "depth") if options.annotations and split != "test" else ("images",)
    return [out / folder / split / image_filename(split, index) for folder in folders]


def _is_finished(out: Path, options: Options, split: str) -> bool:
    """Return whether an earlier run with the same options finished the split, whose JSON files appear last."""
    if not all(path.exists() for path in chain(*_json_paths(out, options, split))):
        return False
    indices = range(getattr(options, split))
    return all(is_whole_png(path) for index in indices for path in _picture_paths(out, options, split, index))


@contextmanager
def _mapping(workers: int) -> Iterator[Callable]:
    """Yield a `map` that keeps the order, and runs here or in worker processes."""
    if workers == 1:
        yield map
        return
    context = multiprocessing.get_context("fork")
    with starting_workers():
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=become_worker)
    try:
        yield pool.map
    except BrokenProcessPool as error:
        raise InputError("a worker process was killed, perhaps because memory ran out; try fewer --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _claim(out: Path, options: Options) -> None:
    """Make `out` this data set's directory, unless it is.

    A directory that was made with fewer images is extended: its pictures are kept, and their questions are made again
    as they were, since they do not depend on the number of later ones.

    Raises:
        InputError: `out` contains something else or was made with other options (names the first), or its record is
            damaged.
    """
    record, path = {"generator": GENERATOR, **asdict(options)}, out / RECORD
    if not out.exists() or all(there.name == LOCK for there in out.iterdir()):
        write_json(path, record, indent=2)
        return
    if not path.exists():
        raise InputError(f"{out}: not empty and not made by iep-synth (no {RECORD}); choose a new directory")
    found = read_json(path, "the record of iep-synth")
    if not isinstance(found, dict) or not isinstance(found.get("rules", {}), dict):
        raise InputError(f"{path}: {found!r:.60}, expected the record of iep-synth, an object")
    there = found | found.get("rules", {})
    given = record | record["rules"]
    larger = [split for split in SPLITS if isinstance(there.get(split), int) and there[split] < given[split]]
    others = [name for name in given if there.get(name) != given[name] and name not in ("rules", *larger)]
    if others:
        name = others[0]
        option = name if name == "generator" else f"--{name.replace('_', '-')}"
        raise InputError(
            f"{out}: was made with {option} {there.get(name)}, now it is {given[name]}; choose a new directory; only "
            "more images can be added"
        )
    for temporary in out.glob("**/.*.tmp"):  # of a run that was killed
        temporary.unlink(missing_ok=True)
    for split in larger:
        for each in chain(*_json_paths(out, options, split)):
            each.unlink(missing_ok=True)
    if larger:
        write_json(path, record, indent=2)


@contextmanager
def list_file(path: Path, head: str) -> Iterator[Callable[[str], None]]:
    """Write a JSON file, whole or not at all, to whose list entries are added as text."""
    with atomic_path(path) as temporary, open(temporary, "w", encoding="ascii") as file:
        before = head

        def add(text: str) -> None:
            nonlocal before
            with os_errors_name(path):  # here, because another list file may be open inside this one's block
                file.write(before + text)
            before = ", "

        yield add
        file.write("]}\n")


def possible_tokens(directory: Path) -> Vocab | None:
    """Return every token that questions of the data set in `directory` can have; None if iep-synth did not make it.

    A small data set does not use all of them in its train split.

    Raises:
        InputError: its record is damaged.
    """
    path = directory / RECORD
    if not path.exists():
        return None
    with reading(path, "the record of iep-synth"):
        most = int(read_json(path)["rules"]["max_objects"])
    clevr = Vocab.clevr()
    answers = [token for token in clevr.answer if not token.isdigit() or int(token) <= most]
    # CLEVR's text has double spaces, which make an empty token; iep-synth's has none.
    return Vocab(tuple(filter(None, clevr.question)), clevr.program, tuple(answers))
