"""A program's result -> answer logits: the engine's classifier.

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
    pool: int,
    pool_rest: bool,
    norm: bool,
    dropout: float,
) -> nn.Sequential:
    """Return a classifier, (B, C, H, W) -> (B, A) logits: 1x1 convolution, ReLU, max-pool, linear layers with ReLUs.

    Args:
        map_shape: (C, H, W).
        projection: the channels of the 1x1 convolution; 0 omits it and its ReLU.
        hidden: the widths of the linear layers before the last.
        pool: the side of the pooling window; 1 omits pooling.
        pool_rest: on a grid that `pool` does not divide, the last windows are smaller; otherwise they are omitted.
        norm: batch norm after the convolution and every linear layer but the last.
        dropout: the probability of dropping a unit after every linear layer but the last.

    Raises:
        ValueError: nothing of the grid is left after pooling.
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
