"""Bits flipped anywhere in preprocessed files: an error that names the file, or the values that were written."""

from itertools import islice
from pathlib import Path

import h5py
import numpy as np
import pytest
from clevr_files import write_clevr
from click.testing import CliRunner
from tiny_data import assert_one_error

from iep.cli.preprocess import main
from iep.data.datasets import ClevrDataset, sequential_batches
from iep.data.features import Features
from iep.data.loader import Loading
from iep.data.question_file import Questions, read_questions
from iep.errors import InputError
from iep.vocab import Vocab


def preprocess(clevr: Path, out: Path, *more: str):
    flags = ("--backbone", "patches", "--patch-size", "1", "--dtype", "float16", "--workers", "0", "--device", "cpu")
    return CliRunner().invoke(main, [str(clevr), "--out", str(out), "--split", "train", *flags, *more])


@pytest.fixture
def clevr(tmp_path: Path) -> Path:
    return write_clevr(tmp_path / "CLEVR", images=4)


@pytest.fixture
def out(clevr: Path, tmp_path: Path) -> Path:
    result = preprocess(clevr, tmp_path / "data")
    assert result.exit_code == 0, result.output
    return tmp_path / "data"


def flip(content: bytes, bits: np.ndarray) -> bytes:
    damaged = bytearray(content)
    for bit in bits.tolist():
        damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def values_of(path: Path, vocab: Vocab) -> list[np.ndarray | None]:
    if path.name.endswith("_features.h5"):
        features = Features(path)
        return [features.read(np.arange(len(features))).numpy()]
    questions: Questions = read_questions(path, vocab)
    return [getattr(questions, name) for name in ("questions", "image_idxs", "orig_idxs", "programs", "answers")]


@pytest.mark.parametrize("name", ["train_questions.h5", "train_features.h5"])
@pytest.mark.parametrize("flips", [1, 3])
def test_flipped_bits_are_named_or_harm_nothing(out: Path, name: str, flips: int):
    path, vocab = out / name, Vocab.load(out / "vocab.json")
    content, written = path.read_bytes(), values_of(path, vocab)
    random = np.random.default_rng(flips)
    messages = []
    for _ in range(250):
        path.write_bytes(flip(content, random.integers(0, 8 * len(content), flips)))
        try:
            read = values_of(path, vocab)
        except InputError as error:
            messages.append(str(error))
        else:
            for ours, theirs in zip(read, written, strict=True):
                np.testing.assert_array_equal(ours, theirs)
    assert len(messages) > 50
    assert all(message.startswith(f"{path}: ") and "\n" not in message for message in messages)


def test_a_flipped_bit_in_the_structure_of_a_file_is_named_or_harms_nothing(out: Path):
    path, vocab = out / "train_features.h5", Vocab.load(out / "vocab.json")
    content, written = path.read_bytes(), values_of(path, vocab)
    end = content.index(written[0][0].tobytes())
    for bit in range(0, 8 * end, 7):
        path.write_bytes(flip(content, np.array([bit])))
        try:
            (read,) = values_of(path, vocab)
        except InputError as error:
            message = str(error)
            assert message.startswith(f"{path}: ")
        else:
            np.testing.assert_array_equal(read, written[0])


def test_a_damaged_row_is_named_and_the_others_are_still_read(out: Path):
    path = out / "train_features.h5"
    written = Features(path).read(np.arange(4))
    content = path.read_bytes()
    place = content.index(written[2].numpy().tobytes())
    path.write_bytes(flip(content, np.array([8 * place + 77])))
    np.testing.assert_array_equal(Features(path).read(np.array([3, 1])), written[[3, 1]])
    with pytest.raises(InputError, match="row 2 is damaged, its checksum differs; iep-preprocess --verify --overwrite"):
        Features(path).read(np.array([1, 2]))


@pytest.mark.parametrize("name", ["train_questions.h5", "train_features.h5"])
def test_verify_finds_damage_in_a_finished_file_and_overwrite_makes_it_anew(clevr: Path, out: Path, name: str):
    assert "already done" in preprocess(clevr, out, "--verify").output
    path = out / name
    sound = path.read_bytes()
    with h5py.File(path) as file:
        place = file[name.removeprefix("train_").removesuffix(".h5")].id.get_offset()
    path.write_bytes(flip(sound, np.array([8 * place + 77])))
    damaged = path.read_bytes()
    assert "already done" in preprocess(clevr, out).output
    assert_one_error(preprocess(clevr, out, "--verify"), str(path), "damaged")
    assert path.read_bytes() == damaged
    result = preprocess(clevr, out, "--verify", "--overwrite")
    assert result.exit_code == 0, result.output
    assert path.read_bytes() == sound


def test_a_row_is_checked_once_by_all_processes_that_share_its_features(out: Path):
    path = out / "train_features.h5"
    features, questions = Features(path), read_questions(out / "train_questions.h5", Vocab.load(out / "vocab.json"))
    values = features.read(np.array([2]))
    content = path.read_bytes()
    begin = content.index(values.numpy().tobytes())
    path.write_bytes(flip(content, 8 * begin + np.array([77, 77 + 8 * features.row_bytes])))  # rows 2 and 3
    batches = iter(sequential_batches(ClevrDataset(questions, features), 2, Loading(workers=1)))
    assert [batch.image_rows.tolist() for batch in islice(batches, 3)] == [[0, 0]] * 3  # of images 0, 1 and 2
    with pytest.raises(InputError, match="row 3 is damaged"):
        next(batches)
