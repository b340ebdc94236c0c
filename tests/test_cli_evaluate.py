"""`iep-eval`: table, report and predictions agree with each other and with the networks."""

import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluate_cases import evaluate, iep_eval
from tiny_data import (
    EXAMPLES,
    TEST,
    VAL,
    VOCAB,
    arrays,
    assert_one_error,
    features,
    write_h5,
)

from iep.batching.schedulers import SCHEDULERS
from iep.models.build import load_network
from iep.programs import QUESTION_TYPES
from iep.vocab import tokenize

CPU = torch.device("cpu")


def shares(rows: list[dict[str, Any]], right: Any) -> dict[str, Any]:
    """The scores of a report, counted from predictions."""
    by_type = defaultdict(list)
    for row in rows:
        by_type[row["type"]].append(bool(right(row)))
    return {
        "overall": pytest.approx(np.mean([right(row) for row in rows])),
        "by_type": {name: pytest.approx(np.mean(values)) for name, values in by_type.items()},
    }


def cells(output: str, label: str) -> list[str]:
    """The cells of one row of the printed table."""
    row = next(line for line in output.splitlines() if line.strip().startswith(label))
    return row.strip().removeprefix(label).split()


def answers_right(row: dict[str, Any]) -> bool:
    return row["answer"] == row["predicted_answer"]


def program_right(row: dict[str, Any]) -> bool:
    return row["program"] == row["predicted_program"]


# What can be evaluated


def test_a_generator_alone_is_scored_by_exact_match(data: Path, run: dict[str, Path], tmp_path: Path):
    report, rows, output = evaluate(tmp_path, "--pg", run["pg"], "--data", data)
    assert report["accuracy"] is None
    assert report["program_exact_match"] == shares(rows, program_right)
    assert 0 < report["program_exact_match"]["overall"] < 1
    assert report["programs"] == "predicted"
    assert report["checkpoints"] == {"pg": str(run["pg"])}
    assert cells(output, "programs exact")[-1] == f"{100 * report['program_exact_match']['overall']:.1f}"
    assert not any("predicted_answer" in row for row in rows)


def test_an_engine_alone_runs_the_true_programs(data: Path, run: dict[str, Path], tmp_path: Path):
    report, rows, _ = evaluate(tmp_path, "--ee", run["ee"], "--data", data)
    assert report["program_exact_match"] is None
    assert report["programs"] == "ground-truth"
    assert report["accuracy"] == shares(rows, answers_right)
    engine = load_network(run["ee"], "engine", VOCAB, CPU)
    val = arrays(VAL)
    maps = torch.from_numpy(features(1)[val["image_idxs"]])
    logits = engine.reference(maps, torch.from_numpy(val["programs"]).long())
    probabilities, answers = logits.softmax(1).max(1)
    assert [row["predicted_answer"] for row in rows] == [VOCAB.answer[answer] for answer in answers]
    assert [row["probability"] for row in rows] == pytest.approx(probabilities.tolist(), abs=1e-4)
    for row, shares_A in zip(rows, logits.softmax(1).tolist(), strict=True):
        ranked = sorted(zip(VOCAB.answer, shares_A, strict=True), key=lambda pair: -pair[1])
        assert row["runners_up"] == pytest.approx(dict(ranked[1:3]), abs=1e-4)


def test_an_engine_runs_the_programs_that_its_generator_predicts(data: Path, run: dict[str, Path], tmp_path: Path):
    report, rows, _ = evaluate(tmp_path, "--pg", run["pg"], "--ee", run["ee"], "--data", data)
    assert report["programs"] == "predicted"
    assert report["accuracy"] == shares(rows, answers_right)
    assert report["program_exact_match"] == shares(rows, program_right)
    engine = load_network(run["ee"], "engine", VOCAB, CPU)
    programs = [[1, *(VOCAB.program_index[token] for token in row["predicted_program"]), 2] for row in rows]
    for row, program in zip(rows, programs, strict=True):
        maps = torch.from_numpy(features(1)[[row["image_index"]]])
        answer = engine.reference(maps, torch.tensor([program])).argmax(1).item()
        assert row["predicted_answer"] == VOCAB.answer[answer]


