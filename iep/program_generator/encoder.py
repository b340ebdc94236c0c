"""Right-padded token sequences to one vector each: embed, run an LSTM, take the state at the last real token.

Shared by the program generator and the baselines, whose LSTMs are made here too. Covers neither decoding nor
bidirectional LSTMs.

Legend: B examples, T question tokens, H hidden units.
"""

import torch
from torch import Tensor, nn

from iep.vocab import NULL


def make_lstm(in_dim: int, hidden_dim: int, num_layers: int, dropout: float) -> nn.LSTM:
    """An LSTM over (B, T, in_dim). Dropout is between layers: torch warns where it is asked for with one alone."""
    dropout = dropout if num_layers > 1 else 0.0
    return nn.LSTM(in_dim, hidden_dim, num_layers, dropout=dropout, batch_first=True)


def lengths(tokens_BT: Tensor) -> Tensor:
    """(B,) lengths: the position after the last token that is not `<NULL>`; 0 where all are."""
    positions_T = torch.arange(1, tokens_BT.shape[1] + 1, device=tokens_BT.device)
    return (positions_T * (tokens_BT != NULL)).amax(1)


def trim(tokens_BT: Tensor) -> Tensor:
    """Drop the columns on the right that hold nothing but `<NULL>`; at least one column stays.

    Raises:
        ValueError: `tokens_BT` is not a matrix with at least one column.
    """
    if tokens_BT.dim() != 2 or tokens_BT.shape[1] == 0:
        raise ValueError(f"tokens have shape {tuple(tokens_BT.shape)}, expected (examples, tokens)")
    if tokens_BT.shape[0] == 0:
        return tokens_BT[:, :1]
    return tokens_BT[:, : max(1, int(lengths(tokens_BT).max()))]


def encode(embed: nn.Embedding, rnn: nn.LSTM, tokens_BT: Tensor) -> Tensor:
    """(B, H) states of the top layer at each sequence's last real token, from zero initial states.

    The LSTM runs left to right over the padded matrix in one call: what lies right of the last real token
    cannot reach the state that is taken. A sequence of padding alone gives the state after one `<NULL>`.
    """
    tokens_BT = trim(tokens_BT)
    states_BTH, _ = rnn(embed(tokens_BT))
    last_B = (lengths(tokens_BT) - 1).clamp(min=0)
    return states_BTH[torch.arange(len(last_B), device=last_B.device), last_B]
