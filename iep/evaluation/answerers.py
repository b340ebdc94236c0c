"""Three ways to answer the questions of a split: networks, programs executed on found objects, and a file of answers.

Each turns its own settings into an `Answered`, from which `run_evaluation.py` makes the report and all files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from iep.data.datasets import ClevrDataset
from iep.data.loader import Loading
from iep.data.question_families import family_filter
from iep.data.question_file import (
    Split,
    check_same_data,
    load_vocab,
    open_split,
    read_questions,
    split_files,
    training_split,
)
from iep.errors import InputError
from iep.evaluation.answer_files import answer_predictions, open_questions
from iep.evaluation.outcome import Outcome
from iep.evaluation.predict import Predictions, Predictor, predict
from iep.evaluation.question_cards import Maps
from iep.evaluation.settings import AnswerSettings, NetworkSettings, Selection, SymbolicSettings
from iep.evaluation.symbolic import NO_ANSWER, execute_programs, find_facts
from iep.execution_engine.assembly import Running
from iep.execution_engine.parts import ProgramSample
from iep.execution_engine.trace import trace, unit_maps
from iep.models.assemble import Sources, assemble
from iep.preprocess.backbones import Scenes
from iep.runtime.devices import peak_memory
from iep.runtime.distributed import attempt, gather, is_main
from iep.vocab import Vocab


@dataclass(frozen=True)
class Answered:
    """Questions and their answers, and what a report says about both."""

    outcome: Outcome
    total: int
    """The number of questions of the split, of which the outcome may have a part."""
    split: str
    """The name of the split, or of the file of questions."""
    selection: str
    """Which of its questions were answered; empty for all of them."""
    data: Path | None
    """The directory of the split; None for a file of questions."""
    programs: str = ""
    """The source of the programs that were run, for the report; empty without an engine."""
    checkpoints: Mapping[str, Path] = field(default_factory=dict)
    """The checkpoints that answered, by option."""
    device: str = ""
    peak_memory_gb: float | None = None
    notes: Sequence[str] = ()
    maps: Maps | None = None
    """The map of each function of a question's program; None unless an engine on one device answers."""


def answer_by_networks(settings: NetworkSettings) -> Answered | None:
    """Return the answers of networks; None in all processes but the first.

    Raises:
        InputError: a checkpoint does not fit the data, or the split lacks what the settings need.
    """
    running = Running(
        device=settings.device,
        placement=settings.placement,
        devices=settings.devices,
        execution=settings.execution,
        precision=settings.precision,
    )
    selection, device = settings.selection, running.main_device
    vocab = attempt(lambda: load_vocab(selection.data))
    networks = Sources(settings.pg, settings.ee, settings.baseline, settings.modules).networks()
    with_features = any(network.reads_features for network in networks.values())
    split = attempt(lambda: open_selection(selection, vocab, with_features))
    check_same_data(selection.data, vocab, [split])
    questions = split.questions
    if settings.ee is not None and not settings.runs_predicted and questions.programs is None:
        raise InputError(f"{questions.path}: has no programs; evaluate with --pg CKPT and --programs predicted")
    sample = ProgramSample(questions.programs, questions.image_idxs, questions.path)
    assemble(networks, vocab, running, [] if split.features is None else [split.features], sample)
    if settings.features_in_memory:
        split = split.in_memory()
    predictor = Predictor.of(
        networks.values(),
        run_predicted=settings.runs_predicted,
        batching=settings.batching,
        sharing=settings.sharing,
        beam_size=settings.beam_size,
        max_program_length=settings.max_program_length,
    )
    predictions = _predict(predictor, split, settings, device)
    memory = gather(peak_memory(device))
    if predictions is None or memory is None:
        return None
    engine = predictor.engine
    checkpoints = {"pg": settings.pg, "ee": settings.ee, "baseline": settings.baseline}
    return Answered(
        outcome=Outcome(vocab, questions, predictions, None if engine is None else engine.module_set),
        total=split.total,
        split=selection.split,
        selection=selection.text,
        data=selection.data,
        programs="" if settings.baseline is not None else _programs(settings),
        checkpoints={option: path for option, path in checkpoints.items() if path is not None},
        device=",".join(settings.devices) or str(device),
        peak_memory_gb=max(memory) / 1e9,
        maps=_maps(predictor, predictions, split, device),
    )


def _predict(predictor: Predictor, split: Split, settings: NetworkSettings, device: torch.device) -> Predictions | None:
    """Return the predictions for a split; None in all processes but the first."""
    engine, make_plan = predictor.engine, None
    if engine is not None and not settings.runs_predicted:
        make_plan = engine.planner(settings.batching, settings.sharing)
    return predict(
        predictor,
        ClevrDataset(split.questions, split.features, make_plan),
        settings.batch_size,
        Loading(settings.workers, pin=device.type == "cuda"),
        device,
        precision=settings.precision,
    )


