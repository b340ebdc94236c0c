"""The rows of an export -> the files that a training tool reads.

| format | files | images |
|---|---|---|
| hf, trl, easyr1, verl | `data/SPLIT-00000-of-00001.parquet`, ... | in the rows, as encoded bytes |
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
from functools import lru_cache
from importlib.util import find_spec
from itertools import chain, compress, islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from iep.errors import InputError
from iep.preprocess.clevr_files import read_scenes
from iep.preprocess.export_rows import Row, Split, choose, open_splits
from iep.runtime.files import write_json
from iep.runtime.locks import new_directory
from iep.runtime.reading import reading
from iep.synth.annotations import estimated_box, run_lengths
from iep.synth.synthesize import is_whole_png

INSTRUCTION = "Think step by step, then give the answer, one word or number, in <answer> </answer>."
"""What prompts of reinforcement learning add to a question; `iep.reward` reads such answers."""
SHORT_ANSWER = "Answer the question using a single word or phrase."
"""What LLaVA-1.5 adds to a question (Liu et al. 2023, Improved Baselines with Visual Instruction Tuning, 3.2)."""
GROUP_ROWS, SHARD_ROWS = 200, 10_000
"""The rows that are in memory at once, and the rows of a parquet file. Parquet stores equal images of a group once."""
NSCL_WORDS = ("<UNK>", "<BOS>", "<EOS>", "<CONCEPTS>", "<REL_CONCEPTS>", "<ATTRIBUTES>")


def _hf(row: Row, split: str, image: Any) -> dict[str, Any]:
    return {"image": image, "question": row.question, "answer": row.answer, **row.details}


def _trl(row: Row, split: str, image: Any) -> dict[str, Any]:
    prompt, solution = [_user(f"{row.question} {INSTRUCTION}")], _marked(row.answer)
    return {"image": image, "prompt": prompt, "problem": row.question, "solution": solution, **row.details}


def _easyr1(row: Row, split: str, image: Any) -> dict[str, Any]:
    return {"images": [image], "problem": f"<image>{row.question}", "answer": row.answer, **row.details}


def _verl(row: Row, split: str, image: Any) -> dict[str, Any]:
    return {
        "data_source": "clevr",
        "prompt": [_user(f"<image>{row.question} {INSTRUCTION}")],
        "images": [image],
        "ability": "visual_reasoning",
        "reward_model": {"style": "rule", "ground_truth": row.answer},
        "extra_info": {"split": split, "index": row.details["question_index"], "question": row.question, **row.details},
    }


def _swift(row: Row, split: str, image: Any) -> dict[str, Any]:
    solution = _marked(row.answer)
    messages = [_user(f"<image>{row.question} {INSTRUCTION}"), {"role": "assistant", "content": solution}]
    return {"messages": messages, "images": [image], "solution": solution, **row.details}


def _llava(row: Row, split: str, image: Any) -> dict[str, Any]:
    asked = {"from": "human", "value": f"<image>\n{row.question}\n{SHORT_ANSWER}"}
    conversations = [asked, {"from": "gpt", "value": row.answer}]
    identity = f"{split}_{row.details['question_index']}"
    return {"id": identity, "image": image, "conversations": conversations, **row.details}


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _marked(answer: str) -> str:
    return f"<answer>{answer}</answer>"


ENTRIES: dict[str, Callable[[Row, str, Any], dict[str, Any]]] = {
    "hf": _hf,
    "trl": _trl,
    "easyr1": _easyr1,
    "verl": _verl,
    "swift": _swift,
    "llava": _llava,
}
"""By format, the function from a row, its split and its image to its entry. An image is an object of its bytes and its
name in parquet files, and otherwise a path."""
ENDINGS = {"swift": "jsonl", "llava": "json"}  # of the formats that are not parquet
NSCL = "nscl"
FORMATS = (*ENTRIES, NSCL)


def export(
    clevr_dir: Path,
    out: Path,
    form: str,
    names: tuple[str, ...] = (),
    per_type: int | None = None,
    max_length: int | None = None,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> None:
    """Write questions of a CLEVR directory in one of `FORMATS` into the new directory `out`, in the order of the file.

    Args:
        names: the splits; none for all that have answers.
        per_type: as in `choose`.
        max_length: as in `choose`.
        seed: as in `choose`.
        say: is called with a line about each split.

    Raises:
        InputError: `out` is not empty or in use by another process, pyarrow is missing, an image is not a whole PNG
            file or too large, for `nscl` a scene is missing or damaged, or as `open_splits` and `choose`.
        OSError: a file cannot be written.
    """
    if form in ENTRIES and form not in ENDINGS and find_spec("pyarrow") is None:
        raise InputError("writing parquet needs pyarrow: pip install 'iep[export]'")
    words: set[str] = set()
    with new_directory(out) as directory:
        splits, unanswered = open_splits(clevr_dir, names)
        for name in unanswered:
            say(f"{name}: left out, as its questions have no answers")
        for split in splits:
            flags = choose(split, max_length, per_type, seed)
            rows = compress(split.rows() if form == NSCL else split.rows_with_scenes(), flags)
            rows = tqdm(rows, desc=split.name, total=sum(flags), unit=" questions", delay=0.5)
            if form == NSCL:
                words |= _write_nscl(directory / split.name, split, rows)
            elif form in ENDINGS:
                _write_json(directory, split, form, rows)
            else:
                entries = (ENTRIES[form](row, split.name, _embedded(split.images[row.image])) for row in rows)
                _write_parquet(directory / "data", split.name, entries, -(-sum(flags) // SHARD_ROWS))
            say(f"{split.name}: {sum(flags):,} of {len(flags):,} questions")
        for split in splits if form == NSCL else ():
            vocab = ("<PAD>", *sorted(words), *NSCL_WORDS)
            write_json(directory / split.name / "vocab.json", {word: index for index, word in enumerate(vocab)})


def _write_parquet(directory: Path, split: str, entries: Iterator[dict[str, Any]], shards: int) -> None:
    """Write entries as shards, whose schema tells `datasets` which columns are images."""
    from pyarrow import Table, parquet

    groups = iter(lambda: list(islice(entries, GROUP_ROWS)), [])
    first = next(groups)
    images = {"image": {"_type": "Image"}, "images": [{"_type": "Image"}]}
    features = {name: feature for name, feature in images.items() if name in first[0]}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    schema, groups = Table.from_pylist(first).schema.with_metadata(metadata), chain([first], groups)
    directory.mkdir(exist_ok=True)
    for shard in range(shards):
        path = directory / f"{split}-{shard:05}-of-{shards:05}.parquet"
        with open(path, "wb") as file, parquet.ParquetWriter(file, schema) as writer:  # Arrow opens only UTF-8 names
            for group in islice(groups, SHARD_ROWS // GROUP_ROWS):
                writer.write_table(Table.from_pylist(group, schema=schema))


@lru_cache(maxsize=1)
def _embedded(image: Path) -> dict[str, Any]:
    _check(image)
    return {"bytes": image.read_bytes(), "path": image.name}


def _write_json(directory: Path, split: Split, form: str, rows: Iterable[Row]) -> None:
    images = directory / "images" / split.name
    images.mkdir(parents=True)

    def entry(row: Row) -> dict[str, Any]:
        placed = _place(split.images[row.image], images)
        return ENTRIES[form](row, split.name, str(placed.relative_to(directory)))

    around = ("[\n", ",\n", "\n]\n") if ENDINGS[form] == "json" else ("", "\n", "\n")
    _write_list(directory / f"{split.name}.{ENDINGS[form]}", map(entry, rows), *around)


def _write_list(path: Path, entries: Iterable[dict[str, Any]], before: str, between: str, after: str) -> int:
    """Write entries as JSON between other text, and return their number."""
    count = 0
    with open(path, "w", encoding="utf-8") as file:
        file.write(before)
        for entry in entries:
            file.write((between if count else "") + json.dumps(entry))
            count += 1
        file.write(after)
    return count


def _place(image: Path, directory: Path) -> Path:
    """Return the path of an image in a directory, after linking or copying it there."""
    target = directory / image.name
    if not target.exists():
        _check(image)
        try:
            os.link(image.resolve(), target)
        except OSError:  # on another file system, or on one without hard links
            shutil.copyfile(image, target)
    return target


def _check(image: Path) -> None:
    with reading(image, "an image"):
        if not is_whole_png(image):
            raise InputError("not a whole PNG image")
        Image.open(image).close()  # refuses a header of too many pixels, before a reader of the export does


def _write_nscl(directory: Path, split: Split, rows: Iterable[Row]) -> set[str]:
    """Write all images and scenes of a split and the questions `rows`; return the words of the questions."""
    (directory / "images").mkdir(parents=True)
    scenes = (_nscl_scene(scene, n, split, directory) for n, scene in enumerate(read_scenes(split.scenes)))
    count = _write_list(directory / "scenes.json", scenes, '{"scenes": [\n', ",\n", "\n]}\n")
    if count < len(split.images):
        raise InputError(f"{split.scenes}: {count} scenes of {len(split.images)} images, expected one of each")
    words: set[str] = set()

    def source(row: Row) -> dict[str, Any]:
        words.update(re.findall(r"\w+|[^\w\s]", row.question))  # as nltk.word_tokenize splits CLEVR's questions
        return row.source

    _write_list(directory / "questions.json", map(source, rows), '{"questions": [\n', ",\n", "\n]}\n")
    return words


def _nscl_scene(scene: dict[str, Any], position: int, split: Split, directory: Path) -> dict[str, Any]:
    """Return a scene with the masks of its objects, or else with their estimated boxes as `objects_detection`."""
    if scene.get("image_index", position) != position or position >= len(split.images):
        what = f"scene {position} is not that of image {position}"
        raise InputError(f"{split.scenes}: {what}, expected one scene of each image")
    image = _place(split.images[position], directory / "images")
    with Image.open(image) as opened:
        width, height = opened.size
    with reading(split.scenes, "a CLEVR scenes file"):
        scene["image_filename"] = image.name
        if all("mask" in thing for thing in scene["objects"]):
            return scene
        boxes = [estimated_box(thing, scene["directions"]["behind"], width, height) for thing in scene["objects"]]
        return scene | {"objects_detection": [{"bbox": box, "mask": _filled(box, width, height)} for box in boxes]}


def _filled(box: list[int], width: int, height: int) -> dict[str, Any]:
    """Return a box as a mask in the format of `annotate`."""
    x, y, across, down = box
    mask_HW = np.zeros((height, width), bool)
    mask_HW[y : y + down, x : x + across] = True
    return {"size": [height, width], "counts": run_lengths(mask_HW)}
