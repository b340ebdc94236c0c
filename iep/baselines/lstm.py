"""The question-only baseline: question tokens to answer logits, the image never seen.

The baseline called LSTM in Johnson et al. 2017 (CLEVR, section 4.1): word embeddings, an LSTM, and a
multilayer perceptron on the state at the question's last token.

Legend: B examples, T question tokens, A answers.
"""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from iep.program_generator import encoder


class LSTMBaseline(nn.Module):
    """An answer classifier over the encoding of the question alone.

    Args:
        num_question_tokens: size of the question vocabulary.
        num_answers: size of the answer vocabulary.
        embedding_dim: size of the word embeddings.
        hidden_dim: hidden units of the LSTM.
        num_layers: layers of the LSTM.
        dropout: probability of dropping a unit between the layers of the LSTM while training.
        classifier_dims: hidden sizes of the perceptron, each followed by a ReLU.
    """

    def __init__(
        self,
        num_question_tokens: int,
        num_answers: int,
        embedding_dim: int = 300,
        hidden_dim: int = 256,
        num_layers: int = 2,
        dropout: float = 0.0,
        classifier_dims: Sequence[int] = (1024,),
    ):
        super().__init__()
        self.embed = nn.Embedding(num_question_tokens, embedding_dim)
        self.rnn = nn.LSTM(embedding_dim, hidden_dim, num_layers, dropout=dropout, batch_first=True)
        hidden = [layer for pair in pairwise([hidden_dim, *classifier_dims]) for layer in (nn.Linear(*pair), nn.ReLU())]
        self.classifier = nn.Sequential(*hidden, nn.Linear([hidden_dim, *classifier_dims][-1], num_answers))

    def forward(self, questions_BT: Tensor) -> Tensor:
        """(B, A) answer logits of `<NULL>`-padded questions."""
        return self.classifier(encoder.encode(self.embed, self.rnn, questions_BT))
