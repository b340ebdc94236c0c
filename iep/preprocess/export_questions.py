"""A CLEVR directory -> training data of another tool: questions with answers, programs, scenes and images.

| format | files | images |
|---|---|---|
| hf, trl, easyr1, verl | `data/SPLIT-00000-of-00001.parquet` | in the rows, as encoded bytes |
| swift | `SPLIT.jsonl` | `images/SPLIT/` |
| llava | `SPLIT.json` | `images/SPLIT/` |

`docs/other_models.md` names the sources of these layouts, and shows how each tool reads them. Questions are read and
written one at a time.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any

from iep.errors import InputError
from iep.preprocess.clevr_files import (
    image_directories,
    image_paths,
    question_files,
    read_questions,
    read_scenes,
    scenes_path,
    select_splits,
)
from iep.preprocess.encode_questions import image_index, question_index, question_text
from iep.programs import json_to_prefix, question_type
from iep.runtime.files import is_whole_png
from iep.runtime.locks import new_directory
from iep.runtime.reading import reading
from iep.synth.executor import IllPosedError, facts_of, trace
from iep.vocab import answer_token

FORMATS = {"hf": "parquet", "trl": "parquet", "easyr1": "parquet", "verl": "parquet", "swift": "jsonl", "llava": "json"}
"""The formats, and the endings of their files."""
PROMPTED = ("trl", "verl", "swift")
"""The formats whose prompts have an instruction."""
INSTRUCTION = "Think step by step, then give the answer, one word or number, in <answer> </answer>."
THINK_INSTRUCTION = "Think in <think> </think>, then give the answer, one word or number, in <answer> </answer>."
"""The instructions that prompts of reinforcement learning add to a question; `iep.reward` reads such answers."""
SHORT_ANSWER = "Answer the question using a single word or phrase."
"""The instruction of LLaVA-1.5 (Liu et al. 2023, Improved Baselines with Visual Instruction Tuning, 3.2)."""
GROUP_ROWS = 200
"""The rows that are in memory at once. Parquet stores equal images of a group once."""


@dataclass(frozen=True)
class Row:
    """A question with its answer as CLEVR v1.0 has it, and its image.

    Attributes:
        details: further columns of every format: the indices, the type, the program in prefix order and the number of
            its functions, the scene as JSON text, and if requested the trace. A column that the data lack is left out.
    """

    question: str
    answer: str
    image: Path
    details: dict[str, Any]


def export(
    clevr_dir: Path,
    out: Path,
    form: str,
    names: tuple[str, ...] = (),
    with_trace: bool = False,
    think: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Write the questions of a CLEVR directory in one of `FORMATS` into the new directory `out`, in the file's order.

    Args:
        names: the splits; none for all that have answers.
        with_trace: add what each function of the program returns, in words.
        think: prompts ask for `<think>...</think>` before the answer, in the formats that have an instruction.
        say: a function that is called with a line about each split.

    Raises:
        InputError: `out` is not empty or in use by another process; pyarrow is missing; a split is missing or has no
            answers; or a question, a scene or an image cannot be exported (names the file).
        OSError: a file cannot be written.
    """
    ending = FORMATS[form]
    if ending == "parquet" and find_spec("pyarrow") is None:
        raise InputError("writing parquet needs pyarrow: pip install 'iep[export]'")
    instruction = THINK_INSTRUCTION if think else INSTRUCTION
    directories = image_directories(clevr_dir)
    with new_directory(out) as directory:
        for split, questions in select_splits(question_files(clevr_dir), names, clevr_dir, "questions").items():
            if next(read_questions(questions)).get("answer") is None:
                if names:
                    raise InputError(f"{questions}: the questions have no answers, which an export needs")
                say(f"{split}: left out, as its questions have no answers")
                continue
            of_images = split if split in directories else split.rpartition("_")[2]  # CLOSURE's are those of CLEVR
            images = image_paths(select_splits(directories, (of_images,), clevr_dir, "images")[of_images])
            rows = read_rows(questions, images, scenes_path(clevr_dir, of_images), with_trace)
            image = _embedded if ending == "parquet" else partial(_placed, directory, Path("images", split))
            entries = (entry_of(form, row, split, image(row.image), instruction) for row in rows)
            write = _write_parquet if ending == "parquet" else _write_json
            path = Path("data", f"{split}-00000-of-00001.parquet") if ending == "parquet" else f"{split}.{ending}"
            say(f"{split}: {write(directory / path, entries):,} questions")
        if not any(directory.iterdir()):
            raise InputError(f"{clevr_dir}: no split has answers, which an export needs")


def read_rows(questions: Path, images: list[Path], scenes: Path, with_trace: bool) -> Iterator[Row]:
    """Yield the row of each question, but of equal questions about one image only the first.

    Args:
        questions: a question file.
        images: the image files by index.
        scenes: the scenes file, which need not exist unless there are traces.
        with_trace: add the key `trace` to the details, the lines of `iep.synth.executor.trace`.

    Raises:
        InputError: a file is not one of CLEVR; a question has no text or answer, is about a missing image, or has a
            malformed program (names the file and the question); an image has no scene; or a trace cannot be made
            because there is no scenes file or no program, or the program has no answer on the scene.
    """
    texts = _scene_texts(scenes, len(images)) if with_trace or scenes.exists() else None
    have_programs = any(question.get("program") is not None for question in read_questions(questions))
    seen = set()
    for position, question in enumerate(read_questions(questions, show_progress=True)):
        try:
            text, image, answer = question_text(question), image_index(question), answer_token(question.get("answer"))
            if image >= len(images):
                raise InputError(f"is about image {image}, but there are {len(images)} images (0 to {len(images) - 1})")
            details: dict[str, Any] = {"question_index": question_index(question, position), "image_index": image}
            if have_programs:  # all rows have the same columns, which are empty for a question without a program
                tokens = [] if question.get("program") is None else json_to_prefix(question["program"])
                details |= {"question_type": question_type(tokens[0]) if tokens else ""}
                details |= {"program": " ".join(tokens), "program_length": len(tokens)}
            if texts is not None:
                details["scene"] = texts[image]
            if with_trace:
                details["trace"] = _trace(question, details["scene"], image)
        except InputError as error:
            raise InputError(f"{questions}: question {position}: {error}") from None
        if (image, text) not in seen:
            yield Row(text, answer, images[image], details)
        seen.add((image, text))


