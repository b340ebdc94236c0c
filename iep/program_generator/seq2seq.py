"""The network of the program generator, from question tokens to logits over program tokens.

It has an LSTM encoder and an LSTM decoder (Johnson et al. 2017, Inferring and Executing Programs, section 3.2 and
supplementary material; Sutskever et al. 2014). The names of the parameters are those of the original toolkit.
`decode.py` chooses tokens from the logits.

The network ignores autocast and computes in the dtype of its weights. In bfloat16 it would predict other programs, and
it takes only a small part of the time.

Legend: B examples, T question tokens, L program tokens, V program vocabulary, H hidden units, E embedding.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from iep.program_generator import encoder
from iep.vocab import NULL

State = tuple[Tensor, Tensor]
MAX_PROGRAM_LENGTH = 31
"""The greatest length in the original toolkit, 30 tokens after `<START>`. CLEVR's longest program has 27 tokens."""


class Seq2Seq(nn.Module):
    """An encoder and a decoder, which reads the question's encoding and the previous token at every step.

    `iep.config.GeneratorConfig` has the defaults of the settings.

    Args:
        num_question_tokens: the size of the question vocabulary.
        num_program_tokens: the size of the program vocabulary.
        embedding_dim: the size of the embeddings of words and of program tokens.
        hidden_dim: the hidden units of both LSTMs.
        num_layers: the layers of both LSTMs.
        dropout: the probability of dropping a unit between the layers of an LSTM in training.
        max_program_length: the number of tokens, `<START>` and `<END>` included, after which decoding stops.
    """

    def __init__(
        self,
        num_question_tokens: int,
        num_program_tokens: int,
        embedding_dim: int,
        hidden_dim: int,
        num_layers: int,
        dropout: float,
        max_program_length: int = MAX_PROGRAM_LENGTH,
    ):
        super().__init__()
        self.max_program_length = max_program_length
        self.encoder_embed = nn.Embedding(num_question_tokens, embedding_dim)
        self.encoder_rnn = encoder.make_lstm(embedding_dim, hidden_dim, num_layers, dropout)
        self.decoder_embed = nn.Embedding(num_program_tokens, embedding_dim)
        self.decoder_rnn = encoder.make_lstm(hidden_dim + embedding_dim, hidden_dim, num_layers, dropout)
        self.decoder_linear = nn.Linear(hidden_dim, num_program_tokens)

    def encode(self, questions_BT: Tensor) -> Tensor:
        """Return the state of the top layer at each question's last token that is not `<NULL>`, (B, H)."""
        with torch.autocast(questions_BT.device.type, enabled=False):
            return encoder.encode(self.encoder_embed, self.encoder_rnn, questions_BT)

    def decode(self, encoding_BH: Tensor, programs_BL: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Read program tokens and predict the token after each of them.

        Args:
            encoding_BH: (B, H) from `encode`.
            programs_BL: (B, L) tokens that the decoder reads, of which the first is `<START>` if `state` is None.
            state: the state that an earlier call returned, or None for the zero state.

        Returns:
            (B, L, V) logits, where entry t predicts the token after token t, and the state after the last token.
        """
        with torch.autocast(encoding_BH.device.type, enabled=False):
            embedded_BLE = self.decoder_embed(programs_BL)
            encoding_BLH = encoding_BH.unsqueeze(1).expand(-1, programs_BL.shape[1], -1)
            hidden_BLH, state = self.decoder_rnn(torch.cat([encoding_BLH, embedded_BLE], dim=2), state)
            return self.decoder_linear(hidden_BLH), state

    def forward(self, questions_BT: Tensor, programs_BL: Tensor) -> Tensor:
        """Return teacher-forced logits, (B, L - 1, V): entry t predicts token t + 1 from tokens 0 to t."""
        logits, _ = self.decode(self.encode(questions_BT), programs_BL[:, :-1])
        return logits

    def loss(self, questions_BT: Tensor, programs_BL: Tensor) -> Tensor:
        """Return the mean cross entropy, in nats per token, of the tokens after `<START>` that are not `<NULL>`."""
        logits = self(questions_BT, programs_BL)
        return cross_entropy(logits.flatten(0, 1), programs_BL[:, 1:].flatten(), ignore_index=NULL)
