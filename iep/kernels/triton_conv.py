"""Triton kernels: convolutions of many functions, and their weight gradients, in one launch each.

A convolution is an implicit matrix product. Its rows are output positions of the maps, in tiles that belong to one
function each, and its inner dimension consists of the taps and the input channels. Inputs are read through row numbers
of a buffer, so that no argument is gathered, and bias, residual and ReLU are applied before the result is written to
its own place.

The kernels are made for bfloat16, with sums in float32; they compute float32 too, but slowly. Importing this file needs
Triton. Without a GPU, the kernels run if TRITON_INTERPRET=1 is set before the import.

Shapes: F functions, G rows of a call, M rows of a buffer, N pairs of rows, T taps, H W maps, I and O channels.
"""

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INTERPRETED = tl.constexpr(IS_INTERPRETED)
LARGEST_TILE = 128
WEIGHT_PROGRAMS = 1 if IS_INTERPRETED else 512
"""The number of programs over which pairs of rows are spread, for tiles of `LARGEST_TILE`: four for each multiprocessor
of an H100."""


class Maps(NamedTuple):
    """Maps in a buffer."""

    buffer: Tensor
    """(M, H, W, C), contiguous."""
    rows: Tensor
    """The rows of the buffer, int64, (G,) or (N,)."""


TILES = [(16, 16, 16, 1, 1)] if IS_INTERPRETED else [(64, 64, 64, 4, 4), (128, 128, 64, 8, 3)]
CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, num_warps=warps, num_stages=stages)
    for m, n, k, warps, stages in TILES
]
"""Tile sizes for few and for many rows. The first call of each size times both and keeps the faster one."""


# Parts of kernels


@triton.jit
def _dot(left, right, total):
    """Return the matrix product added to `total`. Triton's interpreter has no products of bfloat16."""
    if INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total)
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def _piece(ends_ptr, num_functions, units, size, FUNCTIONS: tl.constexpr):
    """Return the function of a program, the start and end of its rows, and the position of the program's piece of them.

    Each row has `units`, and functions have one after the other as many pieces of `size` units as they need. The
    function of programs that are left is `num_functions`.
    """
    functions = tl.arange(0, FUNCTIONS)
    is_function = functions < num_functions
    ends = tl.load(ends_ptr + functions, mask=is_function, other=0)
    starts = tl.load(ends_ptr + functions - 1, mask=(functions > 0) & is_function, other=0)

    pieces = tl.cdiv((ends - starts) * units, size)
    pieces_until = tl.cumsum(pieces, 0)
    is_before = pieces_until <= tl.program_id(0)
    function = tl.minimum(tl.sum(is_before.to(tl.int32), 0), num_functions)

    is_own = functions == function
    start = tl.sum(tl.where(is_own, starts, 0), 0)
    end = tl.sum(tl.where(is_own, ends, 0), 0)
    first_piece = tl.sum(tl.where(is_own, pieces_until - pieces, 0), 0)
    return function, start, end, tl.program_id(0) - first_piece


@triton.jit
def _is_inside(is_position, y, x, H: tl.constexpr, W: tl.constexpr):
    """Return whether positions are inside the maps, and are positions at all."""
    return is_position & (y >= 0) & (y < H) & (x >= 0) & (x < W)


