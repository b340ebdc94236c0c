"""A program's last map -> answer logits: the engine's classifier.

Johnson et al. 2017, Inferring and Executing Programs, section 3.2 and the supplementary material; the options are those
of the original toolkit.

Shapes: B examples, C H W feature maps, A answers.
"""

from collections.abc import Sequence

from torch import nn


def make_classifier(
    map_shape: tuple[int, int, int],
    projection: int,
    hidden: Sequence[int],
    num_answers: int,
    pool: int = 2,
    pool_rest: bool = True,
    norm: bool = False,
    dropout: float = 0.0,
) -> nn.Sequential:
    """(B, C, H, W) -> (B, A) logits: 1x1 convolution, ReLU, max-pool, linear layers with ReLU between.

    Args:
        map_shape: (C, H, W).
        projection: channels of the 1x1 convolution; 0 leaves it and its ReLU out.
        hidden: widths of the linear layers before the last.
        pool: side of the pooling window; 1 leaves pooling out.
        pool_rest: on a grid that `pool` does not divide, the last windows are smaller; otherwise there are none.
        norm: batch norm after the convolution and every linear layer but the last.
        dropout: probability of dropping a unit after every linear layer but the last.

    Raises:
        ValueError: nothing of the grid is left.
    """
    channels, height, width = map_shape
    layers: list[nn.Module] = []
    if projection:
        layers.append(nn.Conv2d(channels, projection, kernel_size=1))
        layers += [nn.BatchNorm2d(projection)] * norm
        layers.append(nn.ReLU())
        channels = projection
    if pool > 1:
        layers.append(nn.MaxPool2d(pool, ceil_mode=pool_rest))
        height, width = (-(-side // pool) if pool_rest else side // pool for side in (height, width))
    if not height * width:
        raise ValueError(f"a pooling window of {pool} leaves nothing of a grid of {map_shape[1]}x{map_shape[2]}")
    layers.append(nn.Flatten())
    dim = channels * height * width
    for hidden_dim in hidden:
        layers.append(nn.Linear(dim, hidden_dim))
        layers += [nn.BatchNorm1d(hidden_dim)] * norm
        layers.append(nn.ReLU())
        layers += [nn.Dropout(dropout)] * (dropout > 0)
        dim = hidden_dim
    return nn.Sequential(*layers, nn.Linear(dim, num_answers))
