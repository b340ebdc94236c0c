"""Checkpoints or a file of answers, and a split -> report.json, predictions.jsonl, the answers and the HTML report.

Notes in the terminal and in the HTML report warn of results that are easily misread: types of predicted programs, a
missing column of most common answers, pictures of other images than those of the features, and incomplete answers.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from iep.baselines import most_common
from iep.config import EVALUATED, SCORED, SYMBOLIC, Evaluation
from iep.data.datasets import ClevrDataset
from iep.data.features import Features
from iep.data.loader import Loading
from iep.data.question_families import family_filter
from iep.data.question_file import (
    Questions,
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
from iep.evaluation.html_report import PAGE, ReportOptions, write_page
from iep.evaluation.json_report import TITLES, Report
from iep.evaluation.metrics import Scores, count_types, question_types, score
from iep.evaluation.outcome import ANSWERS, ANSWERS_JSON, OUTPUTS, Outcome, write_outputs
from iep.evaluation.predict import Predictions, Predictor, predict
from iep.evaluation.question_cards import Maps, Pictures
from iep.evaluation.symbolic import NO_ANSWER, execute_programs, find_facts
from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.parts import NONE, Sample, check_options, main_device
from iep.execution_engine.trace import trace, unit_maps
from iep.models.build import Network, check_features, place_engine, set_execution, warn_of_other_features
from iep.models.checkpoint import load_network
from iep.preprocess.backbones import Scenes
from iep.programs import QUESTION_TYPES
from iep.runtime.devices import peak_memory, resolve_device
from iep.runtime.distributed import attempt, gather, is_main
from iep.runtime.files import check_writable
from iep.vocab import Vocab


def evaluate(
    settings: Evaluation,
    out: Path | None = None,
    page: ReportOptions | None = None,
    show: Callable[[Report], None] | None = None,
) -> Report | None:
    """Evaluate networks, or the answers of any model, and write files into `out` and the HTML report of `page`.

    Args:
        out: a directory; None to write none of its files.
        page: the HTML report's location and options; None for no HTML report.
        show: a function that receives the report at the end, even if a file cannot be written: it may have taken hours
            to compute.

    Returns:
        the report; None in all processes but the first, which alone writes.

    Raises:
        InputError: no model is named, a checkpoint does not fit the data, the split lacks what the settings need, or
            `settings.images` has no images of the split.
    """
    targets = [] if out is None else [out / name for name in OUTPUTS]
    check_writable(targets if page is None else [*targets, page.directory / PAGE])
    _check_models(settings)
    pictures = None if page is None or settings.images is None else Pictures(settings.images, settings.split)
    if settings.answers is not None:
        results: Answered | None = _answered(settings, settings.answers)
    else:
        results = _executed(settings) if is_symbolic(settings) else _predicted(settings)
    if results is None:
        return None
    outcome, split, seconds = results.outcome, results.split, results.outcome.predictions.seconds
    baselines, is_missing = _baselines(settings, outcome)
    programs = _programs_used(settings)
    beam = f", beam {settings.beam_size}" if programs == "predicted" and settings.beam_size > 1 else ""
    report = Report(
        split=settings.split if settings.questions is None else settings.questions.stem,
        selection=_describe_selection(settings),
        questions=len(split.questions),
        questions_by_type=count_types(outcome.types),
        accuracy=outcome.scores(outcome.right),
        program_exact_match=outcome.scores(outcome.exact),
        questions_per_second=None if seconds is None else len(split.questions) / seconds,
        peak_memory_gb=results.peak_memory_gb,
        device=results.device,
        programs=programs + beam,
        checkpoints={name: str(path) for name in EVALUATED if (path := getattr(settings, name)) is not None},
        baselines=baselines,
    )
    notes = [*results.notes, *_notes(settings, outcome, is_missing, pictures)]
    for note in notes:
        tqdm.write(note)
    try:
        if out is not None:
            write_outputs(out, outcome, report)
            for note in _answers_notes(out, outcome, split.total):
                tqdm.write(note)
        if page is not None:
            write_page(page, outcome, report, _shown_settings(settings), pictures, notes, results.maps)
    finally:
        if show is not None:
            show(report)
    return report


def is_symbolic(settings: Evaluation) -> bool:
    """Return whether programs are executed on found objects, not by the modules of a checkpoint."""
    return settings.ee == Path(SYMBOLIC)


class Answered(NamedTuple):
    """The predictions of networks, or those that a file holds, with the questions that they answer."""

    outcome: Outcome
    split: Split
    device: str = ""
    peak_memory_gb: float | None = None
    notes: Sequence[str] = ()
    maps: Maps | None = None
    """The map of each function of a question's program; None unless an engine on one device answers."""


