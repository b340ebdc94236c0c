"""Question tokens to program tokens: greedily, by sampling or by beam search, in whole minibatches.

Every function returns programs that begin with `<START>`, end with `<END>` and are padded with `<NULL>` on
the right. `max_length` counts all tokens, `<START>` and `<END>` too; a program that has not ended by then is
cut off there, without `<END>`. The matrix is as wide as its longest program. Sampling and beam search never
choose `<NULL>` or `<START>` (the other tokens' probabilities are scaled up to sum to one), so that padding is
always padding; greedy decoding takes the greatest logit whatever it is, as the original toolkit does.

Legend: B examples, T question tokens, L program tokens, V program vocabulary, K beams, H hidden units.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from iep.program_generator.seq2seq import Seq2Seq, State
from iep.vocab import END, NULL, START


def _check_max_length(max_length: int) -> None:
    if max_length < 2:
        raise ValueError(f"max_length is {max_length}, expected at least 2: <START> and one token")


def _program_log_softmax(logits: Tensor) -> Tensor:
    """Log probabilities over the last dimension, with none for `<NULL>` and `<START>`."""
    never = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    never[NULL] = never[START] = True
    return logits.float().masked_fill(never, -torch.inf).log_softmax(-1)


def _unroll(
    model: Seq2Seq, encoding_BH: Tensor, max_length: int, choose: Callable[[Tensor], Tensor]
) -> Tensor:
    """(B, L) programs whose every next token is `choose(logits_BV)`, until all rows have ended."""
    previous_B = encoding_BH.new_full((len(encoding_BH),), START, dtype=torch.long)
    finished_B = torch.zeros_like(previous_B, dtype=torch.bool)
    columns, state = [previous_B], None
    while len(columns) < max_length and not finished_B.all():
        logits, state = model.decode(encoding_BH, previous_B.unsqueeze(1), state)
        previous_B = choose(logits.squeeze(1)).masked_fill(finished_B, NULL)
        finished_B = finished_B | (previous_B == END)
        columns.append(previous_B)
    return torch.stack(columns, dim=1)


@torch.no_grad()
def greedy(model: Seq2Seq, questions_BT: Tensor, max_length: int) -> Tensor:
    """(B, L) programs: at every step the likeliest token.

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
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Programs drawn from the generator, and the log probability of each, through which gradients flow.

    This is the policy of REINFORCE (Williams 1992; Johnson et al. 2017, section 3.4). Tokens are drawn
    without recording gradients; the drawn programs are then scored in one teacher-forced call. A generator
    with dropout draws and scores with different units dropped, unless it is in evaluation mode.

    Args:
        temperature: divides the logits; below 1 sharpens the distribution, towards 0 it becomes greedy.
        generator: source of random numbers, on the questions' device; None is torch's own.

    Returns:
        (B, L) programs and (B,) log probabilities in nats, at the given temperature, of the tokens after
        `<START>` up to and including `<END>`.

    Raises:
        ValueError: `max_length` is below 2 or `temperature` is not positive.
    """
    _check_max_length(max_length)
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}, expected more than 0")

    def draw(logits_BV: Tensor) -> Tensor:
        probs_BV = _program_log_softmax(logits_BV / temperature).exp()
        return torch.multinomial(probs_BV, 1, generator=generator).squeeze(1)

    encoding_BH = model.encode(questions_BT)
    with torch.no_grad():
        programs_BL = _unroll(model, encoding_BH, max_length, draw)
    logits, _ = model.decode(encoding_BH, programs_BL[:, :-1])
    targets = programs_BL[:, 1:]
    log_probs = _program_log_softmax(logits / temperature)
    # Padding is scored as <END>, whose log probability is finite, then masked: <NULL>'s is not.
    scored = torch.where(targets == NULL, END, targets)
    chosen = log_probs.gather(2, scored.unsqueeze(2)).squeeze(2)
    return programs_BL, chosen.masked_fill(targets == NULL, 0.0).sum(1)


@torch.no_grad()
def beam(model: Seq2Seq, questions_BT: Tensor, beam_size: int, max_length: int) -> tuple[Tensor, Tensor]:
    """Likeliest programs by beam search over the whole minibatch.

    Each question keeps its `beam_size` likeliest hypotheses; one that has reached `<END>` stays among them
    with its score as it is. Scores are not normalised by length: what is sought is the most probable program.
    Search stops when every question's best hypothesis has ended, as scores only fall. At `max_length` a
    program that has ended is preferred to one that is cut off. `beam_size=1` is greedy decoding without
    `<NULL>` and `<START>`.

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
    programs_BKL = torch.full((B, K, 1), START, device=encoding.device)
    scores_BK = torch.full((B, K), -torch.inf, device=encoding.device)
    scores_BK[:, 0] = 0.0  # the K hypotheses begin alike: only the first may branch
    finished_BK = torch.zeros(B, K, dtype=torch.bool, device=encoding.device)
    state: State | None = None
    while programs_BKL.shape[2] < max_length and not finished_BK[:, 0].all():
        logits, state = model.decode(encoding, programs_BKL[:, :, -1].reshape(B * K, 1), state)
        steps_BKV = _program_log_softmax(logits).view(B, K, -1)
        V = steps_BKV.shape[2]
        # A hypothesis that has ended goes on with padding alone, at no cost.
        steps_BKV.masked_fill_(finished_BK.unsqueeze(2), -torch.inf)
        steps_BKV[..., NULL].masked_fill_(finished_BK, 0.0)
        scores_BK, chosen_BK = (scores_BK.unsqueeze(2) + steps_BKV).flatten(1).topk(K, dim=1)
        parents_BK, tokens_BK = chosen_BK // V, chosen_BK % V
        programs_BKL = programs_BKL.gather(1, parents_BK.unsqueeze(2).expand(-1, -1, programs_BKL.shape[2]))
        programs_BKL = torch.cat([programs_BKL, tokens_BK.unsqueeze(2)], dim=2)
        finished_BK = finished_BK.gather(1, parents_BK) | (tokens_BK == END)
        rows = (parents_BK + torch.arange(B, device=parents_BK.device).unsqueeze(1) * K).flatten()
        state = (state[0][:, rows], state[1][:, rows])
    ended_BK = finished_BK & scores_BK.isfinite()
    best_B = torch.where(ended_BK.any(1), scores_BK.where(ended_BK, -torch.inf).argmax(1), 0)
    rows_B = torch.arange(B, device=best_B.device)
    return _without_padding(programs_BKL[rows_B, best_B]), scores_BK[rows_B, best_B]


def _without_padding(programs_BL: Tensor) -> Tensor:
    return programs_BL[:, : max(1, int((programs_BL != NULL).any(0).sum()))]
