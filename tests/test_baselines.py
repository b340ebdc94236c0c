"""The baselines that never look at the image."""

import numpy as np
import pytest
import torch
from test_program_generator import QUESTIONS, gradients, naive_lstm_step, pad_rows
from torch.nn.functional import pad

from iep.baselines.commonest import count_commonest, predict
from iep.baselines.lstm import LSTMBaseline


def make_lstm(**kwargs: object) -> LSTMBaseline:
    torch.manual_seed(0)
    return LSTMBaseline(9, 4, embedding_dim=5, hidden_dim=6, **kwargs).double()


def naive_answer_logits(model: LSTMBaseline, question: list[int]) -> torch.Tensor:
    state = [(torch.zeros(6).double(), torch.zeros(6).double())] * 2
    for token in question:
        state = naive_lstm_step(model.rnn, model.embed.weight[token], state)
    hidden = (model.classifier[0].weight @ state[-1][0] + model.classifier[0].bias).relu()
    return model.classifier[2].weight @ hidden + model.classifier[2].bias


def test_lstm_logits_and_every_gradient_match_its_equations_one_question_at_a_time():
    model = make_lstm(classifier_dims=(7,))
    logits = model(pad_rows(QUESTIONS))
    naive = torch.stack([naive_answer_logits(model, question) for question in QUESTIONS])
    torch.testing.assert_close(logits, naive)
    torch.testing.assert_close(gradients(model, logits.square().mean()), gradients(model, naive.square().mean()))


def test_lstm_answers_do_not_depend_on_padding():
    model, questions = make_lstm(), pad_rows(QUESTIONS)
    torch.testing.assert_close(model(pad(questions, (0, 12))), model(questions))


def test_lstm_has_the_paper_s_sizes_unless_told_otherwise():
    shapes = [tuple(parameter.shape) for parameter in LSTMBaseline(93, 32).classifier.parameters()]
    assert shapes == [(1024, 256), (1024,), (32, 1024), (32,)]
    assert [tuple(p.shape) for p in make_lstm(classifier_dims=()).classifier.parameters()] == [(4, 6), (4,)]


def test_commonest_answer_is_counted_for_each_type_by_itself():
    types = np.array([0, 0, 0, 1, 1, 1, 1])
    answers = np.array([4, 5, 5, 7, 7, 4, 4])
    commonest = count_commonest(answers, types, num_types=2)
    assert commonest.tolist() == [5, 4, 4]  # of 4 and 7, equally common, the smaller
    assert predict(commonest, np.array([1, 0, 0])).tolist() == [4, 5, 5]


def test_commonest_answer_of_all_serves_types_without_questions_and_unknown_types():
    types = np.array([0, 2, 2, 2, -1, -1, -1])
    answers = np.array([4, 6, 6, 6, 9, 9, 6])
    commonest = count_commonest(answers, types, num_types=3)
    assert predict(commonest, np.array([0, 1, 2, -1])).tolist() == [4, 6, 6, 6]  # 6 four times, 9 twice


def test_commonest_matches_a_count_by_hand_on_many_questions():
    rng = np.random.default_rng(0)
    types, answers = rng.integers(0, 5, 2000), rng.integers(3, 12, 2000)
    commonest = count_commonest(answers, types, num_types=5)
    for kind in range(5):
        of_kind = answers[types == kind].tolist()
        assert of_kind.count(commonest[kind]) == max(of_kind.count(answer) for answer in range(12))


@pytest.mark.parametrize(("answers", "types"), [([], []), ([4, 5], [0])])
def test_no_questions_or_unequal_numbers_are_refused(answers, types):
    with pytest.raises(ValueError, match=f"{len(answers)} answers and {len(types)} types"):
        count_commonest(np.array(answers, dtype=int), np.array(types, dtype=int), num_types=2)