def _predicted(settings: Evaluation) -> Answered | None:
    """Return the predictions of the networks; None in all processes but the first."""
    vocab = attempt(lambda: load_vocab(settings.data))
    device = main_device(settings.placement, settings.devices, settings.device)
    baseline = None if settings.baseline is None else load_network(settings.baseline, "baseline", vocab, device)
    sees = settings.ee is not None or (baseline is not None and len(baseline.feature_shape) > 0)
    split = attempt(lambda: _open_split(settings, vocab, sees))
    check_same_data(settings.data, vocab, [split])
    if settings.features_in_memory:
        split = split.in_memory()
    predictor = _load(settings, vocab, split, baseline)
    make_plan = None
    if predictor.engine is not None and not predictor.run_predicted:
        make_plan = predictor.engine.planner(settings.batching, settings.sharing)
    predictions = predict(
        predictor,
        ClevrDataset(split.questions, split.features, make_plan),
        settings.batch_size,
        Loading(settings.workers, pin=device.type == "cuda"),
        device,
        precision=settings.precision,
    )
    memory = gather(peak_memory(device))
    if predictions is None or memory is None:
        return None
    engine = predictor.engine
    outcome = Outcome(vocab, split.questions, predictions, None if engine is None else engine.module_set)
    maps = None
    if engine is not None and engine.placement is None:
        features = split.features
        programs_NL = predictions.programs if predictor.run_predicted else split.questions.programs
        assert features is not None
        assert programs_NL is not None

        @torch.inference_mode()
        def maps(row: int) -> list[tuple[int, str, np.ndarray]]:
            features_1CHW = features.read(split.questions.image_idxs[row : row + 1]).to(device, torch.float32)
            traced = trace(engine, features_1CHW, programs_NL[row])
            pairs = zip(traced.tree.nodes, unit_maps(traced), strict=True)
            own = [pair for pair in pairs if engine.module_set.role(pair[0].token) is not None]
            return [(node.depth, node.token, map_HW.numpy()) for node, map_HW in own]

    return Answered(outcome, split, ",".join(settings.devices) or str(device), max(memory) / 1e9, maps=maps)


def _executed(settings: Evaluation) -> Answered | None:
    """Return the answers of programs on the objects that a backbone finds; None in all processes but the first."""
    vocab, device = attempt(lambda: load_vocab(settings.data)), resolve_device(settings.device)
    split = attempt(lambda: _open_split(settings, vocab, sees=False))
    check_same_data(settings.data, vocab, [split])
    questions, loading = split.questions, Loading(settings.workers)
    predictions: Predictions | None = Predictions(None, None, None, None)
    if settings.pg is not None:
        predictor = _load(replace(settings, ee=None, programs="predicted"), vocab, split, None)
        predictions = predict(predictor, ClevrDataset(questions, None), settings.batch_size, loading, device)
    if predictions is None or not is_main():
        return None
    programs_QL = predictions.programs if _programs_used(settings) == "predicted" else questions.programs
    if programs_QL is None:
        raise InputError(f"{questions.path}: has no programs; evaluate with --pg CKPT and --programs predicted")
    assert settings.images is not None  # `_check_models` requires it
    images = questions.image_idxs.tolist()
    facts = find_facts(Scenes(settings.backbone), settings.images, settings.split, images, device, settings.workers)
    answers = execute_programs(programs_QL, vocab.program, questions.image_idxs, facts)
    vocab = vocab.with_answers(answers)
    ranked_QK = np.array([[vocab.answer_index[each]] for each in answers])
    outcome = Outcome(vocab, questions, replace(predictions, ranked_answers=ranked_QK, seconds=None))
    notes = [f"{count} programs have no answer on the objects found."] if (count := answers.count(NO_ANSWER)) else []
    return Answered(outcome, split, str(device), notes=notes)


