"""The baseline that looks at the image with the question in mind: features and question tokens to answer logits.

The baseline called CNN+LSTM+SA in Johnson et al. 2017 (CLEVR, section 4.1): the stacked attention of Yang et al. 2016
(Stacked Attention Networks for Image Question Answering, section 3.3), and a multilayer perceptron.

Legend: B examples, N distinct images, T question tokens, C H W feature maps, D hidden units, K units of an attention,
P = H * W places, A answers.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn
from torch.nn import functional

from iep.baselines.parts import QuestionEncoder, make_mlp, of_questions

Rows = Tensor | np.ndarray | None


def by_places(maps_NDHW: Tensor) -> Tensor:
    """(N, P, D), a view where the maps have their channels last."""
    return maps_NDHW.flatten(2).transpose(1, 2)


class StackedAttention(nn.Module):
    """One step of attention: what the question looks for is found in the image and added to it.

    Yang et al. 2016, equations 15 to 18: h = tanh(Wv v + Wu u), p = softmax over all places of Wp h,
    next u = u + sum over places of p v.

    Args:
        dim: D.
        hidden_dim: K.
    """

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.Wv = nn.Conv2d(dim, hidden_dim, kernel_size=1)
        self.Wu = nn.Linear(dim, hidden_dim)
        self.Wp = nn.Conv2d(hidden_dim, 1, kernel_size=1)

    def forward(self, maps_NDHW: Tensor, places_BPD: Tensor, image_rows_B: Rows, query_BD: Tensor) -> Tensor:
        """(B, D) the next query.

        Args:
            maps_NDHW: maps of the distinct images.
            places_BPD: of each question's image, place by place.
            image_rows_B: the row of each question's image in the maps; None where question b is about image b.
            query_BD: what is looked for.
        """
        hidden_BPK = of_questions(by_places(self.Wv(maps_NDHW)), image_rows_B) + self.Wu(query_BD)[:, None]
        scores_BP1 = functional.linear(hidden_BPK.tanh(), self.Wp.weight.flatten(1), self.Wp.bias)
        attention_B1P = scores_BP1.softmax(1).transpose(1, 2).to(places_BPD.dtype)
        return query_BD + (attention_B1P @ places_BPD)[:, 0]


class StackedAttentionBaseline(nn.Module):
    """An answer classifier over what the last of several steps of attention leaves of the question.

    A minibatch's distinct images are projected once each, which is exact.

    Args:
        num_question_tokens: size of the question vocabulary.
        num_answers: size of the answer vocabulary.
        feature_dim: C of the features; the grid may have any size.
        embedding_dim: size of the word embeddings.
        hidden_dim: D, hidden units of the LSTM and channels that the features are projected to.
        num_layers: layers of the LSTM.
        dropout: probability of dropping a unit between the layers of the LSTM while training.
        attention_dim: K.
        attention_steps: how many; with none the answer is of the question alone.
        classifier_dims: hidden sizes of the perceptron, each followed by a ReLU.
        classifier_norm: batch norm in the perceptron; see `make_mlp`.
        classifier_dropout: probability of dropping a unit of the perceptron's input and hidden layers while training.
    """

    feature_sides = ("feature_dim",)
    """The arguments that say which features it is made for."""

    def __init__(
        self,
        num_question_tokens: int,
        num_answers: int,
        feature_dim: int,
        embedding_dim: int,
        hidden_dim: int,
        num_layers: int,
        dropout: float,
        attention_dim: int,
        attention_steps: int,
        classifier_dims: Sequence[int],
        classifier_norm: bool,
        classifier_dropout: float,
    ):
        super().__init__()
        self.rnn = QuestionEncoder(num_question_tokens, embedding_dim, hidden_dim, num_layers, dropout)
        self.image_proj = nn.Conv2d(feature_dim, hidden_dim, kernel_size=1)
        self._steps = [f"stacked-attn-{number}" for number in range(attention_steps)]
        for name in self._steps:
            self.add_module(name, StackedAttention(hidden_dim, attention_dim))
        self.classifier = make_mlp(hidden_dim, classifier_dims, num_answers, classifier_norm, classifier_dropout)

    def forward(self, questions_BT: Tensor, features_NCHW: Tensor, image_rows_B: Rows = None) -> Tensor:
        """(B, A) answer logits.

        Args:
            questions_BT: `<NULL>`-padded questions.
            features_NCHW: features of the distinct images.
            image_rows_B: the row of each question's image in the features; None where question b is about image b.
        """
        maps_NDHW = self.image_proj(features_NCHW)
        places_BPD = of_questions(by_places(maps_NDHW), image_rows_B)
        query_BD = self.rnn(questions_BT)
        for name in self._steps:
            query_BD = getattr(self, name)(maps_NDHW, places_BPD, image_rows_B, query_BD)
        return self.classifier(query_BD)
