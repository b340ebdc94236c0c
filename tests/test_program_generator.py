"""The generator's network against single questions without padding, and decoding of whole minibatches against loops
over single questions and against all programs there are."""

from copy import deepcopy
from functools import cache
from itertools import product

import pytest
import torch
from device_cases import DEVICES
from sequence_cases import QUESTIONS, gradients, pad_rows, random_rows
from tiny_data import build
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from iep.program_generator.decode import beam, greedy, sample
from iep.program_generator.seq2seq import Seq2Seq
from iep.vocab import END, NULL, START


def make_model(seed: int = 0, **kwargs: int) -> Seq2Seq:
    """A small generator in float64 with weights large enough to tell questions apart."""
    torch.manual_seed(seed)
    sizes = {"num_question_tokens": 9, "num_program_tokens": 8, "embedding_dim": 5, "hidden_dim": 6}
    model = build("generator", sizes | kwargs).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


def naive_logits(model: Seq2Seq, question: list[int], program: list[int]) -> Tensor:
    """(len(program), V) logits of the token after each program token, of one question without padding."""
    encoding_H = model.encoder_rnn(model.encoder_embed.weight[question])[0][-1]
    words_LE = model.decoder_embed.weight[program]
    states_LH, _ = model.decoder_rnn(torch.cat([encoding_H.expand(len(program), -1), words_LE], dim=1))
    return model.decoder_linear(states_LH)


PROGRAMS = random_rows(7, 8, 8, seed=2)


@pytest.mark.parametrize("device", DEVICES)
def test_loss_and_every_gradient_are_those_of_single_questions(device):
    model = make_model().to(device)
    pairs = zip(QUESTIONS, PROGRAMS, strict=True)
    logits = torch.cat([naive_logits(model, question, program[:-1]) for question, program in pairs])
    expected = cross_entropy(logits, torch.tensor([token for row in PROGRAMS for token in row[1:]], device=device))
    loss = model.loss(pad_rows(QUESTIONS).to(device), pad_rows(PROGRAMS).to(device))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(model, loss), gradients(model, expected))


def test_neither_more_padding_nor_other_questions_change_anything():
    model = make_model()
    questions, programs = pad_rows(QUESTIONS), pad_rows(PROGRAMS)
    wider_questions, wider_programs = pad(questions, (0, 11)), pad(programs, (0, 6))
    torch.testing.assert_close(model.encode(wider_questions), model.encode(questions))
    torch.testing.assert_close(model.loss(wider_questions, wider_programs), model.loss(questions, programs))
    with_an_empty_one = [*QUESTIONS, [NULL]]
    alone = torch.stack([model.encode(torch.tensor([row]))[0] for row in with_an_empty_one])
    torch.testing.assert_close(model.encode(pad_rows(with_an_empty_one)), alone)


# Decoding

NUM_TOKENS = 6  # the special tokens and two more
LETTERS = (3, 4, 5)  # tokens other than <END> that a program may hold