def test_true_programs_beside_a_generator_still_score_its_programs(data: Path, run: dict[str, Path], tmp_path: Path):
    both = ["--pg", run["pg"], "--ee", run["ee"], "--data", data]
    truth, rows, _ = evaluate(tmp_path / "truth", *both, "--programs", "ground-truth")
    alone, alone_rows, _ = evaluate(tmp_path / "alone", "--ee", run["ee"], "--data", data)
    predicted, _, _ = evaluate(tmp_path / "predicted", *both)
    assert truth["programs"] == "ground-truth"
    assert truth["accuracy"] == alone["accuracy"] != predicted["accuracy"]
    assert [row["probability"] for row in rows] == [row["probability"] for row in alone_rows]
    assert truth["program_exact_match"] == predicted["program_exact_match"] == shares(rows, program_right)


def test_beam_search_finds_programs_no_less_likely_than_greedy_ones(data: Path, run: dict[str, Path], tmp_path: Path):
    greedy, greedy_rows, _ = evaluate(tmp_path / "1", "--pg", run["pg"], "--data", data)
    beam, rows, _ = evaluate(tmp_path / "4", "--pg", run["pg"], "--data", data, "--beam-size", 4)
    assert beam["programs"] == "predicted, beam 4"
    assert greedy["programs"] == "predicted"
    generator = load_network(run["pg"], "generator", VOCAB, CPU)

    def log_probability(row: dict[str, Any]) -> float:
        question = torch.tensor([[1, *(VOCAB.question_index[word] for word in question_words(row)), 2]])
        program = torch.tensor([[1, *(VOCAB.program_index[token] for token in row["predicted_program"]), 2]])
        return -generator.loss(question, program).item() * (program.shape[1] - 1)

    changed = [n for n in range(VAL) if rows[n]["predicted_program"] != greedy_rows[n]["predicted_program"]]
    assert changed
    for n in changed:
        assert log_probability(rows[n]) >= log_probability(greedy_rows[n]) - 1e-4
    assert shares(rows, program_right) == beam["program_exact_match"]


def question_words(row: dict[str, Any]) -> list[str]:
    return tokenize(row["question"])


def test_a_joint_checkpoint_serves_as_generator_and_as_engine(data: Path, run: dict[str, Path], tmp_path: Path):
    report, rows, _ = evaluate(tmp_path, "--pg", run["joint"], "--ee", run["joint"].parent, "--data", data)
    assert report["accuracy"] == shares(rows, answers_right)
    assert report["program_exact_match"] == shares(rows, program_right)
    assert report["checkpoints"] == {"pg": str(run["joint"]), "ee": str(run["joint"].parent)}


def test_the_lstm_answers_from_the_question_alone(data: Path, run: dict[str, Path], tmp_path: Path):
    blind = shutil.copytree(data, tmp_path / "data")
    (blind / "val_features.h5").unlink()
    report, rows, _ = evaluate(tmp_path / "out", "--baseline", run["lstm"], "--data", blind)
    assert report["accuracy"] == shares(rows, answers_right)
    assert report["programs"] == ""
    lstm = load_network(run["lstm"], "lstm", VOCAB, CPU)
    answers = lstm(torch.from_numpy(arrays(VAL)["questions"]).long()).argmax(1)
    assert [row["predicted_answer"] for row in rows] == [VOCAB.answer[answer] for answer in answers]


# What it leaves


@pytest.fixture(scope="module")
def whole(data: Path, run: dict[str, Path], tmp_path_factory: pytest.TempPathFactory):
    """Report, predictions and output of generator and engine on the val split."""
    return evaluate(tmp_path_factory.mktemp("whole"), "--pg", run["pg"], "--ee", run["ee"], "--data", data)


