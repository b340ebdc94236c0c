"""Checkpoints and a preprocessed split -> report.json, predictions.jsonl, answers: opens, predicts, scores, writes.

Says, in lines for the terminal and the HTML report, what a reader might take otherwise than it is meant: where question
types are from, why there is no column *commonest*, pictures of other images than the features are of, and answers to a
part of the questions or several under one number.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path

import numpy as np
from torch import nn
from tqdm import tqdm

from iep.baselines import commonest
from iep.config import EVALUATED, Evaluation
from iep.data.datasets import ClevrDataset
from iep.data.features import Features
from iep.data.loader import Loading
from iep.data.question_families import family_filter
from iep.data.question_file import Questions, Split, open_split, read_questions, split_files, training_split
from iep.errors import InputError
from iep.evaluation.html_report import PAGE, Page, write_page
from iep.evaluation.json_report import Report
from iep.evaluation.metrics import Scores, count_types, question_types, score
from iep.evaluation.outcome import ANSWERS, ANSWERS_JSON, OUTPUTS, Outcome, write_outputs
from iep.evaluation.page_questions import Pictures
from iep.evaluation.predict import Predictor, predict
from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.placement import NONE, Sample, check_options, describe_engine, main_device
from iep.models.build import check_features, describe_other_features, load_baseline, load_network, place_engine
from iep.programs import QUESTION_TYPES
from iep.runtime.devices import peak_memory
from iep.runtime.distributed import gather, is_main
from iep.runtime.files import check_writable
from iep.vocab import Vocab


def evaluate(
    settings: Evaluation,
    out: Path | None = None,
    page: Page | None = None,
    show: Callable[[Report], None] | None = None,
) -> Report | None:
    """Evaluate, and write report.json, predictions.jsonl and the answers into `out` where it is given, the HTML report
    of `page` where that is. Of several processes the first writes and returns the report, the others None.

    Args:
        show: gets the report at the end, where a file could not be written too: it may have taken hours to find.

    Raises:
        InputError: no model is named, a checkpoint does not fit the data, the split lacks what is asked for, or there
            are no images where `page` says.
    """
    targets = [] if out is None else [out / name for name in OUTPUTS]
    check_writable(targets if page is None else [*targets, page.directory / PAGE])
    _check_models(settings)
    pictures = None if page is None else page.pictures(settings.split)
    vocab = Vocab.load(settings.data / "vocab.json")
    baseline = _load_baseline(settings, vocab)
    sees = settings.ee is not None or (baseline is not None and len(baseline.feature_sides) > 0)
    split = _open_split(settings, vocab, sees)
    questions = split.questions
    predictor = _load(settings, vocab, split, baseline)
    make_plan = None
    if predictor.engine is not None and not predictor.run_predicted:
        make_plan = predictor.engine.planner(settings.batching, settings.sharing)
    dataset = ClevrDataset(questions, split.features, make_plan)
    device = main_device(settings.placement, settings.devices, settings.device)
    predictions = predict(
        predictor,
        dataset,
        settings.batch_size,
        Loading(settings.workers, pin=device.type == "cuda"),
        device,
        by_image=settings.order_by_image,
        precision=settings.precision,
    )
    memory = gather(peak_memory(device))
    if predictions is None:
        return None

    modules = None if predictor.engine is None else predictor.engine.module_set
    outcome = Outcome(vocab, questions, predictions, modules)
    baselines = _baselines(settings.data, outcome)
    report = _report(settings, outcome, str(device), max(memory), baselines)
    notes = _notes(settings, outcome, bool(baselines), pictures)
    _tell(notes)
    try:
        if out is not None:
            _write_outputs(out, outcome, report, split.total)
        if page is not None:
            shown = {field.name: getattr(settings, field.name) for field in fields(settings)}
            write_page(page, outcome, report, shown, pictures, notes)
    finally:
        if show is not None:
            show(report)
    return report


def _write_outputs(out: Path, outcome: Outcome, report: Report, total: int) -> None:
    """`total`: questions of the split."""
    write_outputs(out, outcome, report)
    _tell(answers_notes(out, outcome, total))


def _tell(notes: Iterable[str]) -> None:
    for note in notes:
        tqdm.write(note)


def _notes(settings: Evaluation, outcome: Outcome, has_commonest: bool, pictures: Pictures | None) -> list[str]:
    """What is to be said besides the report."""
    data, split = settings.data, settings.split
    notes = [types_note(outcome, split)]
    if not has_commonest:
        notes.append(commonest_note(data, split, outcome.questions, training_split(data)))
    if pictures is not None:
        notes.append(pictures_note(pictures, data, split))
    return [note for note in notes if note is not None]


def _report(
    settings: Evaluation, outcome: Outcome, device: str, memory: float, baselines: Mapping[str, Scores]
) -> Report:
    questions = outcome.questions
    return Report(
        split=settings.split,
        selection=_describe_selection(settings),
        questions=len(questions),
        questions_by_type=count_types(outcome.types),
        accuracy=outcome.scores(outcome.right),
        program_exact_match=outcome.scores(outcome.exact),
        questions_per_second=len(questions) / outcome.predictions.seconds,
        peak_memory_gb=memory / 1e9,
        device=",".join(settings.devices) or device,
        programs=_describe_programs(settings),
        checkpoints={name: str(path) for name in EVALUATED if (path := getattr(settings, name)) is not None},
        baselines=baselines,
    )


def _open_split(settings: Evaluation, vocab: Vocab, sees: bool) -> Split:
    """The split's questions that are asked for, and features where a network sees them."""
    train, choose = training_split(settings.data), None
    if settings.families is not None:
        train_path = None if train is None else split_files(settings.data, train)[0]
        choose = family_filter(settings.families, train_path, vocab)
    samples, skip, in_memory = settings.num_samples, settings.skip_samples, settings.features_in_memory
    return open_split(settings.data, settings.split, vocab, sees, samples, in_memory, choose, skip)


