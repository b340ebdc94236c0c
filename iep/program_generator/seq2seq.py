"""The program generator's network: question tokens to logits over program tokens.

An LSTM encoder and an LSTM decoder (Johnson et al. 2017, Inferring and Executing Programs, section 3.2, and
supplementary material; Sutskever et al. 2014). Names of parameters are those of the original toolkit.
Choosing tokens from the logits is `decode.py`.

Legend: B examples, T question tokens, L program tokens, V program vocabulary, H hidden units, E embedding.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from iep.program_generator import encoder
from iep.vocab import NULL

State = tuple[Tensor, Tensor]


class Seq2Seq(nn.Module):
    """A question's encoding, fed to the decoder at every step beside the token before.

    Args:
        num_question_tokens: size of the question vocabulary.
        num_program_tokens: size of the program vocabulary.
        embedding_dim: size of the word embeddings on both sides.
        hidden_dim: hidden units of both LSTMs.
        num_layers: layers of both LSTMs.
        dropout: probability of dropping a unit between the layers of an LSTM while training.
    """

    def __init__(
        self,
        num_question_tokens: int,
        num_program_tokens: int,
        embedding_dim: int = 300,
        hidden_dim: int = 256,
        num_layers: int = 2,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.encoder_embed = nn.Embedding(num_question_tokens, embedding_dim)
        self.encoder_rnn = encoder.make_lstm(embedding_dim, hidden_dim, num_layers, dropout)
        self.decoder_embed = nn.Embedding(num_program_tokens, embedding_dim)
        self.decoder_rnn = encoder.make_lstm(hidden_dim + embedding_dim, hidden_dim, num_layers, dropout)
        self.decoder_linear = nn.Linear(hidden_dim, num_program_tokens)

    def encode(self, questions_BT: Tensor) -> Tensor:
        """(B, H) encodings: the top layer's state at each question's last token that is not `<NULL>`."""
        return encoder.encode(self.encoder_embed, self.encoder_rnn, questions_BT)

    def decode(self, encoding_BH: Tensor, programs_BL: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Read program tokens; after each one, predict the next.

        Args:
            encoding_BH: (B, H) from `encode`.
            programs_BL: (B, L) tokens that the decoder reads, the first being `<START>` when `state` is None.
            state: what an earlier call returned, to read on from there; None is the zero state.

        Returns:
            (B, L, V) logits, entry t predicting the token after token t, and the state after the last token.
        """
        embedded_BLE = self.decoder_embed(programs_BL)
        encoding_BLH = encoding_BH.unsqueeze(1).expand(-1, programs_BL.shape[1], -1)
        hidden_BLH, state = self.decoder_rnn(torch.cat([encoding_BLH, embedded_BLE], dim=2), state)
        return self.decoder_linear(hidden_BLH), state

    def forward(self, questions_BT: Tensor, programs_BL: Tensor) -> Tensor:
        """(B, L - 1, V) teacher-forced logits: entry t predicts token t + 1 from tokens 0 to t."""
        logits, _ = self.decode(self.encode(questions_BT), programs_BL[:, :-1])
        return logits

    def loss(self, questions_BT: Tensor, programs_BL: Tensor) -> Tensor:
        """Mean cross entropy, in nats per token, of the tokens after `<START>` that are not `<NULL>`."""
        programs_BL = encoder.trim(programs_BL)
        logits = self(questions_BT, programs_BL)
        precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return cross_entropy(precise.flatten(0, 1), programs_BL[:, 1:].flatten(), ignore_index=NULL)
