"""Question tokens -> program tokens, by greedy decoding, sampling or beam search of whole minibatches.

Every function returns programs that begin with `<START>`, end with `<END>` and are padded with `<NULL>` on the right.
The matrix is as wide as its longest program. `max_length` counts all tokens, including `<START>` and `<END>`. A longer
program is truncated and has no `<END>`, except in beam search. Sampling and beam search never choose `<NULL>` or
`<START>`; the probabilities of the other tokens are scaled to sum to 1. Greedy decoding chooses the greatest logit of
any token, as the original toolkit does.

Shapes: B examples, T question tokens, L program tokens, V program vocabulary, K beams, H hidden units.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from iep.program_generator.encoder import trim
from iep.program_generator.seq2seq import Seq2Seq, State
from iep.vocab import END, NULL, START


def _check_max_length(max_length: int) -> None:
    if max_length < 2:
        raise ValueError(f"max_length is {max_length}, expected at least 2: <START> and one token")


def _program_log_softmax(logits: Tensor) -> Tensor:
    """Return log probabilities over the last dimension, with minus infinity for `<NULL>` and `<START>`."""
    tokens_V = torch.arange(logits.shape[-1], device=logits.device)
    return logits.masked_fill((tokens_V == NULL) | (tokens_V == START), -torch.inf).log_softmax(-1)


def _unroll(model: Seq2Seq, encoding_BH: Tensor, max_length: int, choose: Callable[[Tensor], Tensor]) -> Tensor:
    """Return (B, L) programs, in which `choose(logits_BV)` is the next token, until all rows have ended."""
    previous_B = encoding_BH.new_full((len(encoding_BH),), START, dtype=torch.long)
    finished_B = torch.zeros_like(previous_B, dtype=torch.bool)
    columns, state = [previous_B], None
    for length in range(1, max_length):
        if length > 1 and finished_B.all():  # the host waits for a GPU here
            break
        logits, state = model.decode(encoding_BH, previous_B.unsqueeze(1), state)
        previous_B = choose(logits.squeeze(1)).masked_fill(finished_B, NULL)
        finished_B = finished_B | (previous_B == END)
        columns.append(previous_B)
    return torch.stack(columns, dim=1)


@torch.no_grad()
def greedy(model: Seq2Seq, questions_BT: Tensor, max_length: int) -> Tensor:
    """Return (B, L) programs that have the most probable token at every step.

    Raises:
        ValueError: `max_length` is below 2.
    """
    _check_max_length(max_length)
    return _unroll(model, model.encode(questions_BT), max_length, lambda logits_BV: logits_BV.argmax(1))


def sample(
    model: Seq2Seq,
    questions_BT: Tensor,
    max_length: int,
    temperature: float = 1.0,
    uniform_BL: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw programs from the generator, and return them with the log probability of each, which has gradients.

    This is the policy of REINFORCE (Williams 1992; Johnson et al. 2017, section 3.4). Tokens are drawn without
    gradients, and the programs are then scored in one teacher-forced call. In training mode, a generator with dropout
    drops different units when it draws and when it scores.

    Args:
        temperature: the divisor of the logits. Values below 1 sharpen the distribution; towards 0 it becomes greedy.
        uniform_BL: (B, max_length or more) numbers in [0, 1) that determine the draws, with column t for token t; None
            draws them.

    Returns:
        (B, L) programs and (B,) log probabilities in nats, at the given temperature, of the tokens after
        `<START>` up to and including `<END>`.

    Raises:
        ValueError: `max_length` is below 2, `temperature` is not positive, or `uniform_BL` is too small.
    """
    _check_max_length(max_length)
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}, expected more than 0")
    if uniform_BL is None:
        uniform_BL = torch.rand(len(questions_BT), max_length, device=questions_BT.device)
    if len(uniform_BL) != len(questions_BT) or uniform_BL.shape[1] < max_length:
        raise ValueError(f"{tuple(uniform_BL.shape)} numbers for drawing {len(questions_BT)} programs of {max_length}")
    columns = iter(uniform_BL.unbind(1))
    next(columns)  # the column of <START>

    def draw(logits_BV: Tensor) -> Tensor:
        # In float64, a number below 1 times the sum is below the sum: a last token of probability 0 is not drawn.
        cumulative_BV = _program_log_softmax(logits_BV / temperature).double().exp().cumsum(1)
        drawn_B = next(columns).double() * cumulative_BV[:, -1]
        drawn_B = torch.searchsorted(cumulative_BV, drawn_B.unsqueeze(1), right=True).squeeze(1)
        return drawn_B.clamp(max=logits_BV.shape[1] - 1)  # NaN logits give some token, of probability NaN

    encoding_BH = model.encode(questions_BT)
    with torch.no_grad():
        programs_BL = _unroll(model, encoding_BH, max_length, draw)
    logits, _ = model.decode(encoding_BH, programs_BL[:, :-1])
    targets = programs_BL[:, 1:]
    log_probs = _program_log_softmax(logits / temperature)
    # Padding is scored as <END>, whose log probability is finite, unlike that of <NULL>, and then masked.
    scored = torch.where(targets == NULL, END, targets)
    chosen = log_probs.gather(2, scored.unsqueeze(2)).squeeze(2)
    return programs_BL, chosen.masked_fill(targets == NULL, 0.0).sum(1)