def test_the_report_adds_up(whole):
    report, rows, _ = whole
    counts = report["questions_by_type"]
    assert counts == Counter(row["type"] for row in rows) == dict.fromkeys(QUESTION_TYPES, 2)
    assert report["questions"] == sum(counts.values()) == len(rows) == VAL
    for scores in (report["accuracy"], report["program_exact_match"], report["baselines"]["commonest"]):
        weighted = sum(counts[name] * share for name, share in scores["by_type"].items()) / VAL
        assert scores["overall"] == pytest.approx(weighted)
    assert report["questions_per_second"] > 0
    assert (report["split"], report["device"]) == ("val", "cpu")


def test_the_predictions_hold_the_questions_as_they_were_written(whole):
    _, rows, _ = whole
    written = arrays(VAL)
    for n, row in enumerate(rows):
        words, program, answer = EXAMPLES[n]
        assert row["question_index"] == written["orig_idxs"][n]
        assert row["image_index"] == written["image_idxs"][n]
        assert row["family"] == written["question_families"][n]
        assert tokenize(row["question"]) == words
        assert row["program"] == program
        assert row["answer"] == answer
        assert row["correct"] == answers_right(row)
        assert 0 < row["probability"] <= 1
    assert {row["correct"] for row in rows} == {True, False}


def test_the_commonest_answers_are_counted_on_the_train_split(whole):
    report, rows, _ = whole
    types = [row["type"] for row in rows[: len(QUESTION_TYPES)]]
    answers = defaultdict(list)
    for n, (_, _, answer) in enumerate(EXAMPLES):
        answers[types[n % len(types)]].append(answer)
    # Of equally common answers the first in the vocabulary, which is sorted.
    commonest = {name: max(sorted(set(given)), key=given.count) for name, given in answers.items()}
    assert report["baselines"]["commonest"] == shares(rows, lambda row: row["answer"] == commonest[row["type"]])


def test_the_table_shows_the_report_in_percent(whole):
    report, _, output = whole
    counts, commonest, model = cells(output, "overall")
    assert counts == str(VAL)
    assert commonest == f"{100 * report['baselines']['commonest']['overall']:.1f}"
    assert model == f"{100 * report['accuracy']['overall']:.1f}"
    assert cells(output, "exist")[-1] == f"{100 * report['accuracy']['by_type']['exist']:.1f}"