@cache
def trained_decoder(seed: int) -> Seq2Seq:
    """A generator trained just long enough to give different questions different programs, without certainty."""
    model = make_model(seed, num_program_tokens=NUM_TOKENS)
    programs = pad_rows(random_rows(len(QUESTIONS), NUM_TOKENS, 7, seed=seed + 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        model.loss(pad_rows(QUESTIONS), programs).backward()
        optimizer.step()
    return model


def make_decoder(seed: int = 0, end_bias: float = 0.0, special_bias: float = 0.0) -> Seq2Seq:
    """A trained generator that is more likely to end its programs, and to give `<NULL>` and `<START>`."""
    model = deepcopy(trained_decoder(seed))
    with torch.no_grad():
        model.decoder_linear.bias[END] += end_bias
        model.decoder_linear.bias[[NULL, START]] += special_bias
    return model


def unpadded(programs_BL: Tensor) -> list[list[int]]:
    return [[token for token in row if token != NULL] for row in programs_BL.tolist()]


def naive_greedy(model: Seq2Seq, question: list[int], max_length: int) -> list[int]:
    program = [START]
    while len(program) < max_length and program[-1] != END:
        program.append(int(naive_logits(model, question, program)[-1].argmax()))
    return program


def naive_log_prob(model: Seq2Seq, question: list[int], program: list[int], temperature: float = 1.0) -> Tensor:
    """Log probability of a program's tokens after `<START>`, where none can be `<NULL>` or `<START>`."""
    logits = naive_logits(model, question, program[:-1])[:, 2:] / temperature
    return sum(row.log_softmax(0)[token - 2] for row, token in zip(logits, program[1:], strict=True))


def all_programs(max_length: int) -> list[list[int]]:
    """Every program that decoding can give: ended, or cut off at `max_length`."""
    steps = max_length - 1
    ended = [[START, *body, END] for n in range(steps) for body in product(LETTERS, repeat=n)]
    return ended + [[START, *body] for body in product(LETTERS, repeat=steps)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(2))
def test_greedy_matches_a_loop_over_single_questions(seed, device):
    model = make_decoder(seed, special_bias=-1e4).to(device)
    programs = greedy(model, pad_rows(QUESTIONS).to(device), max_length=7)
    expected = [naive_greedy(model, question, 7) for question in QUESTIONS]
    assert unpadded(programs) == expected
    assert len({tuple(program) for program in expected}) > 2, "the case should hold different programs"


DECODERS = {
    "greedy": lambda *arguments: greedy(*arguments),
    "sample": lambda *arguments: sample(*arguments)[0],
    "beam": lambda model, questions, most: beam(model, questions, 3, most)[0],
}


@pytest.mark.parametrize("name", DECODERS)
def test_programs_end_with_end_and_nulls_and_are_cut_off_at_max_length_but_by_beam_search(name):
    questions, decode = pad_rows(QUESTIONS), DECODERS[name]
    for most in (2, 30):
        assert decode(make_decoder(end_bias=1e4), questions, most).tolist() == [[START, END]] * 7
    torch.manual_seed(0)
    programs = decode(make_decoder(special_bias=-1e4), questions.repeat(40, 1), 9)
    after_end = (programs == END).cumsum(1) - (programs == END).long() > 0
    assert (programs[:, 0] == START).all()
    assert ((programs == NULL) == after_end).all()
    assert (programs[:, -1] != NULL).any(), "programs are as wide as the longest"
    programs = decode(make_decoder(0, -1e3, -1e4), questions, 5)
    assert programs.shape == (7, 5)
    assert (programs == END).sum(1).tolist() == [int(name == "beam")] * 7


def naive_beam(model: Seq2Seq, question: list[int], beam_size: int, max_length: int) -> tuple[list[int], float]:
    hypotheses, ended = [([START], 0.0)], []
    for step in range(1, max_length):
        tokens = [END] if step == max_length - 1 else [END, *LETTERS]
        grown = [[*program, token] for program, _ in hypotheses for token in tokens]
        scored = [(program, naive_log_prob(model, question, program).item()) for program in grown]
        kept = sorted(scored, key=lambda pair: -pair[1])[:beam_size]
        ended += [pair for pair in kept if pair[0][-1] == END]
        hypotheses = [pair for pair in kept if pair[0][-1] != END]
    return max(ended, key=lambda pair: pair[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("beam_size", "max_length"), [(1, 7), (3, 7), (NUM_TOKENS**2, 4)])
@pytest.mark.parametrize(("seed", "end_bias", "special_bias"), [(1, 0.0, 0.0), (4, -4.0, 50.0)])
def test_beam_matches_a_beam_of_lists_for_each_question_by_itself(
    beam_size, max_length, seed, end_bias, special_bias, device
):
    """The widest beam holds every prefix, so that it finds the likeliest program of all."""
    model = make_decoder(seed, end_bias, special_bias).to(device)
    with torch.no_grad():
        programs, scores = beam(model, pad_rows(QUESTIONS).to(device), beam_size, max_length)
        naive = [naive_beam(model, question, beam_size, max_length) for question in QUESTIONS]
    assert unpadded(programs) == [program for program, _ in naive]
    assert scores.tolist() == pytest.approx([score for _, score in naive])


def test_sampled_programs_occur_as_often_as_their_probabilities_say():
    model, draws = make_decoder(2, end_bias=1.0, special_bias=5.0), 6_000  # sampling must leave out likely tokens
    for temperature in (1.0, 3.0):
        torch.manual_seed(5)
        drawn = unpadded(sample(model, torch.tensor([QUESTIONS[0]]).expand(draws, -1), 4, temperature)[0])
        possible = all_programs(4)
        assert all(program in possible for program in drawn)
        probs = torch.stack([naive_log_prob(model, QUESTIONS[0], p, temperature) for p in possible]).exp().detach()
        assert probs.sum().item() == pytest.approx(1.0)
        counts = torch.tensor([drawn.count(program) for program in possible])
        deviations = (counts - draws * probs).abs() / (draws * probs).sqrt()
        assert (deviations[draws * probs >= 5] < 4).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampled_log_probs_and_reinforce_gradients_match_a_naive_loop(temperature, device):
    model = make_decoder(4, end_bias=1.0).to(device)
    torch.manual_seed(0)
    questions = pad_rows(QUESTIONS).to(device)
    programs, log_probs = sample(model, questions, 6, temperature)
    lengths = {len(program) for program in unpadded(programs)}
    assert len(lengths) > 1, "the case should hold programs of different lengths"
    rows = zip(QUESTIONS, unpadded(programs), strict=True)
    naive = torch.stack([naive_log_prob(model, question, program, temperature) for question, program in rows])
    torch.testing.assert_close(log_probs, naive)
    advantages = torch.linspace(-1, 1, len(QUESTIONS), dtype=torch.float64, device=device)
    surrogate, naive_surrogate = (-(advantages * values).mean() for values in (log_probs, naive))
    torch.testing.assert_close(gradients(model, surrogate), gradients(model, naive_surrogate))


def test_under_autocast_programs_losses_and_gradients_are_those_of_float32():
    model, questions = make_decoder(end_bias=1.0).float(), pad_rows(QUESTIONS)

    def computed():
        torch.manual_seed(0)
        drawn, log_probs = sample(model, questions, 6)
        loss = model.loss(questions, drawn) - log_probs.sum()
        return drawn, loss, greedy(model, questions, 6), *beam(model, questions, 3, 6)

    expected = computed()
    with torch.autocast("cpu", torch.bfloat16):
        found = computed()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(gradients(model, found[1]), gradients(model, expected[1]), rtol=0, atol=0)