def _describe_selection(settings: Evaluation) -> str:
    """Which of the split's questions are evaluated, "" for all of them."""
    parts = []
    if settings.families is not None:
        parts.append(f"families {settings.families}")
    if settings.skip_samples:
        parts.append(f"without the first {settings.skip_samples}")
    if settings.num_samples is not None:
        parts.append(f"the first {settings.num_samples}")
    return ", ".join(parts)


def _programs_used(settings: Evaluation) -> str:
    """Where the engine's programs come from: `predicted`, `ground-truth`, or nothing for a baseline."""
    if settings.baseline is not None:
        return ""
    return settings.programs or ("predicted" if settings.pg is not None else "ground-truth")


def _describe_programs(settings: Evaluation) -> str:
    used = _programs_used(settings)
    return f"{used}, beam {settings.beam_size}" if used == "predicted" and settings.beam_size > 1 else used


def _check_models(settings: Evaluation) -> None:
    """See that something is to be evaluated, and what is named goes together."""
    engines = (settings.pg, settings.ee, settings.programs)
    if settings.baseline is not None and any(given is not None for given in engines):
        raise InputError("--baseline answers alone; evaluate it without --pg, --ee and --programs")
    if settings.baseline is None and settings.pg is None and settings.ee is None:
        raise InputError("nothing to evaluate: give --pg CKPT, --ee CKPT, both, or --baseline CKPT")
    if _programs_used(settings) == "predicted" and settings.pg is None:
        raise InputError("programs are to be predicted: give --pg CKPT, a trained program generator")
    if settings.ee is None and settings.programs == "ground-truth":
        raise InputError("--programs ground-truth is for an execution engine: give --ee CKPT")
    check_options(settings.placement, settings.devices, settings.device, settings.ee is not None)


def _load_baseline(settings: Evaluation, vocab: Vocab) -> nn.Module | None:
    if settings.baseline is None:
        return None
    return load_baseline(settings.baseline, vocab, main_device(settings.placement, settings.devices, settings.device))


