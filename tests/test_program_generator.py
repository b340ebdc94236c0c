"""The generator's network against an LSTM written out by hand, one question and one token at a time."""

import re

import pytest
import torch
from device_cases import DEVICES
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils.rnn import pad_sequence

from iep.models.build import build
from iep.program_generator.seq2seq import Seq2Seq
from iep.vocab import END, NULL, START

LayerStates = list[tuple[Tensor, Tensor]]  # (hidden, cell) of every layer


def make_model(seed: int = 0, **kwargs: int) -> Seq2Seq:
    """A small generator in float64 with weights large enough to tell questions apart."""
    torch.manual_seed(seed)
    sizes = {"num_question_tokens": 9, "num_program_tokens": 8, "embedding_dim": 5, "hidden_dim": 6}
    model = build("generator", sizes | kwargs).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


def pad_rows(rows: list[list[int]]) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=NULL)


def random_rows(count: int, num_tokens: int, longest: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest - 1, (count,), generator=generator).tolist()
    return [[START, *torch.randint(3, num_tokens, (n,), generator=generator).tolist(), END] for n in lengths]


def naive_lstm_step(rnn: nn.LSTM, x: Tensor, state: LayerStates) -> LayerStates:
    """One step of a stacked LSTM on vectors, from its equations."""
    new_state = []
    for layer, (hidden, cell) in enumerate(state):
        weight_ih, weight_hh, bias_ih, bias_hh = (
            getattr(rnn, f"{name}_l{layer}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        gates = weight_ih @ x + bias_ih + weight_hh @ hidden + bias_hh
        update, forget, candidate, output = gates.chunk(4)
        cell = forget.sigmoid() * cell + update.sigmoid() * candidate.tanh()
        x = output.sigmoid() * cell.tanh()
        new_state.append((x, cell))
    return new_state


def zero_state(model: Seq2Seq) -> LayerStates:
    zeros = model.decoder_linear.weight.new_zeros(model.encoder_rnn.hidden_size)
    return [(zeros, zeros)] * model.encoder_rnn.num_layers


def naive_encoding(model: Seq2Seq, question: list[int]) -> Tensor:
    state = zero_state(model)
    for token in question:
        state = naive_lstm_step(model.encoder_rnn, model.encoder_embed.weight[token], state)
    return state[-1][0]


def naive_logits(model: Seq2Seq, question: list[int], program: list[int]) -> Tensor:
    """(len(program), V) logits of the token after each program token."""
    encoding, state, logits = naive_encoding(model, question), zero_state(model), []
    for token in program:
        x = torch.cat([encoding, model.decoder_embed.weight[token]])
        state = naive_lstm_step(model.decoder_rnn, x, state)
        logits.append(model.decoder_linear.weight @ state[-1][0] + model.decoder_linear.bias)
    return torch.stack(logits)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


QUESTIONS = random_rows(7, 9, 9, seed=1)
PROGRAMS = random_rows(7, 8, 8, seed=2)


@pytest.mark.parametrize("device", DEVICES)
def test_loss_and_every_gradient_match_lstm_equations(device):
    model = make_model().to(device)
    losses = [
        cross_entropy(
            naive_logits(model, question, program[:-1]),
            torch.tensor(program[1:], device=device),
            reduction="sum",
        )
        for question, program in zip(QUESTIONS, PROGRAMS, strict=True)
    ]
    expected = torch.stack(losses).sum() / sum(len(program) - 1 for program in PROGRAMS)
    loss = model.loss(pad_rows(QUESTIONS).to(device), pad_rows(PROGRAMS).to(device))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(model, loss), gradients(model, expected))


def test_neither_more_padding_nor_other_questions_change_anything():
    model = make_model()
    questions, programs = pad_rows(QUESTIONS), pad_rows(PROGRAMS)
    wider_questions, wider_programs = pad(questions, (0, 11)), pad(programs, (0, 6))
    torch.testing.assert_close(model.encode(wider_questions), model.encode(questions))
    torch.testing.assert_close(model.loss(wider_questions, wider_programs), model.loss(questions, programs))
    with_an_empty_one = pad_rows([*QUESTIONS, [NULL]])
    alone = torch.stack([model.encode(torch.tensor([row]))[0] for row in [*QUESTIONS, [NULL]]])
    torch.testing.assert_close(model.encode(with_an_empty_one), alone)
    assert model.encode(questions[:0]).shape == (0, 6)


def test_dropout_does_nothing_in_one_layer_and_torch_does_not_warn_of_it(recwarn: pytest.WarningsRecorder):
    models = [make_model(num_layers=1, dropout=dropout).train() for dropout in (0.0, 0.5)]
    assert torch.equal(*(model(pad_rows(QUESTIONS), pad_rows(PROGRAMS)) for model in models))
    assert not recwarn.list


def test_teacher_forcing_calls_each_lstm_once():
    model, calls = make_model(), []
    for name in ("encoder_rnn", "decoder_rnn"):
        getattr(model, name).register_forward_hook(lambda *_, name=name: calls.append(name))
    model.loss(pad_rows(QUESTIONS), pad_rows(PROGRAMS))
    assert calls == ["encoder_rnn", "decoder_rnn"]


@pytest.mark.parametrize("shape", [(4,), (2, 0), (2, 3, 4)])
def test_tokens_that_are_no_matrix_are_refused_with_their_shape(shape):
    with pytest.raises(ValueError, match=rf"{re.escape(str(shape))}.*expected \(examples, tokens\)"):
        make_model().encode(torch.zeros(shape, dtype=torch.long))
