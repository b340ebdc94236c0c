"""The rows of an export -> the files that a training tool reads.

| format | files | images |
|---|---|---|
| hf, trl, easyr1, verl | `data/SPLIT-00000-of-00001.parquet` | in the rows, as encoded bytes |
| swift | `SPLIT.jsonl` | `images/SPLIT/` |
| llava | `SPLIT.json` | `images/SPLIT/` |
| nscl | `SPLIT/questions.json`, `scenes.json` and `vocab.json` | `SPLIT/images/` |

`docs/other_models.md` names the sources of these layouts, and shows how each tool reads them.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import chain, compress, islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from iep.errors import InputError
from iep.preprocess.export_rows import Row, SplitFiles, choose, open_splits
from iep.runtime.files import write_json
from iep.runtime.locks import new_directory
from iep.runtime.reading import reading
from iep.synth.annotations import estimated_box, run_lengths
from iep.synth.synthesize import is_whole_png

FORMATS = {
    "hf": "parquet",
    "trl": "parquet",
    "easyr1": "parquet",
    "verl": "parquet",
    "swift": "jsonl",
    "llava": "json",
    "nscl": "json",
}
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
NSCL_WORDS = ("<UNK>", "<BOS>", "<EOS>", "<CONCEPTS>", "<REL_CONCEPTS>", "<ATTRIBUTES>")


def entry_of(form: str, row: Row, split: str, image: Any, instruction: str) -> dict[str, Any]:
    """Return a row of a split as a format other than `nscl` has it.

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


def export(
    clevr_dir: Path,
    out: Path,
    form: str,
    names: tuple[str, ...] = (),
    per_type: int | None = None,
    max_length: int | None = None,
    seed: int = 0,
    trace: bool = False,
    think: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Write questions of a CLEVR directory in one of `FORMATS` into the new directory `out`, in the order of the file.

    Args:
        names: the splits; none for all that have answers.
        per_type: the greatest number of questions of each type; None for all.
        max_length: the greatest number of functions of a program, `scene` included; None for no limit.
        seed: the seed of the choice of `per_type` questions.
        trace: add what each function of the program returns, in words; not for `nscl`.
        think: prompts ask for `<think>...</think>` before the answer, in the formats that have an instruction.
        say: a function that is called with a line about each split.

    Raises:
        InputError: `out` is not empty or in use by another process; pyarrow is missing; a split is missing or has no
            answers; a question, a scene or an image cannot be exported (names the file); or no question is left.
        OSError: a file cannot be written.
    """
    ending = FORMATS[form]
    if ending == "parquet" and find_spec("pyarrow") is None:
        raise InputError("writing parquet needs pyarrow: pip install 'iep[export]'")
    words, instruction = set[str](), THINK_INSTRUCTION if think else INSTRUCTION
    with new_directory(out) as directory:
        splits, without_answers = open_splits(clevr_dir, names)
        for name in without_answers:
            say(f"{name}: left out, as its questions have no answers")
        for split in splits:
            flags = choose(split, max_length, per_type, seed)
            taken = compress(split.rows(with_scenes=form != "nscl", with_trace=trace), flags)
            rows = tqdm(taken, desc=split.name, total=sum(flags), unit=" questions", delay=0.5)
            if form == "nscl":
                words |= _write_nscl(directory / split.name, split, rows)
            else:
                image = _embedded if ending == "parquet" else partial(_place, directory, Path("images", split.name))
                entries = (entry_of(form, row, split.name, image(split.images[row.image]), instruction) for row in rows)
                if ending == "parquet":
                    _write_parquet(directory / "data", split.name, entries)
                else:
                    _write_json(directory / f"{split.name}.{ending}", entries)
            say(f"{split.name}: {sum(flags):,} of {len(flags):,} questions")
        for split in splits if form == "nscl" else ():
            vocab = ("<PAD>", *sorted(words), *NSCL_WORDS)
            write_json(directory / split.name / "vocab.json", {word: index for index, word in enumerate(vocab)})


def _write_parquet(directory: Path, split: str, entries: Iterator[dict[str, Any]]) -> None:
    """Write entries to a file whose schema tells `datasets` which columns are images."""
    from pyarrow import Table, parquet

    first = list(islice(entries, GROUP_ROWS))
    images = {"image": {"_type": "Image"}, "images": [{"_type": "Image"}]}
    features = {name: feature for name, feature in images.items() if name in first[0]}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    schema = Table.from_pylist(first).schema.with_metadata(metadata)
    directory.mkdir(exist_ok=True)
    path = directory / f"{split}-00000-of-00001.parquet"
    with open(path, "wb") as file, parquet.ParquetWriter(file, schema) as writer:  # Arrow opens only UTF-8 names
        for group in chain([first], iter(lambda: list(islice(entries, GROUP_ROWS)), [])):
            writer.write_table(Table.from_pylist(group, schema=schema))


def _write_json(path: Path, entries: Iterable[dict[str, Any]], key: str = "") -> None:
    """Write one entry per line: JSON lines to a .jsonl file, otherwise a list, or an object with the list at `key`."""
    before, between, after = (f'{{"{key}": [\n', ",\n", "\n]}\n") if key else ("[\n", ",\n", "\n]\n")
    if path.suffix == ".jsonl":
        before, between, after = "", "\n", "\n"
    with open(path, "w", encoding="utf-8") as file:
        file.write(before)
        for count, entry in enumerate(entries):
            file.write((between if count else "") + json.dumps(entry))
        file.write(after)


@lru_cache(maxsize=1)
def _embedded(image: Path) -> dict[str, Any]:
    _check(image)
    return {"bytes": image.read_bytes(), "path": image.name}


def _place(directory: Path, folder: Path, image: Path) -> str:
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


def _write_nscl(directory: Path, split: SplitFiles, rows: Iterable[Row]) -> set[str]:
    """Write all images and scenes of a split and the questions `rows`; return the words of the questions."""
    directory.mkdir()
    _write_json(directory / "scenes.json", _nscl_scenes(split, directory), "scenes")
    words: set[str] = set()

    def source(row: Row) -> dict[str, Any]:
        words.update(re.findall(r"\w+|[^\w\s]", row.question))  # as nltk.word_tokenize splits CLEVR's questions
        return row.source

    _write_json(directory / "questions.json", map(source, rows), "questions")
    return words


def _nscl_scenes(split: SplitFiles, directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the scene of each image, which is placed in `images` of a directory.

    Objects have masks. If the data set has none, the scene has their estimated boxes as `objects_detection`.
    """
    for text, image in zip(split.scene_texts(), split.images, strict=True):
        scene = json.loads(text)
        with Image.open(directory / _place(directory, Path("images"), image)) as opened:
            width, height = opened.size
        with reading(split.scenes, "a CLEVR scenes file"):
            scene["image_filename"] = image.name
            if not all("mask" in thing for thing in scene["objects"]):
                behind = scene["directions"]["behind"]
                boxes = [estimated_box(thing, behind, width, height) for thing in scene["objects"]]
                scene["objects_detection"] = [{"bbox": box, "mask": _filled(box, width, height)} for box in boxes]
        yield scene


def _filled(box: list[int], width: int, height: int) -> dict[str, Any]:
    """Return a box as a mask in the format of `annotate`."""
    x, y, across, down = box
    mask_HW = np.zeros((height, width), bool)
    mask_HW[y : y + down, x : x + across] = True
    return {"size": [height, width], "counts": run_lengths(mask_HW)}
