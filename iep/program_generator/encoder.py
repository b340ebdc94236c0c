"""Right-padded token sequences -> one vector each: embeddings, an LSTM, and its state at the last real token.

The program generator and the baselines use this file, which also creates their LSTMs.

Shapes: B examples, T question tokens, H hidden units.
"""

import torch
from torch import Tensor, nn

from iep.vocab import NULL


def make_lstm(in_dim: int, hidden_dim: int, num_layers: int, dropout: float) -> nn.LSTM:
    """Return an LSTM over (B, T, in_dim), with dropout between its layers if it has several."""
    dropout = dropout if num_layers > 1 else 0.0
    return nn.LSTM(in_dim, hidden_dim, num_layers, dropout=dropout, batch_first=True)


def lengths(tokens_BT: Tensor) -> Tensor:
    """Return the length of each sequence, (B,): the position after the last token that is not `<NULL>`, or 0."""
    positions_T = torch.arange(1, tokens_BT.shape[1] + 1, device=tokens_BT.device)
    return (positions_T * (tokens_BT != NULL)).amax(1)


def trim(tokens_BT: Tensor) -> Tensor:
    """Return tokens (B, T) without the columns on the right that hold only `<NULL>`, of which the first one stays."""
    if 0 in tokens_BT.shape:
        return tokens_BT[:, :1]
    return tokens_BT[:, : max(1, int(lengths(tokens_BT).max()))]


def encode(embed: nn.Embedding, rnn: nn.LSTM, tokens_BT: Tensor) -> Tensor:
    """Return the states of the top layer at each sequence's last real token, (B, H), from zero initial states.

    The LSTM runs over the padded matrix in one call. Padding follows the returned state and cannot change it, but takes
    time: batches are trimmed when they are made. For a sequence of only padding, the state after one `<NULL>` is
    returned.
    """
    states_BTH, _ = rnn(embed(tokens_BT))
    last_B = (lengths(tokens_BT) - 1).clamp(min=0)
    return states_BTH[torch.arange(len(last_B), device=last_B.device), last_B]
