"""The trained baselines: question tokens, and for two of them image features -> answer logits.

They are those of Johnson et al. 2017 (CLEVR, section 4.1): LSTM, which reads no features, CNN+LSTM, and CNN+LSTM+SA,
with the stacked attention of Yang et al. 2016. The structure, the order of layers and the names of parameters are those
of the original toolkit, so that its checkpoints can be loaded. `iep.config` has the defaults of the settings.

All constructors have these arguments:
    num_question_tokens, num_answers: the sizes of the vocabularies.
    feature_dim, feature_height, feature_width: C, H and W of the features, for networks that depend on them.
    embedding_dim: the size of the word embeddings.
    hidden_dim, num_layers: the hidden units and layers of the LSTM.
    dropout: the probability of dropping a unit between the layers of the LSTM in training.
    classifier_dims, classifier_norm, classifier_dropout: the hidden sizes and options of `make_mlp`.

`forward` takes `<NULL>`-padded questions (B, T), the features of the distinct images (N, C, H, W), and the row of each
question's image in them, (B,), or None if question b is about image b. It returns (B, A) logits.

Shapes: B questions, N distinct images, T question tokens, C H W feature maps, D hidden units, K units of an attention,
P = H * W positions, A answers.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from iep.execution_engine.choices import POOLINGS, check_choice
from iep.execution_engine.modules import UnaryModule
from iep.program_generator import encoder

Rows = Tensor | np.ndarray | Sequence[int] | None
Shape = tuple[int, int, int]


class QuestionEncoder(nn.Module):
    """Word embeddings and an LSTM, from question tokens to the state at the last token that is not `<NULL>`."""

    def __init__(self, num_tokens: int, embedding_dim: int, hidden_dim: int, num_layers: int, dropout: float):
        super().__init__()
        self.embed = nn.Embedding(num_tokens, embedding_dim)
        self.rnn = encoder.make_lstm(embedding_dim, hidden_dim, num_layers, dropout)

    def forward(self, questions_BT: Tensor) -> Tensor:
        """Return the encodings of `<NULL>`-padded questions, (B, D)."""
        return encoder.encode(self.embed, self.rnn, questions_BT)


class LSTMBaseline(nn.Module):
    """A perceptron on the encoding of the question alone."""

    feature_sides = ()
    """The arguments that depend on the features, of which there are none."""

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

    def forward(self, questions_BT: Tensor, features_NCHW: None = None, image_rows_B: None = None) -> Tensor:
        """Classify the questions' encodings, (B, A)."""
        return self.classifier(self.rnn(questions_BT))


class CNNLSTMBaseline(nn.Module):
    """A perceptron on the concatenation of the question's encoding and the image's flattened maps.

    Each distinct image of a minibatch runs through the CNN once. The results are the same as for one run per question,
    except in training with batch norm in residual blocks, whose statistics are over images instead of questions.

    Args:
        cnn_res_blocks, cnn_res_block_dim, cnn_projection, cnn_pooling: see `make_cnn`.

    Raises:
        ValueError: `cnn_pooling` is unknown, or leaves nothing of the grid.
    """

    feature_sides = ("feature_dim", "feature_height", "feature_width")
    """The arguments that say which features the network is made for."""

    def __init__(
        self,
        num_question_tokens: int,
        num_answers: int,
        feature_dim: int,
        feature_height: int,
        feature_width: int,
        embedding_dim: int,
        hidden_dim: int,
        num_layers: int,
        dropout: float,
        cnn_res_blocks: int,
        cnn_res_block_dim: int,
        cnn_projection: int,
        cnn_pooling: str,
        classifier_dims: Sequence[int],
        classifier_norm: bool,
        classifier_dropout: float,
    ):
        super().__init__()
        self.rnn = QuestionEncoder(num_question_tokens, embedding_dim, hidden_dim, num_layers, dropout)
        shape = feature_dim, feature_height, feature_width
        self.cnn, (channels, height, width) = make_cnn(
            shape, cnn_res_blocks, cnn_res_block_dim, cnn_projection, cnn_pooling
        )
        in_dim = hidden_dim + channels * height * width
        self.classifier = make_mlp(in_dim, classifier_dims, num_answers, classifier_norm, classifier_dropout)

    def forward(self, questions_BT: Tensor, features_NCHW: Tensor, image_rows_B: Rows = None) -> Tensor:
        """Classify each question's encoding beside the flattened maps of its image, (B, A)."""
        maps_BD = of_questions(self.cnn(features_NCHW).flatten(1), image_rows_B)
        return self.classifier(torch.cat([self.rnn(questions_BT), maps_BD], dim=1))