def _answered(settings: Evaluation, answers: Path) -> Answered:
    """Return the answers of the file `answers` as predictions."""
    if settings.questions is None:
        vocab = load_vocab(settings.data)
        split = _open_split(settings, vocab, sees=False)
        every = read_questions(split_files(settings.data, settings.split)[0], vocab)
    else:
        vocab, every = open_questions(settings.questions)
        last = None if settings.num_samples is None else settings.skip_samples + settings.num_samples
        chosen = every.select(slice(settings.skip_samples, last))
        if not len(chosen):
            raise InputError(f"{settings.questions}: has no question after the first {settings.skip_samples}")
        split = Split(chosen, None, len(every))
    vocab, predictions, notes = answer_predictions(answers, split.questions, vocab, every)
    return Answered(Outcome(vocab, split.questions, predictions), split, notes=notes)


def _open_split(settings: Evaluation, vocab: Vocab, sees: bool) -> Split:
    """Return the selected questions, and their features if a network `sees` images."""
    train, choose = training_split(settings.data), None
    if settings.families is not None:
        train_path = None if train is None else split_files(settings.data, train)[0]
        choose = family_filter(settings.families, train_path, vocab)
    return open_split(settings.data, settings.split, vocab, sees, settings.num_samples, choose, settings.skip_samples)


def _describe_selection(settings: Evaluation) -> str:
    """Return which of the split's questions are evaluated, "" for all of them."""
    parts = []
    if settings.families is not None:
        parts.append(f"families {settings.families}")
    if settings.skip_samples:
        parts.append(f"without the first {settings.skip_samples}")
    if settings.num_samples is not None:
        parts.append(f"the first {settings.num_samples}")
    return ", ".join(parts)


def _shown_settings(settings: Evaluation) -> dict[str, object]:
    """Return the settings that have had an effect."""
    shown = {name: value for name, value in vars(settings).items() if name != "backbone" or is_symbolic(settings)}
    if settings.answers is not None:
        used = SCORED - ({"data", "split", "families"} if settings.questions is not None else {"questions"})
        shown = {name: value for name, value in shown.items() if name in used}
    return shown


def _programs_used(settings: Evaluation) -> str:
    """Return the source of the engine's programs: `predicted`, `ground-truth`, or nothing for a baseline."""
    if settings.baseline is not None or settings.answers is not None:
        return ""
    return settings.programs or ("predicted" if settings.pg is not None else "ground-truth")


def _check_models(settings: Evaluation) -> None:
    """Check that there is something to evaluate and that the options go together.

    Raises:
        InputError: there is nothing to evaluate, or two options contradict each other.
    """
    if settings.answers is not None:
        return
    engines = (settings.pg, settings.ee, settings.programs)
    if settings.baseline is not None and any(given is not None for given in engines):
        raise InputError("--baseline answers alone; evaluate it without --pg, --ee and --programs")
    if settings.baseline is None and settings.pg is None and settings.ee is None:
        raise InputError("nothing to evaluate: give --pg CKPT, --ee CKPT, both, or --baseline CKPT")
    if _programs_used(settings) == "predicted" and settings.pg is None:
        raise InputError("--programs predicted needs a program generator: give --pg CKPT")
    if settings.ee is None and settings.programs == "ground-truth":
        raise InputError("--programs ground-truth needs an execution engine: give --ee CKPT")
    if is_symbolic(settings) and settings.images is None:
        raise InputError("--ee symbolic needs images: give --images CLEVR_DIR")
    runs_modules = settings.ee is not None and not is_symbolic(settings)
    check_options(settings.placement, settings.devices, settings.device, runs_modules)
    of_engines = ("modules", "batching", "sharing", "execution", *(["precision"] if settings.baseline is None else []))
    for name in () if runs_modules else of_engines:
        if getattr(settings, name) != getattr(Evaluation, name):
            raise InputError(f"{name} is {getattr(settings, name)}, a setting of execution engines; give --ee CKPT")
    of_networks = ("features_in_memory", *(["batch_size"] if settings.pg is None else []))
    for name in of_networks if is_symbolic(settings) else ():
        if getattr(settings, name) != getattr(Evaluation, name):
            raise InputError(f"{name} is {getattr(settings, name)}, a setting of networks that --ee symbolic ignores")


