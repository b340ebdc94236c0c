"""The question-only baseline: question tokens to answer logits, the image never seen.

The baseline called LSTM in Johnson et al. 2017 (CLEVR, section 4.1): word embeddings, an LSTM, and a
multilayer perceptron on the state at the question's last token.

Legend: B examples, T question tokens, A answers.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from iep.baselines.parts import QuestionEncoder, make_mlp


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
        classifier_norm: batch norm in the perceptron; see `make_mlp`.
        classifier_dropout: probability of dropping a unit of the perceptron's input and hidden layers while training.
    """

    feature_sides = ()
    """It sees no features."""

    def __init__(
        self,
        num_question_tokens: int,
        num_answers: int,
        embedding_dim: int,
        hidden_dim: int,
        num_layers: int,
        dropout: float,
        classifier_dims: Sequence[int],
        classifier_norm: bool,
        classifier_dropout: float,
    ):
        super().__init__()
        self.rnn = QuestionEncoder(num_question_tokens, embedding_dim, hidden_dim, num_layers, dropout)
        self.classifier = make_mlp(hidden_dim, classifier_dims, num_answers, classifier_norm, classifier_dropout)
        self.register_load_state_dict_pre_hook(_rename_older)

    def forward(self, questions_BT: Tensor, features_NCHW: None = None, image_rows_B: None = None) -> Tensor:
        """(B, A) answer logits of `<NULL>`-padded questions; the other baselines take images too."""
        return self.classifier(self.rnn(questions_BT))


def _rename_older(network: nn.Module, weights: dict[str, Any], prefix: str, *_: Any) -> None:
    """Earlier checkpoints of this baseline hold the encoder's two layers without the encoder's name."""
    for name in list(weights):
        if name.removeprefix(prefix).startswith(("embed.", "rnn.weight_", "rnn.bias_")):
            weights[f"{prefix}rnn.{name.removeprefix(prefix)}"] = weights.pop(name)