def test_nothing_is_written_without_a_directory_to_write_to(data, run, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = iep_eval("--baseline", run["lstm"], "--data", data)
    assert result.exit_code == 0
    assert "overall" in result.stdout
    assert "Wrote" not in result.stdout
    assert not list(tmp_path.iterdir())


def test_earlier_reports_stand_beside_the_new_one(data: Path, run: dict[str, Path], tmp_path: Path):
    lstm, _, _ = evaluate(tmp_path / "lstm", "--baseline", run["lstm"], "--data", data)
    against = ["--against", "LSTM", tmp_path / "lstm", "--against", "again", tmp_path / "lstm" / "report.json"]
    report, _, output = evaluate(tmp_path / "ee", "--ee", run["ee"], "--data", data, *against, "--name", "IEP")
    assert output.splitlines()[0].split() == ["questions", "commonest", "LSTM", "again", "IEP"]
    earlier, again, new = cells(output, "overall")[2:]
    assert earlier == again == f"{100 * lstm['accuracy']['overall']:.1f}"
    assert new == f"{100 * report['accuracy']['overall']:.1f}"


def test_only_the_samples_asked_for_are_evaluated(data: Path, run: dict[str, Path], tmp_path: Path, whole):
    report, rows, _ = evaluate(tmp_path, "--pg", run["pg"], "--ee", run["ee"], "--data", data, "--num-samples", 5)
    assert report["questions"] == 5
    assert [row["predicted_answer"] for row in rows] == [row["predicted_answer"] for row in whole[1][:5]]


@pytest.mark.parametrize(
    "options",
    [
        *(["--batching", name] for name in SCHEDULERS),
        ["--batch-size", "7"],
        ["--workers", "1"],
        ["--no-sharing"],
        ["--batch-size", "7", "--order-by-image"],
    ],
)
@pytest.mark.parametrize("programs", ["predicted", "ground-truth"])
def test_how_the_work_is_done_changes_no_prediction(data, run, tmp_path: Path, options: list[str], programs: str):
    arguments = ["--pg", run["pg"], "--ee", run["ee"], "--data", data, "--programs", programs]
    _, expected, _ = evaluate(tmp_path / "expected", *arguments)
    _, rows, _ = evaluate(tmp_path / "rows", *arguments, *options)
    for ours, theirs in zip(rows, expected, strict=True):
        probability = {"probability": pytest.approx(theirs["probability"], abs=1e-4)}
        assert ours == theirs | probability | {"runners_up": pytest.approx(theirs["runners_up"], abs=1e-4)}


def test_bfloat16_changes_probabilities_by_no_more_than_its_rounding(data, run, tmp_path: Path):
    arguments = ["--pg", run["pg"], "--ee", run["ee"], "--data", data, "--programs", "ground-truth"]
    report, expected, _ = evaluate(tmp_path / "expected", *arguments)
    _, rows, _ = evaluate(tmp_path / "rows", *arguments, "--precision", "bfloat16")
    differences = [abs(our["probability"] - their["probability"]) for our, their in zip(rows, expected, strict=True)]
    assert 0 < max(differences) < 0.05
    assert report["peak_memory_gb"] > 0.01, "the process holds at least PyTorch"


# Splits that lack something


def test_a_split_without_answers_gets_predictions_and_the_table_says_so(data, run, tmp_path: Path):
    arguments = ["--pg", run["pg"], "--ee", run["ee"], "--data", data, "--split", "test"]
    report, rows, output = evaluate(tmp_path, *arguments)
    assert (report["accuracy"], report["program_exact_match"], report["baselines"]) == (None, None, {})
    assert len(rows) == report["questions"] == TEST
    assert all("predicted_answer" in row and "answer" not in row and "correct" not in row for row in rows)
    assert "The test split has no answers: accuracies are unknown." in output
    assert str(tmp_path / "answers.txt") in output.partition("Wrote ")[2]
    assert cells(output, "overall") == [str(TEST), "-"]


def test_a_split_without_programs_is_answered_with_predicted_ones(data, run, tmp_path: Path):
    other = Path(shutil.copytree(data, tmp_path / "data"))
    datasets = arrays(VAL)
    del datasets["programs"]
    path = write_h5(other / "val_questions.h5", datasets)
    result = iep_eval("--ee", run["ee"], "--data", other)
    assert_one_error(result, f"{path}: has no programs; evaluate with --pg CKPT and --programs predicted")
    result = iep_eval("--ee", run["ee"], "--pg", run["pg"], "--programs", "ground-truth", "--data", other)
    assert_one_error(result, f"{path}: has no programs")
    report, rows, _ = evaluate(tmp_path / "out", "--pg", run["pg"], "--ee", run["ee"], "--data", other)
    assert report["program_exact_match"] is None
    assert report["accuracy"]["overall"] == pytest.approx(np.mean([row["correct"] for row in rows]))
    result = iep_eval("--pg", run["pg"], "--data", other)
    assert "The val split has no programs: their exact match is unknown." in result.stdout


def test_a_split_with_features_alone_lacking_is_enough_for_the_generator(data, run, tmp_path: Path):
    blind = Path(shutil.copytree(data, tmp_path / "data"))
    (blind / "val_features.h5").unlink()
    assert iep_eval("--pg", run["pg"], "--data", blind).exit_code == 0
    assert_one_error(iep_eval("--ee", run["ee"], "--data", blind), f"{blind / 'val_features.h5'}: no such file")


# Help


def test_help_needs_no_torch_and_names_every_option():
    code = (
        "import sys; from iep.cli.evaluate import main; main(['--help'], standalone_mode=False);"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for option in ("--pg", "--ee", "--baseline", "--split", "--against", "--beam-size", "--num-samples"):
        assert option in done.stdout