def _scene_texts(path: Path, count: int) -> list[str]:
    """Return the scene of each of `count` images as JSON text, which needs a tenth of the memory of objects."""
    texts = {scene.get("image_index", n): json.dumps(scene) for n, scene in enumerate(read_scenes(path))}
    missing = next((image for image in range(count) if image not in texts), None)
    if missing is not None:
        raise InputError(f"{path}: image {missing} has no scene")
    return [texts[image] for image in range(count)]


def _trace(question: dict[str, Any], scene: str, image: int) -> list[str]:
    if not question.get("program"):
        raise InputError("has no program, from which a trace is made")
    try:
        return trace(question["program"], facts_of(json.loads(scene)))
    except (IllPosedError, KeyError, TypeError, IndexError) as error:
        raise InputError(f"its program does not run on the scene of image {image} ({error!r})") from None


def entry_of(form: str, row: Row, split: str, image: Any, instruction: str) -> dict[str, Any]:
    """Return a row of a split as a format has it.

    Args:
        image: the image's bytes and name in formats of parquet files, its path in others.
        instruction: what prompts of reinforcement learning add to the question.
    """
    prompt, solution = f"{row.question} {instruction}", f"<answer>{row.answer}</answer>"
    index = row.details["question_index"]
    if form == "hf":
        entry = {"image": image, "question": row.question, "answer": row.answer}
    elif form == "trl":
        messages = [{"role": "user", "content": prompt}]
        entry = {"image": image, "prompt": messages, "problem": row.question, "solution": solution}
    elif form == "easyr1":
        entry = {"images": [image], "problem": f"<image>{row.question}", "answer": row.answer}
    elif form == "verl":
        return {
            "data_source": "clevr",
            "prompt": [{"role": "user", "content": f"<image>{prompt}"}],
            "images": [image],
            "ability": "visual_reasoning",
            "reward_model": {"style": "rule", "ground_truth": row.answer},
            "extra_info": {"split": split, "index": index, "question": row.question, **row.details},
        }
    elif form == "swift":
        steps = row.details.get("trace", []) if instruction == THINK_INSTRUCTION else []
        said = f"<think>{chr(10).join(steps)}</think>\n{solution}" if steps else solution
        messages = [{"role": "user", "content": f"<image>{prompt}"}, {"role": "assistant", "content": said}]
        entry = {"messages": messages, "images": [image], "solution": solution}
    else:  # llava
        question = {"from": "human", "value": f"<image>\n{row.question}\n{SHORT_ANSWER}"}
        conversations = [question, {"from": "gpt", "value": row.answer}]
        entry = {"id": f"{split}_{index}", "image": image, "conversations": conversations}
    return entry | row.details


def _write_parquet(path: Path, entries: Iterator[dict[str, Any]]) -> int:
    """Write entries to a file whose schema tells `datasets` which columns are images, and return their number."""
    from pyarrow import Table, parquet

    first = list(islice(entries, GROUP_ROWS))
    images = {"image": {"_type": "Image"}, "images": [{"_type": "Image"}]}
    features = {name: feature for name, feature in images.items() if name in first[0]}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    schema, count = Table.from_pylist(first).schema.with_metadata(metadata), 0
    path.parent.mkdir(exist_ok=True)
    with open(path, "wb") as file, parquet.ParquetWriter(file, schema) as writer:  # Arrow opens only UTF-8 names
        for group in chain([first], iter(lambda: list(islice(entries, GROUP_ROWS)), [])):
            writer.write_table(Table.from_pylist(group, schema=schema))
            count += len(group)
    return count


def _write_json(path: Path, entries: Iterable[dict[str, Any]]) -> int:
    """Write one entry per line, as JSON lines to a .jsonl file or else as a list, and return their number."""
    before, between, after = ("", "\n", "\n") if path.suffix == ".jsonl" else ("[\n", ",\n", "\n]\n")
    with open(path, "w", encoding="utf-8") as file:
        for count, entry in enumerate(entries, 1):  # there is one at least
            file.write((before if count == 1 else between) + json.dumps(entry))
        file.write(after)
    return count


@lru_cache(maxsize=1)
def _embedded(image: Path) -> dict[str, Any]:
    _check(image)
    return {"bytes": image.read_bytes(), "path": image.name}


def _placed(directory: Path, folder: Path, image: Path) -> str:
    """Link or copy an image into a folder of a directory, and return its path in the directory."""
    target = directory / folder / image.name
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        _check(image)
        try:
            os.link(image.resolve(), target)
        except OSError:  # on another file system, or on one without hard links
            shutil.copyfile(image, target)
    return str(folder / image.name)


def _check(image: Path) -> None:
    with reading(image, "an image"):
        if not is_whole_png(image):
            raise InputError("not a whole PNG image")
