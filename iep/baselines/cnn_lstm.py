"""The baseline that sees image and question apart: features and question tokens to answer logits.

The baseline called CNN+LSTM in Johnson et al. 2017 (CLEVR, section 4.1): a CNN over the image's features, an LSTM over
the question, and a multilayer perceptron on both side by side.

Legend: B examples, N distinct images, T question tokens, C H W feature maps, A answers.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from iep.baselines.parts import QuestionEncoder, make_cnn, make_mlp, of_questions


class CNNLSTMBaseline(nn.Module):
    """An answer classifier over the question's encoding and, flattened, the image's maps.

    A minibatch's distinct images go through the CNN once each. That is exact in evaluation, and in training but for the
    batch norm of residual blocks, which normalises over the images then: a question more about one of them gives it no
    greater part in the statistics.

    Args:
        num_question_tokens: size of the question vocabulary.
        num_answers: size of the answer vocabulary.
        feature_dim: C of the features.
        feature_height: H of the features.
        feature_width: W of the features.
        embedding_dim: size of the word embeddings.
        hidden_dim: hidden units of the LSTM.
        num_layers: layers of the LSTM.
        dropout: probability of dropping a unit between the layers of the LSTM while training.
        cnn_res_blocks: residual blocks with batch norm; see `make_cnn`, also for the three that follow.
        cnn_res_block_dim: their channels.
        cnn_projection: channels of a 1x1 convolution; 0 for none.
        cnn_pooling: 'maxpool2' or 'none'.
        classifier_dims: hidden sizes of the perceptron, each followed by a ReLU.
        classifier_norm: batch norm in the perceptron; see `make_mlp`.
        classifier_dropout: probability of dropping a unit of the perceptron's input and hidden layers while training.

    Raises:
        ValueError: as `make_cnn`.
    """

    feature_sides = ("feature_dim", "feature_height", "feature_width")
    """The arguments that say which features it is made for."""

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

    def forward(
        self, questions_BT: Tensor, features_NCHW: Tensor, image_rows_B: Tensor | np.ndarray | None = None
    ) -> Tensor:
        """(B, A) answer logits.

        Args:
            questions_BT: `<NULL>`-padded questions.
            features_NCHW: features of the distinct images.
            image_rows_B: the row of each question's image in the features; None where question b is about image b.
        """
        maps_BD = of_questions(self.cnn(features_NCHW).flatten(1), image_rows_B)
        return self.classifier(torch.cat([self.rnn(questions_BT), maps_BD], dim=1))