@triton.jit
def _add_taps(
    total,
    x_ptr, at, is_position,
    weight_ptr, channel, is_channel,
    H: tl.constexpr, W: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, TAP_SIZE: tl.constexpr,
    TAPS: tl.constexpr, SIDE: tl.constexpr, DILATION: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the convolution at the positions `at` of maps, added to `total`.

    The weights of a tap are `TAP_SIZE` numbers, of which the first are those of the maps' channels.
    """
    y = at // W
    x = at % W
    inner = tl.arange(0, BLOCK_K)
    steps: tl.constexpr = (INPUTS + BLOCK_K - 1) // BLOCK_K
    for step in range(TAPS * steps):
        tap = step // steps
        k = (step % steps) * BLOCK_K + inner
        from_y = y + (tap // SIDE - SIDE // 2) * DILATION
        from_x = x + (tap % SIDE - SIDE // 2) * DILATION
        is_inside = _is_inside(is_position, from_y, from_x, H, W)
        from_at = from_y * W + from_x
        values = tl.load(
            x_ptr + (from_at * INPUTS)[:, None] + k[None, :],
            mask=is_inside[:, None] & (k < INPUTS)[None, :],
            other=0.0,
        )
        weights = tl.load(
            weight_ptr + tap * TAP_SIZE + k[:, None] * OUTPUTS + channel[None, :],
            mask=(k < INPUTS)[:, None] & is_channel[None, :],
            other=0.0,
        )
        total = _dot(values, weights, total)
    return total


@triton.jit
def _add_second(
    total,
    x_ptr, at, is_position,
    weight_ptr, channel, is_channel,
    FIRST: tl.constexpr, SECOND: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return what the second argument of a 1x1 convolution adds at the positions `at`, added to `total`."""
    inner = tl.arange(0, BLOCK_K)
    for step in range((SECOND + BLOCK_K - 1) // BLOCK_K):
        k = step * BLOCK_K + inner
        values = tl.load(
            x_ptr + (at * SECOND)[:, None] + k[None, :],
            mask=is_position[:, None] & (k < SECOND)[None, :],
            other=0.0,
        )
        weights = tl.load(
            weight_ptr + (FIRST + k)[:, None] * OUTPUTS + channel[None, :],
            mask=(k < SECOND)[:, None] & is_channel[None, :],
            other=0.0,
        )
        total = _dot(values, weights, total)
    return total


# Convolutions


@triton.autotune(
    configs=CONFIGS,
    key=["FIRST", "SECOND", "OUTPUTS", "TAPS", "magnitude"],
    cache_results=not IS_INTERPRETED,
)
@triton.jit(
    do_not_specialize=["num_functions", "magnitude"],
    do_not_specialize_on_alignment=["first_rows_ptr", "second_rows_ptr", "residual_rows_ptr", "ends_ptr"],
)
def conv_kernel(
    first_ptr, first_rows_ptr,
    second_ptr, second_rows_ptr,
    weight_ptr, bias_ptr,
    residual_ptr, residual_rows_ptr,
    mask_ptr, out_ptr,
    ends_ptr, num_functions, magnitude,
    H: tl.constexpr, W: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, OUTPUTS: tl.constexpr,
    TAPS: tl.constexpr, SIDE: tl.constexpr, DILATION: tl.constexpr,
    FUNCTIONS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_MASK: tl.constexpr, RELU: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute a tile of BLOCK_M positions and BLOCK_N channels."""
    function, start, end, tile = _piece(ends_ptr, num_functions, H * W, BLOCK_M, FUNCTIONS)
    if function == num_functions:
        return
    position = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_position = position < (end - start) * (H * W)
    row = start + position // (H * W)
    at = position % (H * W)
    channel = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_channel = channel < OUTPUTS

    TAP_SIZE: tl.constexpr = (FIRST + SECOND) * OUTPUTS
    own_ptr = weight_ptr + function.to(tl.int64) * (TAPS * TAP_SIZE)
    first_row = tl.load(first_rows_ptr + row, mask=is_position, other=0)
    result = _add_taps(
        tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32),
        first_ptr + first_row[:, None] * (H * W * FIRST), at, is_position,
        own_ptr, channel, is_channel,
        H, W, FIRST, OUTPUTS, TAP_SIZE, TAPS, SIDE, DILATION, BLOCK_K,
    )  # fmt: skip
    if SECOND > 0:  # a 1x1 convolution of the concatenation of two arguments
        second_row = tl.load(second_rows_ptr + row, mask=is_position, other=0)
        result = _add_second(
            result,
            second_ptr + second_row[:, None] * (H * W * SECOND), at, is_position,
            own_ptr, channel, is_channel,
            FIRST, SECOND, OUTPUTS, BLOCK_K,
        )  # fmt: skip
    _store(
        result,
        row, at, is_position,
        channel, is_channel, function,
        bias_ptr, residual_ptr, residual_rows_ptr, mask_ptr, out_ptr,
        H, W, OUTPUTS, HAS_BIAS, HAS_RESIDUAL, HAS_MASK, RELU,
    )  # fmt: skip


@triton.jit
def _store(
    result,
    row, at, is_position,
    channel, is_channel, function,
    bias_ptr,
    residual_ptr, residual_rows_ptr,
    mask_ptr, out_ptr,
    H: tl.constexpr, W: tl.constexpr, OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_MASK: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Store a tile of convolutions after bias, residual, ReLU and mask."""
    is_result = is_position[:, None] & is_channel[None, :]
    to = (row.to(tl.int64) * (H * W) + at)[:, None] * OUTPUTS + channel[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + function * OUTPUTS + channel, mask=is_channel, other=0.0)
        result += bias.to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        residual_row = tl.load(residual_rows_ptr + row, mask=is_position, other=0)
        residual_at = residual_row * (H * W) + at
        from_ptr = residual_ptr + residual_at[:, None] * OUTPUTS + channel[None, :]
        residual = tl.load(from_ptr, mask=is_result, other=0.0)
        result += residual.to(tl.float32)
    if RELU:
        result = tl.maximum(result, 0.0)
    if HAS_MASK:
        mask = tl.load(mask_ptr + to, mask=is_result, other=0.0)
        result = tl.where(mask > 0, result, 0.0)
    tl.store(out_ptr + to, result.to(out_ptr.dtype.element_ty), mask=is_result)


def conv(
    arguments: tuple[Maps, ...],
    weight_FTIO: Tensor,
    bias_FO: Tensor | None,
    ends_F: Tensor,
    out_GHWO: Tensor,
    dilation: int = 1,
    residual: Maps | None = None,
    relu: bool = False,
    mask_GHWO: Tensor | None = None,
) -> None:
    """Write the convolution of each row with the weights of its function, which keeps the size of the maps.

    Args:
        arguments: one argument of G rows, sorted by function; or two, of which a 1x1 convolution reads the
            concatenation.
        weight_FTIO: contiguous. T is 1, 9, 25 and so on.
        bias_FO: None for no bias.
        ends_F: the end of the rows of each function, int32.
        out_GHWO: the maps to write.
        residual: maps of O channels that are added before the ReLU.
        relu: apply a ReLU at the end.
        mask_GHWO: the result is 0 where this is not positive, as in the backward pass of a ReLU.
    """
    first, *others = arguments
    rows, height, width, outputs = out_GHWO.shape
    taps = weight_FTIO.shape[1]
    count = len(ends_F)
    # The kernel gets some tensor in place of each that is None, and does not read it.
    second = others[0] if others else first
    bias = weight_FTIO if bias_FO is None else bias_FO
    residual_maps = first if residual is None else residual
    mask = first.buffer if mask_GHWO is None else mask_GHWO

    def grid(chosen: dict[str, int]) -> tuple[int, int]:
        full_tiles = triton.cdiv(rows * height * width, chosen["BLOCK_M"])
        # Every function may have one tile that is not full.
        return full_tiles + count, triton.cdiv(outputs, chosen["BLOCK_N"])

    with torch.cuda.device_of(out_GHWO):
        conv_kernel[grid](
            *first,
            *second,
            weight_FTIO, bias,
            *residual_maps,
            mask, out_GHWO,
            ends_F, count, rows.bit_length() // 2,
            H=height, W=width,
            FIRST=first.buffer.shape[3],
            SECOND=second.buffer.shape[3] if others else 0,
            OUTPUTS=outputs,
            TAPS=taps,
            SIDE=round(taps**0.5),
            DILATION=dilation,
            FUNCTIONS=_padded(count),
            HAS_BIAS=bias_FO is not None,
            HAS_RESIDUAL=residual is not None,
            HAS_MASK=mask_GHWO is not None,
            RELU=relu,
        )  # fmt: skip


# Gradients of weights


@triton.jit
def _gradients(
    gradient_ptr, gradient_rows_ptr,
    position, start, count, output,
    H: tl.constexpr, W: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Return the gradients of some of the positions of the pairs from `start` on, and of some output channels."""
    is_position = position < count
    row = tl.load(gradient_rows_ptr + start + position // (H * W), mask=is_position, other=0)
    at = row * (H * W) + position % (H * W)
    return tl.load(
        gradient_ptr + at[:, None] * OUTPUTS + output[None, :],
        mask=is_position[:, None] & (output < OUTPUTS)[None, :],
        other=0.0,
    )


@triton.jit
def _add_pairs(
    total,
    x_ptr, x_rows_ptr, gradient_ptr, gradient_rows_ptr,
    start, count, tap, input, output,
    H: tl.constexpr, W: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    SIDE: tl.constexpr, DILATION: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the gradient of a tap, over `count` positions of the pairs from `start` on, added to `total`."""
    down = (tap // SIDE - SIDE // 2) * DILATION
    right = (tap % SIDE - SIDE // 2) * DILATION
    for begin in range(0, count, BLOCK_K):
        position = begin + tl.arange(0, BLOCK_K)
        is_position = position < count
        pair = start + position // (H * W)
        at = position % (H * W)
        from_y = at // W + down
        from_x = at % W + right
        is_inside = _is_inside(is_position, from_y, from_x, H, W)
        x_row = tl.load(x_rows_ptr + pair, mask=is_position, other=0)
        from_at = x_row * (H * W) + from_y * W + from_x
        values = tl.load(
            x_ptr + from_at[None, :] * INPUTS + input[:, None],
            mask=is_inside[None, :] & (input < INPUTS)[:, None],
            other=0.0,
        )
        gradients = _gradients(gradient_ptr, gradient_rows_ptr, position, start, count, output, H, W, OUTPUTS)
        total = _dot(values, gradients, total)
    return total


@triton.autotune(
    configs=CONFIGS,
    key=["INPUTS", "OUTPUTS", "TAPS", "magnitude"],
    reset_to_zero=["of_weight_ptr", "of_bias_ptr"],
    cache_results=not IS_INTERPRETED,
)
@triton.jit(do_not_specialize=["num_functions", "pairs", "magnitude"])
def weight_gradient_kernel(
    x_ptr, x_rows_ptr,
    gradient_ptr, gradient_rows_ptr,
    ends_ptr, of_weight_ptr, of_bias_ptr,
    num_functions, pairs, magnitude,
    H: tl.constexpr, W: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    TAPS: tl.constexpr, SIDE: tl.constexpr, DILATION: tl.constexpr,
    FUNCTIONS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add a tile of BLOCK_M input channels of one tap and BLOCK_N output channels, over `pairs` pairs of a function."""
    function, start, end, piece = _piece(ends_ptr, num_functions, 1, pairs, FUNCTIONS)
    if function == num_functions:
        return
    start += piece * pairs
    count = tl.minimum(end - start, pairs) * (H * W)
    blocks = (INPUTS + BLOCK_M - 1) // BLOCK_M
    tap = tl.program_id(1) // blocks
    block = tl.program_id(1) % blocks
    input = block * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_input = input < INPUTS
    is_output = output < OUTPUTS

    of_weight = _add_pairs(
        tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32),
        x_ptr, x_rows_ptr, gradient_ptr, gradient_rows_ptr,
        start, count, tap, input, output,
        H, W, INPUTS, OUTPUTS, SIDE, DILATION, BLOCK_K,
    )  # fmt: skip
    row = (function.to(tl.int64) * TAPS + tap) * INPUTS + input
    to = of_weight_ptr + row[:, None] * OUTPUTS + output[None, :]
    tl.atomic_add(to, of_weight, mask=is_input[:, None] & is_output[None, :], sem="relaxed")
    if tl.program_id(1) == 0:  # one of the programs with the same gradients
        of_bias = tl.zeros((BLOCK_N,), dtype=tl.float32)
        for begin in range(0, count, BLOCK_K):
            position = begin + tl.arange(0, BLOCK_K)
            gradients = _gradients(gradient_ptr, gradient_rows_ptr, position, start, count, output, H, W, OUTPUTS)
            of_bias += tl.sum(gradients.to(tl.float32), 0)
        tl.atomic_add(of_bias_ptr + function * OUTPUTS + output, of_bias, mask=is_output, sem="relaxed")


def weight_gradient(x: Maps, gradient: Maps, ends_F: Tensor, taps: int, dilation: int = 1) -> tuple[Tensor, Tensor]:
    """Return the gradients of weights and biases, float32, (F, T, I, O) and (F, O), over all calls of a step.

    Args:
        x: the inputs of the convolutions, N rows, sorted by function.
        gradient: the gradients of their outputs, N rows in the same order.
        ends_F: the end of the rows of each function, int32. The gradients of a function without rows are 0.
    """
    _, height, width, inputs = x.buffer.shape
    outputs = gradient.buffer.shape[3]
    count = len(ends_F)
    rows = len(x.rows)
    of_weight = x.buffer.new_zeros(count, taps, inputs, outputs, dtype=torch.float32)
    of_bias = x.buffer.new_zeros(count, outputs, dtype=torch.float32)
    # Some functions have many more pairs than others: 120 of 660 in a minibatch of 64 programs.
    tiles = taps * triton.cdiv(inputs, LARGEST_TILE) * triton.cdiv(outputs, LARGEST_TILE)
    pairs = triton.cdiv(rows * tiles, WEIGHT_PROGRAMS)

    def grid(chosen: dict[str, int]) -> tuple[int, int, int]:
        pieces = triton.cdiv(rows, pairs) + count
        blocks = triton.cdiv(inputs, chosen["BLOCK_M"])
        return pieces, taps * blocks, triton.cdiv(outputs, chosen["BLOCK_N"])

    with torch.cuda.device_of(of_weight):
        weight_gradient_kernel[grid](
            *x,
            *gradient,
            ends_F, of_weight, of_bias,
            count, pairs, rows.bit_length() // 2,
            H=height, W=width,
            INPUTS=inputs, OUTPUTS=outputs,
            TAPS=taps,
            SIDE=round(taps**0.5),
            DILATION=dilation,
            FUNCTIONS=_padded(count),
        )  # fmt: skip
    return of_weight, of_bias


def _padded(num_functions: int) -> int:
    """Return a power of two, the same for most engines, so that kernels are compiled once."""
    return max(64, triton.next_power_of_2(num_functions))
