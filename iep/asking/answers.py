"""Questions and programs as text -> what networks read, and their answers as text, JSON and pictures.

Shapes: H W pixels of an image or cells of a map, C H W features, L program tokens.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from PIL import Image
from torch import Tensor

from iep.backbone.network import FoundObjects
from iep.errors import InputError, nearest
from iep.evaluation.symbolic import reason_to_doubt, scene_of
from iep.execution_engine.choices import DEFAULT_SALIENCY, SALIENCY
from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.roles import ModuleSet, tree_run
from iep.execution_engine.trace import trace, unit_maps
from iep.programs import NOT_USED, ProgramTree, named, prefix_to_json, split_program, tokens_run, tree_lines
from iep.synth.executor import Facts, facts_of
from iep.vocab import END, SPECIAL_TOKENS, START, UNK, Vocab, content_tokens, tokenize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
TOP = 3
"""The number of the likeliest answers that are shown."""


@dataclass(frozen=True)
class Words:
    """A question as tokens of a vocabulary."""

    text: str
    indices: tuple[int, ...]
    """`<START>`, its words, `<END>`, as `iep-preprocess` encodes them."""
    unknown: tuple[str, ...]
    """The words that are not in the vocabulary, each once."""
    warnings: tuple[str, ...]
    """A line about each of these words."""


def read_question(text: str, vocab: Vocab, is_read: bool = True) -> Words:
    """Encode a question; words that are not in the vocabulary become `<UNK>`.

    Words that differ from known ones in capital letters are taken as these. Spaces around the question are dropped, and
    so are repeated spaces between words unless the vocabulary has an empty token.

    Args:
        is_read: a network reads the question; one that is asked with its program need not have known words.

    Raises:
        InputError: a network reads the question, and it has no word of the vocabulary.
    """
    text = text.strip()
    known = {token: index for token, index in vocab.question_index.items() if token not in SPECIAL_TOKENS}
    words = [word for word in tokenize(text) if word or word in known]
    words = [known_form(word, known, is_first=position == 0) for position, word in enumerate(words)]
    if is_read and not any(word in known and word.isalnum() for word in words):
        raise InputError(f"the question {text!r} has no word of the vocabulary")
    unknown = dict.fromkeys(word for word in words if word not in known)
    indices = (known.get(word, UNK) for word in words)
    said = "is not in the vocabulary and is read as <UNK>"
    warnings = tuple(f"{word!r} {said}{nearest(word, known)}" for word in unknown)
    return Words(text, (START, *indices, END), tuple(unknown), warnings)


def known_form(word: str, known: Collection[str], is_first: bool) -> str:
    """Return the known word that differs from `word` only in case, or `word` itself."""
    plain = word.lower()
    forms = (plain.capitalize(), plain) if is_first else (plain, plain.capitalize())
    return next((form for form in (word, *forms) if form in known), word)


def read_program(text: str, vocab: Vocab, own: ModuleSet) -> tuple[int, ...]:
    """Return the indices of a well-formed program's prefix tokens, which are separated by spaces in `text`.

    Args:
        own: the modules that run the program.

    Raises:
        InputError: a token is special or not in the vocabulary, the tokens are not one complete tree, or an argument of
            a function is of the wrong kind for its module.
    """
    tokens = split_program(text)
    known = {token: index for token, index in vocab.program_index.items() if token not in SPECIAL_TOKENS}
    for place, token in enumerate(tokens):
        if token in SPECIAL_TOKENS:
            raise InputError(f"program token {place} ({token!r}) is a special token, expected a function")
        if token not in known:
            raise InputError(
                f"program token {place} ({token!r}) is not in the checkpoint's vocabulary{nearest(token, known)}"
            )
    prefix_to_json(tokens)
    for place, node in enumerate(tree_run(tokens, own).nodes):
        if node.unused:
            raise InputError(f"program token {place} ({node.token}) is {node.unused}")
    return tuple(known[token] for token in tokens)


def read_each(what: str, given: str | Sequence[str], read: Callable[[str], T]) -> list[T]:
    """Return `read(text)` of a text, or of each text of a list.

    Args:
        what: the kind of text for messages, such as "question".

    Raises:
        InputError: `read` fails. Of several texts, the message names the failed one, such as "question 2".
    """
    texts = [given] if isinstance(given, str) else given
    results = []
    for number, text in enumerate(texts, start=1):
        try:
            results.append(read(text))
        except InputError as error:
            raise InputError(f"{what} {number}: {error}" if len(texts) > 1 else str(error)) from None
    return results


@dataclass(frozen=True, eq=False)
class SeenImage:
    """An image as networks read it, which `Model.see` returns. Each is None for a baseline that reads no image."""

    pixels: Image.Image | None
    features_1CHW: Tensor | None
    found: FoundObjects | None
    """The objects in the image; None if the backbone does not find objects."""

    @property
    def warning(self) -> str:
        """The warning of each answer about the image."""
        return "" if self.found is None else self.found.warning

    @cached_property
    def facts(self) -> Facts | None:
        """The facts of the found objects; None if there are no objects to rely on."""
        if self.found is None or self.pixels is None or self.warning:
            return None
        return facts_of(scene_of(self.found, self.pixels.size))


@dataclass(frozen=True, repr=False)
class Answer:
    """The networks' answer to a question, or the result of a program.

    Attributes:
        words: the question; None if only a program was given.
        probabilities: the probability of each possible answer, the likeliest first.
        indices: (L,) the program's tokens as predicted or given; empty for a baseline.
        tree: the program's tree, with the nodes marked that the engine does not use; None for a baseline.
        seen: the image.
        engine: the engine that ran the program; None for a baseline.
    """

    words: Words | None
    probabilities: dict[str, float]
    indices: tuple[int, ...]
    tree: ProgramTree | None
    seen: SeenImage = field(compare=False)
    engine: ExecutionEngine | None = field(compare=False)

    @property
    def question(self) -> str | None:
        """The question; None if only a program was given."""
        return None if self.words is None else self.words.text

    @property
    def answer(self) -> str:
        """The likeliest answer, such as "yes", "3" or "cyan"."""
        return next(iter(self.probabilities))

    @property
    def probability(self) -> float:
        """The probability of the likeliest answer."""
        return self.probabilities[self.answer]

    @property
    def program(self) -> str | None:
        """The program that ran, as `Model.ask` takes it; None for a baseline."""
        return None if self.tree is None else " ".join(tokens_run(self.tree))

    @property
    def warning(self) -> str:
        """Reasons to doubt the answer, one a line; empty if there is none.

        They are the question's unknown words, and `doubt`.
        """
        about_words = () if self.words is None else self.words.warnings
        return "\n".join(line for line in (*about_words, self.doubt) if line)

    @cached_property
    def doubt(self) -> str:
        """The reason that the objects in the image give to doubt the answer; empty if there is none.

        Either the objects are unlike those of CLEVR's images, such as none at all, or they contradict the answer.
        """
        if self.tree is None or self.seen.facts is None:
            return self.seen.warning
        return reason_to_doubt(tokens_run(self.tree), self.seen.facts, self.answer)

    def __repr__(self) -> str:
        asked = "" if self.question is None else f" to {self.question!r}"
        return f"<Answer {self.answer!r} ({100 * self.probability:.1f}%){asked}>"

    def __str__(self) -> str:
        """Return the question, the likeliest answers, the warning and the program as a tree."""
        return self.text()

    def text(self, top: int = TOP) -> str:
        """Return lines with the question, its unknown words, the `top` likeliest answers, `doubt`, and the program."""
        lines = [] if self.words is None else [self.words.text, *(f"  {line}" for line in self.words.warnings)]
        best, *others = (f"{name} {100 * share:.1f}%" for name, share in list(self.probabilities.items())[:top])
        lines.append(f"  {best}  (then {', '.join(others)})" if others else f"  {best}")
        if self.doubt:
            lines.append(f"  {self.doubt}")
        if self.tree is not None:
            lines += [f"  {line}" for line in tree_lines(self.tree, named)]
            if self.tree.ignored:
                lines.append(f"  ignored, after the tree was complete: {' '.join(self.tree.ignored)}")
        return "\n".join(lines)

    def to_json(self, top: int = TOP) -> dict[str, Any]:
        """Return the object that `iep-ask --json` prints, without the keys of unknown values.

        `program` is the predicted program as in predictions.jsonl. `run` is the program that was run, with `scene` in
        the place of unused functions. Both are in prefix order.
        """
        content: dict[str, Any] = {}
        if self.words is not None:
            content |= {"question": self.words.text, "unknown_words": list(self.words.unknown)}
        likeliest = list(self.probabilities.items())[:top]
        content["answers"] = [{"answer": name, "probability": round(share, 6)} for name, share in likeliest]
        if self.tree is not None and self.engine is not None:
            predicted = content_tokens(self.indices, self.engine.program_tokens)
            content |= {"program": predicted, "run": tokens_run(self.tree)}
        if self.doubt:
            content["warning"] = self.doubt
        return content

    def draw(self, path: Path | str | None = None, saliency: str = DEFAULT_SALIENCY, top: int = TOP) -> "Figure":
        """Draw the image, the likeliest answers, and the program's tree with the map of each function.

        Args:
            path: a file to write, completely or not at all, in the format of its ending, such as .png, .svg or .pdf;
                None to write none.
            saliency: the map of a function: `norm`, its attention or the norm of its output, or `gradient`, the norm of
                the gradient of the answer's score with respect to its output.
            top: the number of the likeliest answers to show.

        Returns:
            a figure of matplotlib, which a notebook displays.

        Raises:
            InputError: a baseline answered, `saliency` is unknown, or the ending of `path` is not that of a format.
            OSError: the file cannot be written.
        """
        from iep.asking.picture import draw_answer  # matplotlib takes a second

        maps, likeliest = self.maps(saliency), list(self.probabilities.items())[:top]
        image, tree = self.seen.pixels, self.tree
        assert image is not None  # there are maps, so an engine answered
        assert tree is not None
        warned = [*self.warning.splitlines()]
        warned += [f"{node.token}: {node.unused}" for node in tree.nodes if node.unused not in ("", NOT_USED)]
        if tree.ignored:
            warned.append(f"ignored after the program's tree: {' '.join(tree.ignored)}")
        colours = f"Colours: {SALIENCY[saliency]}."
        return draw_answer(path, self.question or "", image, likeliest, tree, maps, warned, colours)

    def maps(self, saliency: str = DEFAULT_SALIENCY) -> list[Tensor]:
        """Run the program once more, and return the map (H, W) of each node of `tree`, from 0 to 1.

        The maps of nodes that the answer does not depend on are 0.

        Raises:
            InputError: the saliency is unknown, or the answer is that of a baseline.
        """
        if saliency not in SALIENCY:
            raise InputError(f"saliency is {saliency!r}, expected one of {', '.join(SALIENCY)}")
        if self.tree is None or self.engine is None or self.seen.features_1CHW is None:
            raise InputError("a baseline runs no program that could be drawn")
        traced = trace(self.engine, self.seen.features_1CHW, self.indices)
        pairs = zip(unit_maps(traced, saliency), self.tree.nodes, strict=True)
        return [map_HW * (not node.unused) for map_HW, node in pairs]