def _load(settings: Evaluation, vocab: Vocab, split: Split, baseline: nn.Module | None) -> Predictor:
    """What answers, made for the split's features."""
    predicted = _programs_used(settings) == "predicted"
    if settings.ee is not None and not predicted and split.questions.programs is None:
        raise InputError(f"{split.questions.path}: has no programs; evaluate with --pg CKPT and --programs predicted")
    device = main_device(settings.placement, settings.devices, settings.device)
    networks = {}
    if settings.pg is not None:
        networks["generator"] = load_network(settings.pg, "generator", vocab, device)
    if settings.ee is not None:
        networks["engine"] = load_network(settings.ee, "engine", vocab, device)
    if baseline is not None:
        networks["baseline"] = baseline
    if split.features is not None:
        answers = networks["engine"] if baseline is None else baseline
        check_features(answers, split.features.shape[1:], split.features.path)
        if is_main() and (warning := describe_other_features(answers, split.features)) is not None:
            tqdm.write(warning)
    if settings.ee is not None and settings.placement != NONE:
        tqdm.write(_place(networks["engine"], settings, split.questions))
    return Predictor(
        **networks,
        run_predicted=predicted,
        batching=settings.batching,
        sharing=settings.sharing,
        beam_size=settings.beam_size,
        max_program_length=settings.max_program_length,
    )


def _place(engine: ExecutionEngine, settings: Evaluation, questions: Questions) -> str:
    """Place the engine's parts; returns a text on where they are and what is copied between devices."""
    sample = Sample(questions.programs, questions.image_idxs, questions.path)
    costs = place_engine(engine, settings.placement, settings.devices, sample)
    planner = engine.planner(settings.batching, settings.sharing)
    return describe_engine(settings.placement, engine, costs, sample, planner, settings.batch_size, settings.precision)


def _baselines(data: Path, outcome: Outcome) -> dict[str, Scores]:
    """The commonest answer per question type, counted on the training split, where both have what it needs."""
    split, vocab, questions, types = training_split(data), outcome.vocab, outcome.questions, outcome.types
    if questions.answers is None or questions.programs is None or split is None:
        return {}
    train = read_questions(split_files(data, split)[0], vocab)
    if train.answers is None or train.programs is None or not len(train):
        return {}
    train_types = question_types(train.programs, vocab.program)
    answers = commonest.count_commonest(train.answers, train_types, len(QUESTION_TYPES))
    return {"commonest": score(commonest.predict(answers, types) == questions.answers, types)}


def types_note(outcome: Outcome, split: str) -> str | None:
    """A line where questions are sorted into types by programs that may be wrong."""
    if outcome.questions.programs is not None or outcome.predictions.programs is None:
        return None
    return f"Question types are those of the predicted programs: the {split} split has none of its own."


def commonest_note(data: Path, split: str, questions: Questions, train: str | None) -> str | None:
    """A line where answers are known, but the commonest ones to compare with are not.

    Args:
        train: the split that they are counted on, None where the data have none.
    """
    if questions.answers is None:
        return None
    if train is None:
        return f"No column commonest: {data} has no train split to count answers on."
    lacking = split if questions.programs is None else train
    return f"No column commonest: the {lacking} split has no programs, or no answers, to tell types and count by."


def pictures_note(pictures: Pictures, data: Path, split: str) -> str | None:
    """A line where the images to be shown are not those that the split's features were made of, as far as recorded.

    Raises:
        InputError: the split has a features file that cannot be read.
    """
    path = split_files(data, split)[1]
    made_of = Features(path).images if path.exists() else None
    if made_of is None or pictures.is_of(*made_of):
        return None
    return (
        f"{pictures.directory}: not the images that {path} was made of (names or sizes differ); the report's pictures "
        "may be wrong."
    )


def answers_notes(out: Path, outcome: Outcome, total: int) -> list[str]:
    """Lines where the files of answers in `out` do not hold one to each of the split's `total` questions, or several
    under one `question_index`."""
    questions, notes = outcome.questions, []
    if outcome.predictions.answers is None:
        return notes
    if len(questions) < total:
        notes.append(f"{out / ANSWERS} is not complete: it holds {len(questions)} of {total} questions.")
    indices, counts = np.unique(questions.orig_idxs, return_counts=True)
    if (counts > 1).any():
        first = counts.argmax()
        where = f"{counts[first]} questions have the question_index {indices[first]}"
        notes.append(f"{questions.path}: {where}; {out / ANSWERS_JSON} does not tell their answers apart.")
    return notes
