"""What `iep-bench loader` compares: how fast batches reach whoever trains, without any network.

A pass hands out every image's features once: in image order, the questions of an image together; or in random order,
one question of each image, as training at CLEVR's size draws them. Features come from the disk (cold: the file's pages
are dropped from memory first), from the system's cache of the file (warm), or from shared memory. On a CPU batches
count in the file's dtype; converting them to float32 is the network's work there.
"""

import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np

from iep.bench.compare import Case, Competitor, Fact, seconds
from iep.bench.report import Benchmark
from iep.bench.workload import generated
from iep.data_files import Questions, open_split
from iep.datasets import ClevrDataset
from iep.devices import resolve_device
from iep.errors import InputError
from iep.execution_engine.program_plan import plan_programs
from iep.features import Features
from iep.loader import Batches, Loading, on_device
from iep.preprocess.features_file import FeaturesSpec, feature_rows
from iep.vocab import Vocab

FEATURE_SHAPE, QUESTIONS_PER_IMAGE, QUESTION_LENGTH, DISTINCT_PROGRAMS = (1024, 14, 14), 10, 46, 2560
"""Of the data made."""
Data = tuple[Questions, Features, Vocab]


def loader_benchmark(
    sources: Sequence[str],
    orders: Sequence[str],
    planning: Sequence[str],
    workers: Sequence[int],
    data: Path | None,
    split: str,
    images: int,
    batch_size: int,
    prefetch: int,
    pass_seconds: float,
    device: str,
    directory: Path | None,
    seed: int,
) -> Benchmark:
    """Return the comparison of every way of loading, with every number of workers.

    Args:
        data: directory that `iep-preprocess` wrote; None to have the features of so many `images` made in `directory`,
            or where temporary files are, and removed in the end.
        pass_seconds: after which a pass ends, if not before.

    Raises:
        InputError: a file is missing or damaged, the split has no programs to plan, or disk or memory are too small.
    """
    on = resolve_device(device)
    opened, description = None, f"{images} images with {QUESTIONS_PER_IMAGE} questions each, made for this"
    if data is not None:
        vocab = Vocab.load(data / "vocab.json")
        given = open_split(data, split, vocab, with_features=True, num_samples=None)
        if "with" in planning and given.questions.programs is None:
            raise InputError(f"{given.questions.path}: has no programs to plan; --plans without measures the rest")
        opened = given.questions, given.features, vocab
        description = f"{len(given.questions)} questions about {len(given.features)} images of {data}, split {split}"

    def competitor(
        found: Data, source: str, order: str, plans: str, workers: int, in_memory: Features | None
    ) -> Competitor:
        questions, features, vocab = found
        plan = partial(_plan, vocab=vocab) if plans == "with" else None
        dataset = ClevrDataset(questions, in_memory if source == "memory" else features, plan)
        loading = Loading(workers, prefetch, pin=on.type == "cuda")
        speeds, cached = [], []

        def measure() -> dict[str, float]:
            if source != "memory":
                (drop_pages if source == "cold" else touch_pages)(features.path)
            cached.append(cached_share(features.path))
            rows = order_rows(questions.image_idxs, order, [seed, len(speeds)])
            chosen = [(rows[start : start + batch_size], None) for start in range(0, len(rows), batch_size)]
            slot_bytes = batch_size * dataset.bytes_an_image
            batches = iter(Batches(dataset.batch, chosen.__getitem__, range(len(chosen)), slot_bytes, loading))
            batches = on_device(batches, on) if on.type == "cuda" else batches
            for _ in range(min(1 + 2 * workers, len(chosen) // 2)):
                next(batches)  # the workers begin, and touch the memory that they share
            counts: list[tuple[int, int]] = []

            def go_on() -> None:
                start = time.perf_counter()
                for batch in batches:
                    counts.append((len(batch.index), len(batch.features)))
                    if time.perf_counter() - start > pass_seconds:
                        break

            elapsed, (loaded, images) = seconds(go_on, on), map(sum, zip(*counts, strict=True))
            speeds.append(images * features.row_bytes / elapsed / 1e9)
            return {"batch": elapsed * batch_size / loaded}

        def facts() -> dict[str, Fact]:
            share = None if None in cached else f"{100 * max(cached):.0f}%"
            return {"GB/s": median(speeds), "cached": share}

        return Competitor(f"{source}, {order} order{', plans' * (plans == 'with')}", measure, facts=facts)

    def cases() -> Iterator[Case]:
        with tempfile.TemporaryDirectory(prefix="iep-loader-", dir=directory) as made:
            found = made_data(Path(made), images, seed) if opened is None else opened
            in_memory = found[1].in_memory() if "memory" in sources else None
            for number in workers:
                ways = product(sources, orders, planning)
                ready = [competitor(found, *way, number, in_memory) for way in ways]
                yield Case({"workers": number}, batch_size, ready, warm_up=False)

    description += f"; {batch_size} questions a batch, {prefetch} ahead a worker"
    return Benchmark(description, cases(), "workers", "question", on)


def _plan(programs_BL: np.ndarray, image_rows_B: np.ndarray, vocab: Vocab) -> object:
    return plan_programs(programs_BL, vocab.program, image_rows_B)


def order_rows(image_idxs: np.ndarray, order: str, seed: Sequence[int]) -> np.ndarray:
    """Return positions of questions in the order of a pass; in random order one of each image."""
    if order == "image":
        return np.argsort(image_idxs, kind="stable")
    random = np.random.default_rng(seed)
    shuffled = random.permutation(len(image_idxs))
    _, firsts = np.unique(image_idxs[shuffled], return_index=True)
    return random.permutation(shuffled[firsts])


def drop_pages(path: Path) -> None:
    """Have the system forget what it holds in memory of a file; what is not yet on disk is written first."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def touch_pages(path: Path) -> None:
    """Read a file once, so that the system holds it in memory."""
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(1 << 22)
        while file.readinto(buffer):
            pass


def cached_share(path: Path) -> float | None:
    """Return the share of a file that the system holds in memory, by up to 1,000 reads that do not wait for the disk;
    None where the system does not have such reads."""
    found = []
    with open(path, "rb") as file:
        for start in np.linspace(0, path.stat().st_size - 1, 1000).astype(int).tolist():
            try:
                found.append(os.preadv(file.fileno(), [bytearray(1)], start, os.RWF_NOWAIT) == 1)
            except BlockingIOError:
                found.append(False)
            except (OSError, AttributeError):
                return None
    return sum(found) / len(found)


def made_data(directory: Path, images: int, seed: int) -> Data:
    """Write float16 features of random bits as `iep-preprocess` does, and make ten questions about each image.

    Raises:
        InputError: the disk is too small.
    """
    path, random = directory / "random_features.h5", np.random.default_rng(seed)
    spec = FeaturesSpec(
        (images, *FEATURE_SHAPE), np.dtype(np.float16), ("random",) * images, {"backbone": "random bits"}
    )
    with feature_rows(path, spec, overwrite=True, flush_seconds=60) as rows:
        for start in range(0, images, 64):
            block = (min(64, images - start), *FEATURE_SHAPE)
            rows.write(start, np.frombuffer(random.bytes(2 * math.prod(block)), dtype=np.float16).reshape(block))
            rows.end_round(start + block[0])
    total = images * QUESTIONS_PER_IMAGE
    workload = generated(min(total, DISTINCT_PROGRAMS), QUESTIONS_PER_IMAGE, (1, 1, 1), largest=1, seed=seed)
    questions = Questions(
        path=path,
        questions=random.integers(0, 80, (total, QUESTION_LENGTH)),
        image_idxs=np.arange(total) // QUESTIONS_PER_IMAGE,
        orig_idxs=np.arange(total),
        families=None,
        programs=workload.programs_QL[np.arange(total) % len(workload.programs_QL)],
        answers=random.integers(0, 28, total),
    )
    return questions, Features(path), workload.vocab
