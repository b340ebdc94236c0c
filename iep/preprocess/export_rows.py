"""A CLEVR directory -> the rows of an export: questions with answers, and their images, programs and scenes.

Files are read twice, one question at a time: first to choose questions, then to write them, which `export_formats.py`
does. The splits are those of CLEVR, which share no image.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from iep.errors import InputError
from iep.preprocess.clevr_files import (
    image_directories,
    image_paths,
    question_files,
    read_questions,
    read_scenes,
    scenes_path,
)
from iep.preprocess.encode_questions import answer_token, image_index, question_index, question_text
from iep.programs import json_to_prefix, question_type
from iep.synth.executor import IllPosedError, facts_of, trace

Kind = tuple[str | None, str]
"""The type of a question, if it has a program, and its answer; questions are balanced by it."""


@dataclass(frozen=True)
class Row:
    """A question with its answer and the index of its image.

    Attributes:
        source: the object in the question file, with the answer as CLEVR v1.0 has it.
        details: what goes along in every format: the indices, the type, the program in prefix order and the number of
            its functions, and if requested the scene as JSON text and the trace. Parts that the data do not have are
            missing.
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

    def rows(self, with_scenes: bool = False, with_trace: bool = False) -> Iterator[Row]:
        """Yield the row of each question.

        Args:
            with_scenes: add the key `scene` to the details, if there is a scenes file.
            with_trace: add the keys `scene` and `trace`, the lines of `iep.synth.executor.trace`.

        Raises:
            InputError: the file is not a CLEVR question file; a question has no text or answer, is about a missing
                image, or has a malformed program (names the file and the question); an image has no scene; or a trace
                cannot be made because there is no scenes file or no program, or the program has no answer on the scene.
        """
        texts = self.scene_texts() if with_trace or (with_scenes and self.scenes.exists()) else None
        for position, question in enumerate(read_questions(self.questions)):
            try:
                row = _row(question, position, len(self.images))
            except InputError as error:
                raise InputError(f"{self.questions}: question {position}: {error}") from None
            if texts is not None:
                row.details["scene"] = texts[row.image]
            if with_trace:
                row.details["trace"] = self._trace(row)
            yield row

    def scene_texts(self) -> list[str]:
        """Return the scene of each image as JSON text, which needs a tenth of the memory of objects.

        Raises:
            InputError: the file is not a CLEVR scenes file, or an image has no scene.
        """
        texts = {scene.get("image_index", n): json.dumps(scene) for n, scene in enumerate(read_scenes(self.scenes))}
        missing = next((image for image in range(len(self.images)) if image not in texts), None)
        if missing is not None:
            raise InputError(f"{self.scenes}: image {missing} has no scene")
        return [texts[image] for image in range(len(self.images))]

    def _trace(self, row: Row) -> list[str]:
        where = f"{self.questions}: the question with index {row.details['question_index']}"
        if "program" not in row.details:
            raise InputError(f"{where} has no program, from which a trace is made")
        try:
            return trace(row.source["program"], facts_of(json.loads(row.details["scene"])))
        except (IllPosedError, KeyError, TypeError, IndexError) as error:
            raise InputError(
                f"{where}: its program does not run on the scene of image {row.image} ({error!r})"
            ) from None


def open_splits(clevr_dir: Path, names: tuple[str, ...]) -> tuple[list[SplitFiles], list[str]]:
    """Return the splits of these names, or all that have answers, and the names of those without answers.

    Raises:
        InputError: a split of these names is missing or has no answers, there is no split with answers, or the indices
            of a split's images have gaps.
    """
    files, directories = question_files(clevr_dir), image_directories(clevr_dir)
    splits, without_answers = [], []
    for name in names or files or ("train",):
        of_images = name if name in directories else name.rpartition("_")[2]  # CLOSURE's are those of CLEVR's splits
        for what, split, found, example in (
            ("questions", name, files, f"questions/CLEVR_{name}_questions.json"),
            ("images", of_images, directories, f"images/{of_images}"),
        ):
            if split not in found:
                others = ", ".join(found) or f"none, expected {example}"
                raise InputError(f"{clevr_dir}: no {what} of split {split!r} (found: {others})")
        if next(read_questions(files[name])).get("answer") is None:
            without_answers.append(name)
            continue
        images = image_paths(directories[of_images])
        splits.append(SplitFiles(name, files[name], images, scenes_path(clevr_dir, of_images)))
    if without_answers and (names or not splits):
        raise InputError(f"{files[without_answers[0]]}: the questions have no answers, which an export needs")
    return splits, without_answers


def _row(question: dict[str, Any], position: int, num_images: int) -> Row:
    text, image, answer = question_text(question), image_index(question), answer_token(question.get("answer"))
    if not 0 <= image < num_images:
        raise InputError(f"is about image {image}, but there are {num_images} images (0 to {num_images - 1})")
    details: dict[str, Any] = {"question_index": question_index(question, position), "image_index": image}
    if question.get("program"):
        tokens = json_to_prefix(question["program"])
        details |= {"question_type": question_type(tokens[0])}
        details |= {"program": " ".join(tokens), "program_length": len(tokens)}
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
    kinds: list[Kind | None] = []
    for row in split.rows():
        kind = (row.details.get("question_type"), row.answer)
        too_long = max_length is not None and row.details.get("program_length", 0) > max_length
        kinds.append(None if too_long or (row.image, row.question) in seen else kind)
        seen.add((row.image, row.question))
    kept = {n: kind for n, kind in enumerate(kinds) if kind is not None}
    with_program = {of_type is not None for of_type, _ in kept.values()}
    if len(with_program) == 2 or (False in with_program and (max_length, per_type) != (None, None)):
        some = "only some" if True in with_program else "no"
        raise InputError(f"{split.questions}: {some} questions have programs, which give types and lengths")
    if not kept:
        raise InputError(f"{split.questions}: no question has a program of at most {max_length} functions")
    flags, taken = bytearray(len(kinds)), Counter[Any]()
    for n in kept if per_type is None else _balanced(kept, Random(f"{seed}/{split.name}")):
        of_type, _ = kept[n]
        flags[n] = per_type is None or taken[of_type] < per_type
        taken[of_type] += flags[n]
    return flags


def _balanced(kinds: Mapping[int, Kind], random: Random) -> list[int]:
    """Return the keys of `kinds` shuffled: one of each kind, then a second one of each, and so on."""
    order = list(kinds)
    random.shuffle(order)
    counts: Counter[Kind] = Counter()
    rank = {}
    for n in order:
        rank[n] = counts[kinds[n]]
        counts[kinds[n]] += 1
    return sorted(order, key=rank.__getitem__)
