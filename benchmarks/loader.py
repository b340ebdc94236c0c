"""Measure how fast batches are loaded, without a network.

A pass loads every image's features once: in image order, with all questions of an image together, or in random order,
with one question of each image, as training at CLEVR's size draws them. Features are read from the disk (cold: the
file's pages are dropped from memory first), or from the system's cache as the previous pass left it (warm). Batches are
not planned, and nothing is copied to a GPU.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import median

import h5py
import numpy as np

from iep.bench.compare import Benchmark, Case, Competitor, seconds
from iep.data.datasets import ClevrDataset
from iep.data.features import Features
from iep.data.loader import Batches, Loading
from iep.data.question_file import Questions, Split, load_vocab, open_split

FEATURE_SHAPE, QUESTIONS_PER_IMAGE, QUESTION_LENGTH = (1024, 14, 14), 10, 46
"""Sizes of the generated data."""


def loader(
    sources: Sequence[str],
    orders: Sequence[str],
    workers: Sequence[int],
    data: Path | None,
    split: str,
    images: int,
    batch_size: int,
    batches: int,
    seed: int,
) -> Benchmark:
    """Return the comparison of every way of loading, with every number of workers.

    Args:
        data: directory that `iep-preprocess` wrote; None to generate features of `images` images in the directory for
            temporary files. They are removed at the end.
        batches: largest number of batches of a pass.

    Raises:
        InputError: a file is missing or damaged.
    """
    opened, description = None, f"{images} images with {QUESTIONS_PER_IMAGE} questions each, generated"
    if data is not None:
        opened = open_split(data, split, load_vocab(data), with_features=True, num_samples=None)
        description = f"{len(opened.questions)} questions about {len(opened.features)} images of {data}, split {split}"

    def competitor(found: Split, source: str, order: str, workers: int) -> Competitor:
        """Return one way to load batches; a round is a pass."""
        questions, features = found.questions, found.features
        dataset = ClevrDataset(questions, features)
        loading, speeds = Loading(workers), []

        def measure() -> dict[str, float]:
            if source == "cold":
                drop_pages(features.path)
            rows = order_rows(questions.image_idxs, order, [seed, len(speeds)])
            chosen = [(rows[start : start + batch_size], None) for start in range(0, len(rows), batch_size)][:batches]
            slot_bytes = batch_size * dataset.bytes_an_image
            loaded = iter(Batches(dataset.batch, chosen.__getitem__, range(len(chosen)), slot_bytes, loading))
            for _ in range(min(1 + 2 * workers, len(chosen) // 2)):
                next(loaded)  # start the workers, and touch the memory that they share
            counts: list[tuple[int, int]] = []
            elapsed = seconds(lambda: counts.extend((len(each.index), len(each.features)) for each in loaded))
            num_questions, num_images = map(sum, zip(*counts, strict=True))
            speeds.append(num_images * features.row_bytes / elapsed / 1e9)
            return {"batch": elapsed * batch_size / num_questions}

        return Competitor(f"{source}, {order} order", measure, facts=lambda: {"GB/s": median(speeds)})

    def cases() -> Iterator[Case]:
        with tempfile.TemporaryDirectory(prefix="iep-loader-") as made:
            found = made_data(Path(made), images, seed) if opened is None else opened
            for number in workers:
                ready = [competitor(found, *way, number) for way in product(sources, orders)]
                yield Case({"workers": number}, batch_size, ready, warm_up=False)

    return Benchmark(f"{description}; {batch_size} questions a batch", cases(), "question")


def order_rows(image_idxs: np.ndarray, order: str, seed: Sequence[int]) -> np.ndarray:
    """Return the rows of the questions of a pass; in random order, one question of each image."""
    if order == "image":
        return np.argsort(image_idxs, kind="stable")
    random = np.random.default_rng(seed)
    shuffled = random.permutation(len(image_idxs))
    _, firsts = np.unique(image_idxs[shuffled], return_index=True)
    return random.permutation(shuffled[firsts])


def drop_pages(path: Path) -> None:
    """Write a file to disk, and drop its pages from the system's cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def made_data(directory: Path, images: int, seed: int) -> Split:
    """Write float16 features of random bits, and return ten questions about each image."""
    path, random = directory / "random_features.h5", np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        features = file.create_dataset("features", (images, *FEATURE_SHAPE), np.float16)
        for image in range(images):
            features[image] = random.integers(1 << 16, size=FEATURE_SHAPE, dtype=np.uint16).view(np.float16)
    total = images * QUESTIONS_PER_IMAGE
    zeros, image_idxs = np.zeros((total, QUESTION_LENGTH), dtype=np.int64), np.arange(total) // QUESTIONS_PER_IMAGE
    return Split(Questions(path, zeros, image_idxs, np.arange(total), None, None, zeros[:, 0]), Features(path), total)
