"""A small directory of CLEVR's layout for tests: random PNG images and questions written by hand."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

COLORS = ("red", "green", "blue")


def write_images(clevr_dir: Path, split: str, count: int, size: tuple[int, int] = (30, 20)) -> list[Path]:
    """`count` images of random pixels, RGBA as CLEVR's are; `size` is width and height in pixels."""
    random = np.random.default_rng(count)
    paths = []
    for index in range(count):
        path = clevr_dir / "images" / split / f"CLEVR_{split}_{index:06d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (size[1], size[0], 4), dtype=np.uint8), "RGBA").save(path)
        paths.append(path)
    return paths


def question(index: int, image: int, split: str, color: str = "red") -> dict:
    """'How many red things are there?' as the release has it."""
    return {
        "question_index": index,
        "question_family_index": 7,
        "image_index": image,
        "image_filename": f"CLEVR_{split}_{image:06d}.png",
        "split": split,
        "question": f"How many {color} things are there?",
        "answer": "2",
        "program": [
            {"function": "scene", "inputs": [], "value_inputs": []},
            {"function": "filter_color", "inputs": [0], "value_inputs": [color]},
            {"function": "count", "inputs": [1], "value_inputs": []},
        ],
    }


def write_questions(clevr_dir: Path, split: str, questions: list[dict]) -> Path:
    path = clevr_dir / "questions" / f"CLEVR_{split}_questions.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"info": {"split": split}, "questions": questions}))
    return path


def write_clevr(clevr_dir: Path, images: int = 3) -> Path:
    """Splits train, val and test (which has neither programs nor answers), two questions to an image."""
    for split in ("train", "val", "test"):
        write_images(clevr_dir, split, images)
        questions = [question(100 + n, n // 2, split, COLORS[n % 3]) for n in range(2 * images)]
        if split == "test":
            questions = [{k: v for k, v in q.items() if k not in ("program", "answer")} for q in questions]
        write_questions(clevr_dir, split, questions)
    return clevr_dir
