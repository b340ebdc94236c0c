"""The random choices of training as pure functions of the seed and the step: the order of examples, seeds and numbers.

A resumed run therefore makes the same choices as an uninterrupted one, and several processes together the same as one.
The curriculum, which limits the length of the programs in a step, is here as well. `datasets.py` reads the examples.

Shapes: N examples, B examples of a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from iep.errors import InputError


def step_seed(seed: int, step: int, rank: int = 0) -> int:
    """Return the 64-bit seed of the random numbers of process `rank` in a step, such as those of dropout."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0])


def step_numbers(seed: int, step: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return random float32 numbers from 0 to below 1 for a step, the same in every process."""
    # The seed has more parts than that of the order, so that the numbers differ.
    return np.random.default_rng([seed, step, 0, 1]).random(shape, dtype=np.float32)


def deal(image_idxs_B: np.ndarray, parts: int) -> list[np.ndarray]:
    """Divide the examples of a minibatch into `parts` of about the same size, and return their rising positions.

    Questions about one image stay together if there are enough images, so that only one process runs its stem.

    Raises:
        ValueError: there are fewer examples than parts.
    """
    count = len(image_idxs_B)
    if count < parts:
        raise ValueError(f"a minibatch has {count} examples for {parts} processes, expected at least one each")
    if parts == 1:
        return [np.arange(count)]
    _, first, inverse = np.unique(image_idxs_B, return_index=True, return_inverse=True)
    order = np.argsort(first[inverse], kind="stable")
    even = np.arange(1, parts) * count / parts
    images = np.append(0, np.cumsum(np.bincount(inverse)[np.argsort(first)]))
    cuts = images[np.abs(images[:, None] - even).argmin(axis=0)]
    if len(set(cuts.tolist()) | {0, count}) < parts + 1:  # one image has too many of the questions
        cuts = even.astype(int)
    return [np.sort(part) for part in np.split(order, cuts)]


@dataclass
class Order:
    """The examples of each training step: a new order in each epoch, and short programs first with a curriculum.

    Every epoch visits all examples of its stage once, except for a remainder smaller than a batch, in a random order of
    groups of up to `questions_per_image` random questions about one image.
    """

    stages: Sequence[tuple[int, np.ndarray]]
    """Pairs (first step, positions that may be drawn), with first steps rising from 0."""
    image_idxs: np.ndarray
    """(N,) the image of each example."""
    batch_size: int
    seed: int
    questions_per_image: int = 1
    _shuffled: tuple[tuple[int, int], np.ndarray] = field(default=((-1, -1), np.empty(0)), init=False)

    def rows(self, step: int) -> np.ndarray:
        """Return the (B,) positions of a batch; B is `batch_size`, or less if a stage has fewer examples."""
        stage = max(i for i, (first, _) in enumerate(self.stages) if first <= step)
        first, pool = self.stages[stage]
        epoch, batch = divmod(step - first, max(1, len(pool) // self.batch_size))
        if self._shuffled[0] != (stage, epoch):
            generator = np.random.default_rng([self.seed, stage, epoch])
            shuffled = generator.permutation(pool)
            if self.questions_per_image > 1:
                shuffled = _by_image(shuffled, self.image_idxs[shuffled], self.questions_per_image, generator)
            self._shuffled = ((stage, epoch), shuffled)
        return self._shuffled[1][batch * self.batch_size : (batch + 1) * self.batch_size]


def _by_image(positions: np.ndarray, image_idxs: np.ndarray, most: int, generator: np.random.Generator) -> np.ndarray:
    """Rearrange the shuffled `positions` into random groups of up to `most` with the same image."""
    order = np.argsort(image_idxs, kind="stable")
    images = image_idxs[order]
    number = np.arange(len(images)) - np.searchsorted(images, images)  # position among its image's questions
    group = np.cumsum(number % most == 0) - 1
    return positions[order[np.argsort(generator.permutation(group[-1] + 1)[group], kind="stable")]]


def make_order(
    lengths: np.ndarray | None,
    image_idxs: np.ndarray,
    curriculum: Sequence[tuple[int, int]],
    batch_size: int,
    seed: int,
    questions_per_image: int = 1,
) -> Order:
    """Return an `Order` over examples with these (N,) program lengths and images.

    Args:
        curriculum: pairs (first step, greatest program length); empty for all examples from the start.

    Raises:
        InputError: the steps of the curriculum do not rise from 0, there are no programs to measure, or a stage has no
            example.
    """
    stages = [(0, np.arange(len(image_idxs)))]
    if curriculum:
        firsts = [first for first, _ in curriculum]
        if firsts[0] != 0 or firsts != sorted(set(firsts)):
            raise InputError(f"curriculum starts its stages at iterations {firsts}, expected 0 first and then rising")
        if lengths is None:
            raise InputError("a curriculum needs programs, and the training questions have none")
        stages = [(first, np.flatnonzero(lengths <= longest)) for first, longest in curriculum]
        for (_, longest), (_, pool) in zip(curriculum, stages, strict=True):
            if not len(pool):
                raise InputError(f"curriculum: no training program has at most {longest} functions")
    return Order(stages, image_idxs, batch_size, seed, questions_per_image)
