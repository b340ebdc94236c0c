"""A CLEVR directory -> the rows of an export: questions with answers, and their images, programs and scenes.

Files are read twice, one question at a time: first to choose questions, then to write them, which `export_formats.py`
does. The splits are those of CLEVR, which share no image.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from iep.errors import InputError
from iep.preprocess import clevr_files
from iep.preprocess.encode_questions import answer_token, image_index, question_index
from iep.programs import json_to_prefix, question_type
from iep.runtime.reading import check_utf8
from iep.synth.executor import IllPosedError, facts_of, trace

Kind = tuple[str | None, str]
"""The type of a question, if it has a program, and its answer; questions are balanced by it."""


@dataclass(frozen=True)
class Row:
    """A question with its answer and the index of its image.

    Attributes:
        source: the object in the question file, with the answer as CLEVR v1.0 has it.
        details: what goes along in every format: the indices, the type, the program in prefix order and the number of
            its functions, and the scene as JSON text. Parts that the data do not have are missing.
    """

    question: str
    answer: str
    image: int
    source: dict[str, Any]
    details: dict[str, Any]


@dataclass(frozen=True)
class SplitFiles:
    """The files of a split: its questions, its images by index, and its scenes, which may be missing."""

    name: str
    questions: Path
    images: list[Path]
    scenes: Path

    def rows(self) -> Iterator[Row]:
        """Yield the row of each question, without scenes.

        Raises:
            InputError: the file is not a CLEVR question file; or a question has no text or answer, is about a missing
                image, has a malformed program, or is not UTF-8 text (names the file and the question).
        """
        for position, question in enumerate(clevr_files.read_questions(self.questions)):
            try:
                yield _row(question, position, len(self.images))
            except InputError as error:
                raise InputError(f"{self.questions}: question {position}: {error}") from None

    def rows_with_scenes(self, with_trace: bool) -> Iterator[Row]:
        """Yield the row of each question, with its scene if there is a scenes file.

        Args:
            with_trace: add the key `trace`, the lines of `iep.synth.executor.trace`.

        Raises:
            InputError: a question is invalid, the file is not a CLEVR scenes file, an image has no scene, an image's
                index is not an integer, or a trace cannot be made because there is no scenes file or no program, or the
                program has no answer on the scene.
        """
        if not self.scenes.exists():
            if with_trace:
                raise InputError(f"{self.scenes}: no such file; traces are computed from scenes")
            yield from self.rows()
            return
        texts: dict[int, str] = {}  # a tenth of objects' memory
        for n, scene in enumerate(clevr_files.read_scenes(self.scenes)):
            image = scene.get("image_index", n)
            if type(image) is not int:
                raise InputError(f"{self.scenes}: scene {n}: 'image_index' is {image!r:.60}, expected an integer")
            texts[image] = json.dumps(scene)
        for row in self.rows():
            if row.image not in texts:
                raise InputError(f"{self.scenes}: image {row.image} has no scene")
            details = row.details | {"scene": texts[row.image]}
            if with_trace:
                details["trace"] = self._trace(row, texts[row.image])
            yield replace(row, details=details)

    def _trace(self, row: Row, scene: str) -> list[str]:
        where = f"{self.questions}: the question with index {row.details['question_index']}"
        if "program" not in row.details:
            raise InputError(f"{where} has no program, from which a trace is made")
        try:
            return trace(row.source["program"], facts_of(json.loads(scene)))
        except (IllPosedError, KeyError, TypeError, IndexError) as error:
            raise InputError(
                f"{where}: its program does not run on the scene of image {row.image} ({error!r})"
            ) from None


def open_splits(clevr_dir: Path, names: tuple[str, ...]) -> tuple[list[SplitFiles], list[str]]:
    """Return the splits of these names, or all that have answers, and the names of those without answers.

    Raises:
        InputError: a split of these names is missing or has no answers, there is no split with answers, the indices of
            a split's images have gaps, or the name of a file is not UTF-8.
    """
    files, directories = clevr_files.question_files(clevr_dir), clevr_files.image_directories(clevr_dir)
    splits, without_answers = [], []
    for name in names or files or ("train",):
        of_images = name if name in directories else name.rpartition("_")[2]  # CLOSURE's are those of CLEVR's splits
        for what, split, found, example in (
            ("questions", name, files, f"questions/CLEVR_{name}_questions.json"),
            ("images", of_images, directories, f"images/{of_images}"),
        ):
            if split not in found:
                names = ", ".join(found) or f"none, expected {example}"
                raise InputError(f"{clevr_dir}: no {what} of split {split!r} (found: {names})")
        if next(clevr_files.read_questions(files[name])).get("answer") is None:
            without_answers.append(name)
            continue
        images = clevr_files.image_paths(directories[of_images])
        for path in (files[name], *images):
            check_utf8(path.name, f"{path}: the name")
        splits.append(SplitFiles(name, files[name], images, clevr_files.scenes_path(clevr_dir, of_images)))
    if without_answers and (names or not splits):
        raise InputError(f"{files[without_answers[0]]}: the questions have no answers, which an export needs")
    return splits, without_answers


def _row(question: dict[str, Any], position: int, num_images: int) -> Row:
    text, image, answer = question.get("question"), image_index(question), answer_token(question.get("answer"))
    if not isinstance(text, str):
        raise InputError(f"'question' is {text!r:.60}, expected a text; the keys are {', '.join(question)}")
    if not 0 <= image < num_images:
        raise InputError(f"is about image {image}, but there are {num_images} images (0 to {num_images - 1})")
    details: dict[str, Any] = {"question_index": question_index(question, position), "image_index": image}
    if question.get("program"):
        tokens = json_to_prefix(question["program"])
        details |= {"question_type": question_type(tokens[0])}
        details |= {"program": " ".join(tokens), "program_length": len(tokens)}
    for part, value in {"question": text, "answer": answer, "program": details.get("program", "")}.items():
        check_utf8(value, repr(part))
    return Row(text, answer, image, question | {"answer": answer}, details)


def choose(split: SplitFiles, max_length: int | None = None, per_type: int | None = None, seed: int = 0) -> bytearray:
    """Return a flag for each row of a split: 1 if an export takes it.

    A question that occurred before about the same image is left out. The same arguments and files give the same choice.

    Args:
        max_length: leave out questions whose programs have more functions, `scene` included; None for no limit.
        per_type: take at most this many questions of each type, drawn at random so that the numbers of each answer
            differ as little as possible; None for all.

    Raises:
        InputError: a question is invalid; only some questions have a program, or none has one and they are to be chosen
            by type or length; or no question is left.
    """
    seen: set[tuple[int, str]] = set()
    known: dict[Kind, Kind] = {}
    kinds: list[Kind | None] = []
    for row in split.rows():
        kind = (row.details.get("question_type"), row.answer)
        kind = known.setdefault(kind, kind)
        too_long = max_length is not None and row.details.get("program_length", 0) > max_length
        kinds.append(None if too_long or (row.image, row.question) in seen else kind)
        seen.add((row.image, row.question))
    with_program = {kind[0] is not None for kind in known}
    if len(with_program) == 2 or (False in with_program and (max_length, per_type) != (None, None)):
        some = "only some" if True in with_program else "no"
        raise InputError(f"{split.questions}: {some} questions have programs, which give types and lengths")
    order = [n for n, kind in enumerate(kinds) if kind is not None]
    if not order:
        raise InputError(f"{split.questions}: no question has a program of at most {max_length} functions")
    flags, taken = bytearray(len(kinds)), Counter[Any]()
    for n in order if per_type is None else _balanced(order, kinds, Random(f"{seed}/{split.name}")):
        flags[n] = per_type is None or taken[kinds[n][0]] < per_type
        taken[kinds[n][0]] += flags[n]
    return flags


def _balanced(order: list[int], kinds: list[Kind | None], random: Random) -> list[int]:
    """Return the positions `order` shuffled: one of each kind, then a second one of each, and so on."""
    random.shuffle(order)
    counts: Counter[Kind | None] = Counter()
    rank = {}
    for n in order:
        rank[n] = counts[kinds[n]]
        counts[kinds[n]] += 1
    return sorted(order, key=rank.__getitem__)
