"""What the networks of the baselines share: the question's encoder, the classifier, and the CNN over images' features.

Structure, order of layers and names of parameters are those of the original toolkit, so that its checkpoints' weights
fit. The published baselines are those of Johnson et al. 2017, CLEVR, section 4.1.

Legend: B examples, N images, T question tokens, H hidden units, C H W feature maps.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from iep.execution_engine.modules import UnaryModule
from iep.program_generator import encoder

POOLINGS = ("maxpool2", "none")
Shape = tuple[int, int, int]


class QuestionEncoder(nn.Module):
    """Word embeddings and an LSTM: a question's tokens to the state at its last real token.

    Args:
        num_tokens: size of the question vocabulary.
        embedding_dim: size of the word embeddings.
        hidden_dim: hidden units of the LSTM.
        num_layers: layers of the LSTM.
        dropout: probability of dropping a unit between the layers of the LSTM while training.
    """

    def __init__(self, num_tokens: int, embedding_dim: int, hidden_dim: int, num_layers: int, dropout: float):
        super().__init__()
        self.embed = nn.Embedding(num_tokens, embedding_dim)
        self.rnn = encoder.make_lstm(embedding_dim, hidden_dim, num_layers, dropout)

    def forward(self, questions_BT: Tensor) -> Tensor:
        """(B, H) encodings of `<NULL>`-padded questions."""
        return encoder.encode(self.embed, self.rnn, questions_BT)


def make_mlp(in_dim: int, hidden_dims: Sequence[int], out_dim: int, norm: bool, dropout: float) -> nn.Sequential:
    """(B, in_dim) -> (B, out_dim): linear layers with a ReLU after each but the last.

    With `dropout` above 0 units of the input are dropped, and of every hidden layer; with `norm` the input goes through
    batch norm (after dropout), and so does every hidden layer (before dropout, ReLU last).
    """
    layers: list[nn.Module] = [*_dropout(dropout), *_norm(norm, in_dim)]
    for hidden_dim in hidden_dims:
        layers += [nn.Linear(in_dim, hidden_dim), *_norm(norm, hidden_dim), *_dropout(dropout), nn.ReLU()]
        in_dim = hidden_dim
    return nn.Sequential(*layers, nn.Linear(in_dim, out_dim))


def _norm(wanted: bool, dim: int) -> list[nn.Module]:
    return [nn.BatchNorm1d(dim)] if wanted else []


def _dropout(share: float) -> list[nn.Module]:
    return [nn.Dropout(share)] if share > 0 else []


def make_cnn(
    feature_shape: Shape, res_blocks: int, res_block_dim: int, projection: int, pooling: str
) -> tuple[nn.Sequential, Shape]:
    """(N, C, H, W) features -> maps of the shape that is returned beside the network.

    Args:
        feature_shape: (C, H, W).
        res_blocks: residual blocks with batch norm, behind a 3x3 convolution to their width; 0 for neither.
        res_block_dim: their channels.
        projection: channels of a 1x1 convolution with ReLU; 0 for none.
        pooling: 'maxpool2', windows of 2x2 (an odd grid's last row and column are left out), or 'none'.

    Raises:
        ValueError: `pooling` is unknown, or leaves nothing of the grid.
    """
    if pooling not in POOLINGS:
        raise ValueError(f"cnn_pooling is {pooling!r}, expected one of {', '.join(POOLINGS)}")
    channels, height, width = feature_shape
    layers: list[nn.Module] = []
    if res_blocks:
        layers += [nn.Conv2d(channels, res_block_dim, kernel_size=3, padding=1), nn.ReLU()]
        layers += [UnaryModule(res_block_dim, residual=True, norm="batch") for _ in range(res_blocks)]
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


def of_questions(values_ND: Tensor, image_rows_B: Tensor | np.ndarray | Sequence[int] | None) -> Tensor:
    """(B, ...) what (N, ...) holds of the image of each question, by its row; as it is where question b has row b.

    Flat rows, because the gradients of others are summed up many times more slowly.
    """
    if image_rows_B is None:
        return values_ND
    rows_B = torch.as_tensor(image_rows_B, device=values_ND.device)
    return values_ND.flatten(1).index_select(0, rows_B).unflatten(1, values_ND.shape[1:])
