"""What `iep-bench tagger` measures: a BiLSTM tagger, its rare words spelled or not, in every way.

Shapes: W words of a minibatch.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from iep.bench.contest import Way
from iep.bench.hand_tagger import PackedTagger
from iep.bench.hand_ways import summed_cross_entropy, tagger_by_hand
from iep.bench.model_ways import batched_ways, per_instance
from iep.bench.samples import MIN_SAMPLES, shuffled, tagger_samples
from iep.bench.strategy import Strategy
from iep.bench.workload_run import Case
from iep.workloads.sentences import Sentence, read_wikiner, wikiner_like
from iep.workloads.tagger import Tagger

TAGS, LETTERS = 9, 64
"""Of the sentences made."""
EMBEDDING, LETTER_EMBEDDING, HIDDEN = 128, 64, 32
"""Sizes of vectors of words and letters, and of the layer before the tags (Qiao & Taura 2019, section 4.1)."""


def tagger_cases(
    strategies: Sequence[Strategy],
    seed: int,
    batch_sizes: Sequence[int],
    characters: bool,
    width: int,
    words: int,
    wikiner: Path | None,
    with_per_instance: bool,
) -> tuple[str, Iterator[Case]]:
    """A description, and a case for each size of minibatch, the smallest first.

    Raises:
        InputError: the sentences' file cannot be read, or has too few.
    """
    rng = np.random.default_rng(seed)
    largest, tags, letters = max(batch_sizes), TAGS, LETTERS
    if wikiner is None:
        sentences = wikiner_like(max(largest, MIN_SAMPLES), words, tags, rng, letters if characters else None)
        origin = f"{len(sentences)} sentences made in the lengths of WikiNER's"
    else:
        found, names = read_wikiner(wikiner)
        words, tags, letters = 1 + len(names.words), len(names.tags), len(names.characters)
        sentences = shuffled(found, largest, rng, wikiner, "sentences")
        origin = f"sentences of {wikiner}"
    torch.manual_seed(seed)
    models = tagger_models(words, tags, width, letters if characters else None)
    ways = tagger_ways(*models, strategies, with_per_instance)
    spelled = "rare words spelled" if characters else "one vector for all rare words"
    description = f"BiLSTM tagger, width {width}, {words} words, {tags} tags, {spelled}, {origin}"
    sizes = (EMBEDDING, width, HIDDEN, tags, LETTER_EMBEDDING if characters else None)
    return description, ((tagger_samples(sentences, size, *sizes), ways) for size in sorted(batch_sizes))


def tagger_models(words: int, tags: int, width: int, characters: int | None = None) -> tuple[Tagger, PackedTagger]:
    """The network, and the one by hand with the same weights, which does not spell."""
    model = Tagger(words, tags, characters, EMBEDDING, width, HIDDEN, LETTER_EMBEDDING)
    hand = PackedTagger(words, tags, EMBEDDING, width, HIDDEN)
    for name in ("embedding", "hidden", "tags"):
        getattr(hand, name).load_state_dict(getattr(model, name).state_dict())
    for way, end in enumerate(("", "_reverse")):
        into, again = model.lstm.inputs[way], model.lstm.recurrent[way]
        _copy_gates(getattr(hand.lstm, f"weight_ih_l0{end}"), into.weight)
        _copy_gates(getattr(hand.lstm, f"weight_hh_l0{end}"), again.weight)
        _copy_gates(getattr(hand.lstm, f"bias_ih_l0{end}"), into.bias)
        nn.init.zeros_(getattr(hand.lstm, f"bias_hh_l0{end}"))
    return model, hand


def _copy_gates(to: Tensor, source: Tensor) -> None:
    """Gates i, o, f, u where `nn.LSTM` has i, f, u, o."""
    i, o, f, u = source.detach().chunk(4)
    with torch.no_grad():
        to.copy_(torch.cat([i, f, u, o]))


def tagger_ways(
    model: Tagger, hand: PackedTagger, strategies: Sequence[Strategy], with_per_instance: bool = False
) -> list[Way]:
    """As `tree_lstm.binary_ways`; packed sequences are left out where rare words are spelled."""
    alone = [per_instance(model, _tags, summed_cross_entropy)] if with_per_instance else []
    packed = [] if model.characters is not None else [tagger_by_hand(hand)]
    return [*alone, *batched_ways(model, strategies, _tags, summed_cross_entropy), *packed]


def _tags(sentences: Sequence[Sentence]) -> Tensor:
    """(W,) sentence by sentence."""
    return torch.from_numpy(np.concatenate([sentence.tags for sentence in sentences]))