def _load(settings: Evaluation, vocab: Vocab, split: Split, baseline: Network | None) -> Predictor:
    """Load the networks, and check that they fit the split's features and programs."""
    predicted = _programs_used(settings) == "predicted"
    if settings.ee is not None and not predicted and split.questions.programs is None:
        raise InputError(f"{split.questions.path}: has no programs; evaluate with --pg CKPT and --programs predicted")
    device = main_device(settings.placement, settings.devices, settings.device)
    networks: dict[str, Network] = {}
    if settings.pg is not None:
        networks["generator"] = load_network(settings.pg, "generator", vocab, device)
    if settings.ee is not None:
        networks["engine"] = load_network(settings.ee, "engine", vocab, device, modules=settings.modules)
    if baseline is not None:
        networks["baseline"] = baseline
    if split.features is not None:
        answers = baseline or networks["engine"]
        check_features(answers, split.features.shape[1:], split.features.path)
        warn_of_other_features(answers, split.features)
    if settings.ee is not None and settings.placement != NONE:
        tqdm.write(_place(networks["engine"].module, settings, split.questions))
    if settings.ee is not None:
        set_execution(networks["engine"].module, settings.execution, device, settings.precision)
    return Predictor(
        **{name: network.module for name, network in networks.items()},
        run_predicted=predicted,
        batching=settings.batching,
        sharing=settings.sharing,
        beam_size=settings.beam_size,
        max_program_length=settings.max_program_length,
    )


def _place(engine: ExecutionEngine, settings: Evaluation, questions: Questions) -> str:
    """Place the engine's parts, and return a description of their devices."""
    sample = Sample(questions.programs, questions.image_idxs, questions.path)
    return place_engine(engine, settings.placement, settings.devices, sample)


def _baselines(settings: Evaluation, outcome: Outcome) -> tuple[dict[str, Scores], bool]:
    """Return the scores of the most common answer to each question type, counted on the training split.

    Returns:
        the scores by name; and whether they are missing although the split has answers.
    """
    questions, types = outcome.questions, outcome.types
    if questions.answers is None or settings.data is None:
        return {}, False
    train = training_split(settings.data)
    if train is None or questions.programs is None:
        return {}, True
    # The outcome's vocabulary may have further answers, those of a file, after the data's own.
    counted = read_questions(split_files(settings.data, train)[0], load_vocab(settings.data))
    if counted.answers is None or counted.programs is None or not len(counted):
        return {}, True
    counted_types = question_types(counted.programs, outcome.vocab.program)
    answers = most_common.count_most_common(counted.answers, counted_types, len(QUESTION_TYPES))
    return {"most_common": score(most_common.predict(answers, types) == questions.answers, types)}, False


def _notes(settings: Evaluation, outcome: Outcome, is_missing: bool, pictures: Pictures | None) -> list[str]:
    """Return a line for each property of the results that a reader could misunderstand.

    Args:
        is_missing: whether there should be a column of the most common answers.

    Raises:
        InputError: the split has a features file that cannot be read.
    """
    split, notes = settings.split, []
    if outcome.questions.programs is None and outcome.predictions.programs is not None:
        notes.append(f"Question types are those of the predicted programs: the {split} split has no programs.")
    if is_missing:
        what = f"programs and answers of the {split} split and of a train split"
        notes.append(f"There is no column “{TITLES['most_common']}”, which needs {what}.")
    path = None if settings.data is None else split_files(settings.data, split)[1]
    made_of = Features(path).images if pictures is not None and path is not None and path.exists() else None
    if pictures is not None and made_of is not None and not pictures.is_of(*made_of):
        notes.append(
            f"{pictures.directory}: not the images that {path} was made of (names or sizes differ); the pictures in "
            "the report may be wrong."
        )
    return notes


def _answers_notes(out: Path, outcome: Outcome, total: int) -> list[str]:
    """Return a line if `out` lacks answers to some of the split's `total` questions, and one if several questions have
    the same `question_index`."""
    questions, notes = outcome.questions, list[str]()
    if outcome.predictions.answers is None:
        return notes
    if len(questions) < total:
        notes.append(f"{out / ANSWERS} is not complete: it holds the answers to {len(questions)} of {total} questions.")
    indices, counts = np.unique(questions.orig_idxs, return_counts=True)
    if (counts > 1).any():
        first = counts.argmax()
        where = f"{counts[first]} questions have the question_index {indices[first]}"
        notes.append(f"{questions.path}: {where}; {out / ANSWERS_JSON} cannot distinguish their answers.")
    return notes