def _maps(predictor: Predictor, predictions: Predictions, split: Split, device: torch.device) -> Maps | None:
    """Return the function of `Answered.maps`; None unless an engine on one device answers."""
    engine, features = predictor.engine, split.features
    if engine is None or engine.placement is not None:
        return None
    programs_NL = predictions.programs if predictor.run_predicted else split.questions.programs
    assert features is not None
    assert programs_NL is not None

    @torch.inference_mode()
    def maps(row: int) -> list[tuple[int, str, np.ndarray]]:
        features_1CHW = features.read(split.questions.image_idxs[row : row + 1]).to(device, torch.float32)
        traced = trace(engine, features_1CHW, programs_NL[row])
        pairs = zip(traced.tree.nodes, unit_maps(traced), strict=True)
        runs = [(node, map_HW) for node, map_HW in pairs if engine.module_set.role(node.token) is not None]
        return [(node.depth, node.token, map_HW.numpy()) for node, map_HW in runs]

    return maps


def answer_symbolically(settings: SymbolicSettings) -> Answered | None:
    """Return the answers of programs on the objects that a backbone finds; None in all processes but the first.

    Raises:
        InputError: there are no programs, an image is missing or damaged, or the generator does not fit the data.
    """
    running, selection = Running(settings.device), settings.selection
    device = running.main_device
    vocab = attempt(lambda: load_vocab(selection.data))
    split = attempt(lambda: open_selection(selection, vocab, with_features=False))
    check_same_data(selection.data, vocab, [split])
    questions, loading = split.questions, Loading(settings.workers)
    predictions: Predictions | None = Predictions(None, None, None, None)
    checkpoints = {"ee": Path("symbolic")}
    if settings.pg is not None:
        checkpoints = {"pg": settings.pg, **checkpoints}
        networks = Sources(settings.pg).networks()
        assemble(networks, vocab, running)
        predictor = Predictor.of(
            networks.values(),
            beam_size=settings.beam_size,
            max_program_length=settings.max_program_length,
        )
        predictions = predict(predictor, ClevrDataset(questions, None), settings.batch_size, loading, device)
    if predictions is None or not is_main():
        return None
    programs_QL = predictions.programs if settings.runs_predicted else questions.programs
    if programs_QL is None:
        raise InputError(f"{questions.path}: has no programs; evaluate with --pg CKPT and --programs predicted")
    images, backbone = questions.image_idxs.tolist(), Scenes(settings.backbone)
    facts = find_facts(backbone, settings.images, selection.split, images, device, settings.workers)
    answers = execute_programs(programs_QL, vocab.program, questions.image_idxs, facts)
    vocab = vocab.with_answers(answers)
    ranked_QK = np.array([[vocab.answer_index[each]] for each in answers])
    count = answers.count(NO_ANSWER)
    return Answered(
        outcome=Outcome(vocab, questions, replace(predictions, ranked_answers=ranked_QK, seconds=None)),
        total=split.total,
        split=selection.split,
        selection=selection.text,
        data=selection.data,
        programs=_programs(settings),
        checkpoints=checkpoints,
        device=str(device),
        notes=[f"Programs without an answer on the objects found: {count}."] if count else [],
    )


def answer_from_file(settings: AnswerSettings) -> Answered:
    """Return the answers in a file.

    Raises:
        InputError: the file or the questions cannot be read, or the file does not answer the questions.
    """
    selection, path = settings.selection, settings.questions
    if selection is not None:
        vocab = load_vocab(selection.data)
        split = open_selection(selection, vocab, with_features=False)
        every = read_questions(split_files(selection.data, selection.split)[0], vocab)
        name, data = selection.split, selection.data
    else:
        assert path is not None
        vocab, every = open_questions(path)
        last = None if settings.num_samples is None else settings.skip_samples + settings.num_samples
        chosen = every.select(slice(settings.skip_samples, last))
        if not len(chosen):
            raise InputError(f"{path}: has no question after the first {settings.skip_samples}")
        split = Split(chosen, None, len(every))
        name, data = path.stem, None
    vocab, predictions, notes = answer_predictions(settings.answers, split.questions, vocab, every)
    return Answered(
        outcome=Outcome(vocab, split.questions, predictions),
        total=split.total,
        split=name,
        selection=settings.text,
        data=data,
        notes=notes,
    )


def open_selection(selection: Selection, vocab: Vocab, with_features: bool) -> Split:
    """Open the selected questions, and the features of their images if a network reads them.

    Raises:
        InputError: a file is missing or damaged, or the selection has no questions.
    """
    choose = None
    if selection.families is not None:
        train = training_split(selection.data)
        path = None if train is None else split_files(selection.data, train)[0]
        choose = family_filter(selection.families, path, vocab)
    return open_split(
        selection.data,
        selection.split,
        vocab,
        with_features,
        selection.num_samples,
        choose,
        selection.skip_samples,
    )


def _programs(settings: NetworkSettings | SymbolicSettings) -> str:
    """Return the source of the programs for the report."""
    if not settings.runs_predicted:
        return "ground-truth"
    return f"predicted, beam {settings.beam_size}" if settings.beam_size > 1 else "predicted"
