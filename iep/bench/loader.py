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
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np
import torch

from iep.bench.compare import Case, Competitor, Fact, seconds
from iep.bench.report import Benchmark
from iep.bench.workload import generated
from iep.data_files import Questions, open_split
from iep.datasets import ClevrDataset
from iep.devices import resolve_device
from iep.errors import InputError
from iep.execution_engine.plans import plan_programs
from iep.features import Features
from iep.loader import Batches, Loading, on_device
from iep.preprocess.features_file import FeaturesSpec, feature_rows
from iep.vocab import Vocab

FEATURE_SHAPE, QUESTIONS_PER_IMAGE, QUESTION_LENGTH, DISTINCT_PROGRAMS = (1024, 14, 14), 10, 46, 2560
"""Of the data made."""


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
    description = f"{images} images with {QUESTIONS_PER_IMAGE} questions each, made for this"
    if data is not None:
        vocab = Vocab.load(data / "vocab.json")
        opened = open_split(data, split, vocab, with_features=True, num_samples=None)
        given = (opened.questions, opened.features, vocab)
        if "with" in planning and opened.questions.programs is None:
            raise InputError(f"{opened.questions.path}: has no programs to plan; --plans without measures the rest")
        description = f"{len(opened.questions)} questions about {len(opened.features)} images of {data}, split {split}"

    def cases() -> Iterator[Case]:
        with tempfile.TemporaryDirectory(prefix="iep-loader-", dir=directory) as made:
            questions, features, vocab = made_data(Path(made), images, seed) if data is None else given
            in_memory = features.in_memory() if "memory" in sources else None
            plan = partial(_plan, vocab=vocab)
            for number in workers:
                loading = Loading(number, prefetch, pin=on.type == "cuda")
                competitors = []
                for source, order, plans in product(sources, orders, planning):
                    kept = in_memory if source == "memory" else features
                    dataset = ClevrDataset(questions, kept, plan if plans == "with" else None)
                    passes = Passes(dataset, features, source, order, batch_size, pass_seconds, loading, on, seed)
                    name = f"{source}, {order} order{', plans' * (plans == 'with')}"
                    competitors.append(Competitor(name, passes.measure, facts=passes.facts))
                yield Case({"workers": number}, batch_size, competitors, warm_up=False)

    description += f"; {batch_size} questions a batch, {prefetch} ahead a worker"
    return Benchmark(description, cases(), "workers", "question", on)


@dataclass
class Passes:
    """The passes of one way of loading: each round is one."""

    dataset: ClevrDataset
    features: Features
    source: str
    order: str
    size: int
    max_seconds: float
    loading: Loading
    device: torch.device
    seed: int
    speeds: list[float] = field(default_factory=list)
    cached: list[float | None] = field(default_factory=list)

    def measure(self) -> dict[str, float]:
        """Return the seconds of a batch, once the workers have begun and touched the memory that they share."""
        if self.source != "memory":
            (drop_pages if self.source == "cold" else touch_pages)(self.features.path)
        self.cached.append(cached_share(self.features.path))
        rows = order_rows(self.dataset.questions.image_idxs, self.order, [self.seed, len(self.speeds)])
        choices = [(rows[start : start + self.size], None) for start in range(0, len(rows), self.size)]
        numbers, slot_bytes = range(len(choices)), self.size * self.dataset.bytes_an_image
        batches = iter(Batches(self.dataset.batch, choices.__getitem__, numbers, slot_bytes, self.loading))
        if self.device.type == "cuda":
            batches = on_device(batches, self.device)
        for _ in range(min(1 + 2 * self.loading.workers, -(-len(choices) // 2))):
            next(batches)
        questions = images = 0

        def go_on() -> None:
            nonlocal questions, images
            start = time.perf_counter()
            for batch in batches:
                questions, images = questions + len(batch.index), images + len(batch.features)
                if time.perf_counter() - start > self.max_seconds:
                    break

        elapsed = seconds(go_on, self.device)
        self.speeds.append(images * self.features.row_bytes / elapsed / 1e9)
        return {"batch": elapsed * self.size / questions}

    def facts(self) -> dict[str, Fact]:
        """Return the median of gigabytes a second, and the greatest share of the file that was cached before a pass."""
        shares = [share for share in self.cached if share is not None]
        return {"GB/s": median(self.speeds), "cached": f"{100 * max(shares):.0f}%" if shares else None}


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
    size, found = path.stat().st_size, []
    with open(path, "rb") as file:
        for start in np.linspace(0, max(0, size - 1), min(1000, -(-size // 4096))).astype(int).tolist():
            try:
                found.append(os.preadv(file.fileno(), [bytearray(1)], start, os.RWF_NOWAIT) == 1)
            except BlockingIOError:
                found.append(False)
            except (OSError, AttributeError):
                return None
    return sum(found) / len(found) if found else None


def made_data(directory: Path, images: int, seed: int) -> tuple[Questions, Features, Vocab]:
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