@torch.no_grad()
def beam(model: Seq2Seq, questions_BT: Tensor, beam_size: int, max_length: int) -> tuple[Tensor, Tensor]:
    """Return the most probable programs that beam search over the whole minibatch finds.

    At every step, each question keeps the `beam_size` most probable hypotheses. A hypothesis that reaches `<END>` is
    complete and leaves the beam, and the most probable complete one is the result. Scores are not normalised by length:
    the search is for the most probable program that ends within `max_length`, where the last token is always `<END>`.
    It stops when no hypothesis can exceed the complete ones, because scores only decrease. A beam of 1 has the same
    result as greedy decoding if that ends and contains neither `<NULL>` nor `<START>`.

    Returns:
        (B, L) programs and (B,) log probabilities in nats.

    Raises:
        ValueError: `max_length` is below 2 or `beam_size` below 1.
    """
    _check_max_length(max_length)
    if beam_size < 1:
        raise ValueError(f"beam_size is {beam_size}, expected at least 1")
    B, K = len(questions_BT), beam_size
    encoding = model.encode(questions_BT).repeat_interleave(K, dim=0)  # (B * K, H)
    device = encoding.device
    rows_B = torch.arange(B, device=device)
    programs_BKL = torch.full((B, K, max_length), NULL, device=device)
    programs_BKL[:, :, 0] = START
    scores_BK = torch.full((B, K), -torch.inf, device=device)  # minus infinity: no hypothesis
    scores_BK[:, 0] = 0.0
    best_B, best_BL = torch.full((B,), -torch.inf, device=device), programs_BKL[:, 0]
    state: State | None = None
    for t in range(1, max_length):
        if (scores_BK.amax(1) <= best_B).all():
            break
        logits, state = model.decode(encoding, programs_BKL[:, :, t - 1].reshape(B * K, 1), state)
        steps_BKV = _program_log_softmax(logits).view(B, K, -1)
        V = steps_BKV.shape[2]
        if t == max_length - 1:
            steps_BKV = steps_BKV.masked_fill(torch.arange(V, device=device) != END, -torch.inf)
        scores_BK, chosen_BK = (scores_BK.unsqueeze(2) + steps_BKV).flatten(1).topk(K, dim=1)
        parents_BK, tokens_BK = chosen_BK // V, chosen_BK % V
        programs_BKL = programs_BKL[rows_B.unsqueeze(1), parents_BK]
        programs_BKL[:, :, t] = tokens_BK
        flat = (rows_B.unsqueeze(1) * K + parents_BK).flatten()
        state = (state[0].index_select(1, flat), state[1].index_select(1, flat))

        ended_B, place_B = scores_BK.masked_fill(tokens_BK != END, -torch.inf).max(1)
        better_B = ended_B > best_B
        best_B = torch.where(better_B, ended_B, best_B)
        best_BL = torch.where(better_B.unsqueeze(1), programs_BKL[rows_B, place_B], best_BL)
        scores_BK = scores_BK.masked_fill(tokens_BK == END, -torch.inf)
    return trim(best_BL), best_B
