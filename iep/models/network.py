"""Networks with what a checkpoint stores of them: settings, vocabulary, and how their features were made of images.

A `Network` is new (`Network.new`), comes from a checkpoint (`iep.models.checkpoint.Checkpoint.network`), or learns new
question words (`Network.with_words`). `check_fits` says whether it fits a vocabulary and features.

The networks have the names of the sections of a config with their settings: `generator`, `engine`, `lstm`, `cnn_lstm`,
`cnn_lstm_sa` and `backbone`. `NETWORKS` lists the networks of each model.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from iep.backbone.network import SceneNetwork
from iep.baselines.networks import CNNLSTMBaseline, LSTMBaseline, StackedAttentionBaseline
from iep.config import MODELS, SECTIONS, to_dict
from iep.data.features import Features
from iep.errors import InputError
from iep.execution_engine.assembly import make_engine
from iep.program_generator.seq2seq import Seq2Seq
from iep.runtime.distributed import is_main
from iep.vocab import Vocab

BASELINES: dict[str, type[LSTMBaseline | CNNLSTMBaseline | StackedAttentionBaseline]] = {
    "lstm": LSTMBaseline,
    "cnn_lstm": CNNLSTMBaseline,
    "cnn_lstm_sa": StackedAttentionBaseline,
}
CLASSES: dict[str, Callable[..., nn.Module]] = {
    "generator": Seq2Seq,
    "engine": make_engine,
    **BASELINES,
    "backbone": SceneNetwork,
}
DESCRIPTIONS = {
    "generator": "a program generator",
    "engine": "an execution engine",
    "lstm": "a question-only LSTM",
    "cnn_lstm": "a CNN+LSTM",
    "cnn_lstm_sa": "a CNN+LSTM+SA",
    "baseline": "a baseline",
    "backbone": "a backbone",
}
NETWORKS = {model: tuple(name for name, models in SECTIONS.items() if model in models) for model in MODELS}
"""The networks of each model."""
FEATURE_SIDES = {
    "engine": ("feature_dim", "feature_height", "feature_width"),
    **{name: network.feature_sides for name, network in BASELINES.items() if network.feature_sides},
}
"""The settings with the shape of the features, by network; networks that read no features are not here."""
TOKENS = {
    "generator": ("question", "program"),
    "engine": ("program", "answer"),
    **dict.fromkeys(BASELINES, ("question", "answer")),
    "backbone": (),
}
"""The parts of the vocabulary that each network depends on."""
PARTS_WITH_WORDS = ("encoder", "rnn")
"""The parts with the word embeddings of a generator and of a baseline, as `--freeze` names them."""
NEW_WORDS_STD = 0.01
"""The standard deviation of the embeddings of new words, as in the original toolkit."""


class Packed(NamedTuple):
    """The settings and the weights of a network in a checkpoint."""

    settings: Mapping[str, Any]
    """All constructor arguments."""
    weights: Mapping[str, Tensor]


@dataclass(frozen=True)
class Network:
    """A network and what a checkpoint stores of it beside its weights, so that loading needs no config."""

    name: str
    module: Any
    settings: Mapping[str, Any]
    """All constructor arguments."""
    vocab: Vocab
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """How the features that it was trained on were made of images; empty if this is not known."""
    source: Path | None = None
    """The checkpoint that it comes from; None for a new network."""

    @classmethod
    def new(cls, name: str, section: Any, vocab: Vocab, feature_shape: Sequence[int] = ()) -> "Network":
        """Return a network with new weights, which PyTorch's global random numbers determine.

        Args:
            section: the network's section of a `Config`.
            feature_shape: C, H and W of the features; nothing for a network that reads no features.

        Raises:
            InputError: the settings do not fit together, as with too few convolutions for the stride.
        """
        settings = settings_of_network(name, section, vocab, feature_shape)
        try:
            module = CLASSES[name](**settings)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise InputError(f"{DESCRIPTIONS[name]} cannot be built: {error}") from None
        return cls(name, module, settings, vocab)

    def with_words(self, vocab: Vocab, seed: int) -> "Network":
        """Return a generator or a baseline with embeddings of N new question words, which `vocab` has at its end.

        Johnson et al. 2017 (Inferring and Executing Programs, section 4.5) fine-tune on questions that people asked, in
        words that CLEVR does not have. `iep-preprocess --expand-vocab` puts such words after the old ones.

        The embeddings (V, E) of the module become (V + N, E). The old rows keep their bits, and the new ones are normal
        with a standard deviation of 0.01, drawn with `seed`.
        """
        words = self.module.get_submodule("encoder_embed" if self.name == "generator" else "rnn.embed")
        count = len(vocab.question) - words.num_embeddings
        generator = torch.Generator().manual_seed(seed)
        new_NE = torch.randn(count, words.embedding_dim, generator=generator) * NEW_WORDS_STD
        weight = torch.cat([words.weight.detach(), new_NE.to(words.weight)])
        words.weight = nn.Parameter(weight, words.weight.requires_grad)
        words.num_embeddings += count
        settings = {**self.settings, "num_question_tokens": words.num_embeddings}
        return replace(self, settings=settings, vocab=replace(self.vocab, question=vocab.question))

    def with_program_length(self, length: int) -> "Network":
        """Return a generator that decodes programs of at most `length` tokens."""
        self.module.max_program_length = length
        return replace(self, settings={**self.settings, "max_program_length": length})

    @property
    def reads_features(self) -> bool:
        """True if the network reads features of images."""
        return self.name in FEATURE_SIDES

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """The sizes among (C, H, W) of the features that it was built for; empty if it reads none."""
        return tuple(self.settings[side] for side in FEATURE_SIDES.get(self.name, ()))

    def packed(self) -> Packed:
        """Return what a checkpoint stores of the network."""
        return Packed(self.settings, self.module.state_dict())

    def check_fits(self, vocab: Vocab, features: Sequence[Features] = (), engine: Path | None = None) -> None:
        """Check that the network fits a vocabulary and features.

        A line is printed if features were made in another way than those that the network was trained on.

        Args:
            features: the features that the network will read, all computed in the same way; ignored if it reads none.
            engine: the checkpoint of an engine that has `vocab`; None if the data have it.

        Raises:
            InputError: a token that the network depends on differs (names the first one and, for data, how to make them
                fit), or features have another shape.
        """
        for part in TOKENS[self.name]:
            self._check_tokens(part, getattr(vocab, part), engine)
        if not self.reads_features or not features:
            return
        for each in features:
            self.check_shape(each.shape[1:], str(each.path))
        first = features[0]
        if is_main() and (changed := different_settings(first, self.recipe)):
            what = f"the features that {DESCRIPTIONS[self.name]} was trained on"
            tqdm.write(f"{first.path}: computed differently from {what}: {changed}")

    def check_shape(self, shape: Sequence[int], where: str) -> None:
        """Check that features have the shape (C, H, W) that the network was built for.

        Args:
            where: the features' file, for messages.

        Raises:
            InputError: they have another shape.
        """
        expected = self.feature_shape
        if expected != tuple(shape)[: len(expected)]:
            what = DESCRIPTIONS[self.name].split(" ")[-1] + ("" if self.source is None else f" of {self.source}")
            raise InputError(f"{where}: features are {tuple(shape)} an image, but the {what} is made for {expected}")

    def _check_tokens(self, part: str, given: Sequence[str], engine: Path | None) -> None:
        trained = getattr(self.vocab, part)
        if trained == given:
            return
        pairs = enumerate(zip_longest(trained, given))
        index, tokens = next((index, pair) for index, pair in pairs if pair[0] != pair[1])
        there, here = ("missing" if token is None else repr(token) for token in tokens)
        unknown = " --encode-unk" if part == "question" else ""
        where = engine or f"the data; preprocess them with --vocab {self.source}{unknown}"
        raise InputError(
            f"{self.source}: trained with another vocabulary: {part} token {index} is {there} there and {here} in "
            f"{where}"
        )


def settings_of_network(name: str, section: Any, vocab: Vocab, feature_shape: Sequence[int] = ()) -> dict[str, Any]:
    """Return all constructor arguments of the network `name`: its settings, and the sizes of the data that it reads.

    Args:
        section: the network's section of a `Config`.
        feature_shape: C, H and W of the features; nothing for a network that reads no features.
    """
    sizes = {
        "num_question_tokens": len(vocab.question),
        "num_program_tokens": len(vocab.program),
        "program_tokens": list(vocab.program),
        "num_answers": len(vocab.answer),
        **dict(zip(FEATURE_SIDES["engine"], feature_shape, strict=False)),
    }
    accepted = inspect.signature(CLASSES[name]).parameters
    return {key: size for key, size in sizes.items() if key in accepted} | to_dict(section)


def different_settings(features: Features, recipe: Mapping[str, Any]) -> str:
    """Return the settings with which features were computed differently from a recipe, "" if there are none.

    Only settings that both record are compared, except the dtype in which the features are stored.
    """
    both = sorted(recipe.keys() & features.recipe.keys() - {"dtype"})
    changed = [key for key in both if recipe[key] != features.recipe[key]]
    return ", ".join(f"{key} {features.recipe[key]} instead of {recipe[key]}" for key in changed)