class StackedAttention(nn.Module):
    """One step of attention, which adds the attended image features to the query.

    Yang et al. 2016 (Stacked Attention Networks for Image Question Answering, section 3.3), equations 15 to 18:
    h = tanh(Wv v + Wu u), p = softmax over all positions of Wp h, next u = u + sum over positions of p v.
    """

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.Wv = nn.Conv2d(dim, hidden_dim, kernel_size=1)
        self.Wu = nn.Linear(dim, hidden_dim)
        self.Wp = nn.Conv2d(hidden_dim, 1, kernel_size=1)

    def forward(self, maps_NDHW: Tensor, places_BPD: Tensor, image_rows_B: Rows, query_BD: Tensor) -> Tensor:
        """Return the next query, (B, D).

        Args:
            maps_NDHW: the maps of the distinct images.
            places_BPD: the map of each question's image, position by position.
            image_rows_B: the row of each question's image in the maps; None if question b is about image b.
            query_BD: the query.
        """
        hidden_BPK = of_questions(by_places(self.Wv(maps_NDHW)), image_rows_B) + self.Wu(query_BD)[:, None]
        scores_BP1 = functional.linear(hidden_BPK.tanh(), self.Wp.weight.flatten(1), self.Wp.bias)
        attention_B1P = scores_BP1.softmax(1).transpose(1, 2).to(places_BPD.dtype)
        return query_BD + (attention_B1P @ places_BPD)[:, 0]


class StackedAttentionBaseline(nn.Module):
    """A perceptron on a query, which is the question's encoding at first and then changed by several attention steps.

    Each distinct image of a minibatch is projected once, with the same results. The grid may have any size.

    Args:
        attention_dim: K.
        attention_steps: the number of steps; with 0 the answer depends on the question alone.
    """

    feature_sides = ("feature_dim",)
    """The arguments that say which features the network is made for."""

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
        """Run the attention steps from the questions' encodings and classify the last queries, (B, A)."""
        maps_NDHW = self.image_proj(features_NCHW)
        places_BPD = of_questions(by_places(maps_NDHW), image_rows_B)
        query_BD = self.rnn(questions_BT)
        for name in self._steps:
            query_BD = getattr(self, name)(maps_NDHW, places_BPD, image_rows_B, query_BD)
        return self.classifier(query_BD)


def make_mlp(in_dim: int, hidden_dims: Sequence[int], out_dim: int, norm: bool, dropout: float) -> nn.Sequential:
    """Return a perceptron, (B, in_dim) -> (B, out_dim), of linear layers with a ReLU after each but the last.

    With `dropout` above 0, units of the input and of every hidden layer are dropped. With `norm`, there is batch norm
    on the input (after dropout) and on every hidden layer (before dropout and ReLU).
    """
    layers: list[nn.Module] = []
    if dropout > 0:
        layers.append(nn.Dropout(dropout))
    if norm:
        layers.append(nn.BatchNorm1d(in_dim))
    for hidden_dim in hidden_dims:
        layers.append(nn.Linear(in_dim, hidden_dim))
        if norm:
            layers.append(nn.BatchNorm1d(hidden_dim))
        if dropout > 0:
            layers.append(nn.Dropout(dropout))
        layers.append(nn.ReLU())
        in_dim = hidden_dim
    return nn.Sequential(*layers, nn.Linear(in_dim, out_dim))


def make_cnn(
    feature_shape: Shape, res_blocks: int, res_block_dim: int, projection: int, pooling: str
) -> tuple[nn.Sequential, Shape]:
    """Return a CNN over (N, C, H, W) features, and the shape of its maps.

    Args:
        feature_shape: (C, H, W).
        res_blocks: the number of residual blocks with batch norm; above 0, a 3x3 convolution comes before them.
        res_block_dim: the channels of the blocks.
        projection: the channels of a 1x1 convolution with ReLU; 0 for none.
        pooling: 'maxpool2', windows of 2x2 (the last row and column of an odd grid are dropped), or 'none'.

    Raises:
        ValueError: `pooling` is unknown, or nothing of the grid is left after it.
    """
    check_choice("cnn_pooling", pooling, POOLINGS)
    channels, height, width = feature_shape
    layers: list[nn.Module] = []
    if res_blocks:
        layers += [nn.Conv2d(channels, res_block_dim, kernel_size=3, padding=1), nn.ReLU()]
        layers += [UnaryModule(res_block_dim, residual=True, norm=nn.BatchNorm2d) for _ in range(res_blocks)]
        channels = res_block_dim
    if projection:
        layers += [nn.Conv2d(channels, projection, kernel_size=1), nn.ReLU()]
        channels = projection
    if pooling == "maxpool2":
        layers.append(nn.MaxPool2d(2))
        height, width = height // 2, width // 2
    if not height * width:
        raise ValueError(f"cnn_pooling maxpool2 leaves nothing of a grid of {feature_shape[1]}x{feature_shape[2]}")
    return nn.Sequential(*layers), (channels, height, width)


def by_places(maps_NDHW: Tensor) -> Tensor:
    """Return maps position by position, (N, P, D): a view if they are in channels_last format."""
    return maps_NDHW.flatten(2).transpose(1, 2)


def of_questions(values_ND: Tensor, image_rows_B: Rows) -> Tensor:
    """Return the values (N, ...) of each question's image, (B, ...), by its row, or `values_ND` if there are no rows.

    Values are flattened, because the backward pass of other indexing is many times slower.
    """
    if image_rows_B is None:
        return values_ND
    rows_B = torch.as_tensor(image_rows_B, device=values_ND.device)
    return values_ND.flatten(1).index_select(0, rows_B).unflatten(1, values_ND.shape[1:])
