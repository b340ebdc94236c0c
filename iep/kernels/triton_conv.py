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


CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, num_warps=warps, num_stages=stages)
    for m, n, k, warps, stages in (
        [(16, 16, 16, 1, 1)] if IS_INTERPRETED else [(64, 64, 64, 4, 4), (128, 128, 64, 8, 3)]
    )
]
"""The tiles of the result and of the inner dimension, for few and for many rows, of which the first call of each size
chooses the faster one."""


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
    ends = tl.load(ends_ptr + functions, mask=functions < num_functions, other=0)
    starts = tl.load(ends_ptr + functions - 1, mask=(functions > 0) & (functions < num_functions), other=0)
    pieces = tl.cdiv((ends - starts) * units, size)
    pieces_until = tl.cumsum(pieces, 0)
    function = tl.minimum(tl.sum((pieces_until <= tl.program_id(0)).to(tl.int32), 0), num_functions)
    is_own = functions == function
    start, end = tl.sum(tl.where(is_own, starts, 0), 0), tl.sum(tl.where(is_own, ends, 0), 0)
    return function, start, end, tl.program_id(0) - tl.sum(tl.where(is_own, pieces_until - pieces, 0), 0)


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
    first_ptr, first_rows_ptr, second_ptr, second_rows_ptr, weight_ptr, bias_ptr, residual_ptr, residual_rows_ptr,
    mask_ptr, out_ptr, ends_ptr, num_functions, magnitude,
    H: tl.constexpr, W: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, OUTPUTS: tl.constexpr,
    TAPS: tl.constexpr, SIDE: tl.constexpr, DILATION: tl.constexpr, FUNCTIONS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_MASK: tl.constexpr, RELU: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute a tile of BLOCK_M positions and BLOCK_N channels."""
    function, start, end, tile = _piece(ends_ptr, num_functions, H * W, BLOCK_M, FUNCTIONS)
    if function == num_functions:
        return
    position = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_position = position < (end - start) * (H * W)
    row, at = start + position // (H * W), position % (H * W)
    y, x = at // W, at % W
    channel = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_channel = channel < OUTPUTS
    inner = tl.arange(0, BLOCK_K)
    result = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)

    from_ptr = first_ptr + tl.load(first_rows_ptr + row, mask=is_position, other=0)[:, None] * (H * W * FIRST)
    own_ptr = weight_ptr + function.to(tl.int64) * (TAPS * (FIRST + SECOND) * OUTPUTS)
    steps: tl.constexpr = (FIRST + BLOCK_K - 1) // BLOCK_K
    for step in range(TAPS * steps):
        tap, k = step // steps, (step % steps) * BLOCK_K + inner
        from_y, from_x = y + (tap // SIDE - SIDE // 2) * DILATION, x + (tap % SIDE - SIDE // 2) * DILATION
        is_inside = is_position & (from_y >= 0) & (from_y < H) & (from_x >= 0) & (from_x < W)
        values = tl.load(
            from_ptr + ((from_y * W + from_x) * FIRST)[:, None] + k[None, :],
            mask=is_inside[:, None] & (k < FIRST)[None, :],
            other=0.0,
        )
        weights = tl.load(
            own_ptr + tap * ((FIRST + SECOND) * OUTPUTS) + k[:, None] * OUTPUTS + channel[None, :],
            mask=(k < FIRST)[:, None] & is_channel[None, :],
            other=0.0,
        )
        result = _dot(values, weights, result)
    if SECOND > 0:  # a 1x1 convolution of the concatenation of two arguments
        from_ptr = second_ptr + tl.load(second_rows_ptr + row, mask=is_position, other=0)[:, None] * (H * W * SECOND)
        for step in range((SECOND + BLOCK_K - 1) // BLOCK_K):
            k = step * BLOCK_K + inner
            values = tl.load(
                from_ptr + (at * SECOND)[:, None] + k[None, :],
                mask=is_position[:, None] & (k < SECOND)[None, :],
                other=0.0,
            )
            weights = tl.load(
                own_ptr + (FIRST + k)[:, None] * OUTPUTS + channel[None, :],
                mask=(k < SECOND)[:, None] & is_channel[None, :],
                other=0.0,
            )
            result = _dot(values, weights, result)

    is_result = is_position[:, None] & is_channel[None, :]
    to = (row.to(tl.int64) * (H * W) + at)[:, None] * OUTPUTS + channel[None, :]
    if HAS_BIAS:
        result += tl.load(bias_ptr + function * OUTPUTS + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        residual_row = tl.load(residual_rows_ptr + row, mask=is_position, other=0)
        residual = residual_ptr + (residual_row * (H * W) + at)[:, None] * OUTPUTS + channel[None, :]
        result += tl.load(residual, mask=is_result, other=0.0).to(tl.float32)
    if RELU:
        result = tl.maximum(result, 0.0)
    if HAS_MASK:
        result = tl.where(tl.load(mask_ptr + to, mask=is_result, other=0.0) > 0, result, 0.0)
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
    (first, *others), (rows, height, width, outputs) = arguments, out_GHWO.shape
    second, count = others[0] if others else first, len(ends_F)
    residual_maps, mask = residual or first, first.buffer if mask_GHWO is None else mask_GHWO
    taps, bias = weight_FTIO.shape[1], weight_FTIO if bias_FO is None else bias_FO

    def grid(chosen: dict[str, int]) -> tuple[int, int]:  # every function may have one tile that is not full
        return triton.cdiv(rows * height * width, chosen["BLOCK_M"]) + count, triton.cdiv(outputs, chosen["BLOCK_N"])

    with torch.cuda.device_of(out_GHWO):
        conv_kernel[grid](
            *first, *second, weight_FTIO, bias, *residual_maps, mask, out_GHWO, ends_F, count, rows.bit_length() // 2,
            H=height, W=width, FIRST=first.buffer.shape[3], SECOND=second.buffer.shape[3] if others else 0,
            OUTPUTS=outputs, TAPS=taps, SIDE=round(taps**0.5), DILATION=dilation,
            FUNCTIONS=_padded(count), HAS_BIAS=bias_FO is not None,
            HAS_RESIDUAL=residual is not None, HAS_MASK=mask_GHWO is not None, RELU=relu,
        )  # fmt: skip


@triton.jit
def _gradients(
    gradient_ptr, gradient_rows_ptr, position, start, count, output,
    H: tl.constexpr, W: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Return the gradients of some of the positions of the pairs from `start` on, and of some output channels."""
    is_position = position < count
    row = tl.load(gradient_rows_ptr + start + position // (H * W), mask=is_position, other=0)
    return tl.load(
        gradient_ptr + (row * (H * W) + position % (H * W))[:, None] * OUTPUTS + output[None, :],
        mask=is_position[:, None] & (output < OUTPUTS)[None, :],
        other=0.0,
    )


@triton.autotune(
    configs=CONFIGS,
    key=["INPUTS", "OUTPUTS", "TAPS", "magnitude"],
    reset_to_zero=["of_weight_ptr", "of_bias_ptr"],
    cache_results=not IS_INTERPRETED,
)
@triton.jit(do_not_specialize=["num_functions", "pairs", "magnitude"])
def weight_gradient_kernel(
    x_ptr, x_rows_ptr, gradient_ptr, gradient_rows_ptr, ends_ptr, of_weight_ptr, of_bias_ptr,
    num_functions, pairs, magnitude,
    H: tl.constexpr, W: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, TAPS: tl.constexpr,
    SIDE: tl.constexpr, DILATION: tl.constexpr, FUNCTIONS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add a tile of BLOCK_M input channels of one tap and BLOCK_N output channels, over `pairs` pairs of a function."""
    function, start, end, piece = _piece(ends_ptr, num_functions, 1, pairs, FUNCTIONS)
    if function == num_functions:
        return
    start += piece * pairs
    count = tl.minimum(end - start, pairs) * (H * W)
    blocks = (INPUTS + BLOCK_M - 1) // BLOCK_M
    tap, block = tl.program_id(1) // blocks, tl.program_id(1) % blocks
    input = block * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    down, right = (tap // SIDE - SIDE // 2) * DILATION, (tap % SIDE - SIDE // 2) * DILATION
    result = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for begin in range(0, count, BLOCK_K):
        position = begin + tl.arange(0, BLOCK_K)
        is_position = position < count
        pair, at = start + position // (H * W), position % (H * W)
        from_y, from_x = at // W + down, at % W + right
        is_inside = is_position & (from_y >= 0) & (from_y < H) & (from_x >= 0) & (from_x < W)
        x_row = tl.load(x_rows_ptr + pair, mask=is_position, other=0)
        values = tl.load(
            x_ptr + (x_row * (H * W) + from_y * W + from_x)[None, :] * INPUTS + input[:, None],
            mask=is_inside[None, :] & (input < INPUTS)[:, None],
            other=0.0,
        )
        gradients = _gradients(gradient_ptr, gradient_rows_ptr, position, start, count, output, H, W, OUTPUTS)
        result = _dot(values, gradients, result)
    to = of_weight_ptr + ((function.to(tl.int64) * TAPS + tap) * INPUTS + input)[:, None] * OUTPUTS + output[None, :]
    tl.atomic_add(to, result, mask=(input < INPUTS)[:, None] & (output < OUTPUTS)[None, :], sem="relaxed")
    if tl.program_id(1) == 0:  # one of the programs with the same gradients
        of_bias = tl.zeros((BLOCK_N,), dtype=tl.float32)
        for begin in range(0, count, BLOCK_K):
            position = begin + tl.arange(0, BLOCK_K)
            gradients = _gradients(gradient_ptr, gradient_rows_ptr, position, start, count, output, H, W, OUTPUTS)
            of_bias += tl.sum(gradients.to(tl.float32), 0)
        tl.atomic_add(of_bias_ptr + function * OUTPUTS + output, of_bias, mask=output < OUTPUTS, sem="relaxed")


def weight_gradient(x: Maps, gradient: Maps, ends_F: Tensor, taps: int, dilation: int = 1) -> tuple[Tensor, Tensor]:
    """Return the gradients of weights and biases, float32, (F, T, I, O) and (F, O), over all calls of a step.

    Args:
        x: the inputs of the convolutions, N rows, sorted by function.
        gradient: the gradients of their outputs, N rows in the same order.
        ends_F: the end of the rows of each function, int32. The gradients of a function without rows are 0.
    """
    _, height, width, inputs = x.buffer.shape
    outputs, count = gradient.buffer.shape[3], len(ends_F)
    of_weight = x.buffer.new_zeros(count, taps, inputs, outputs, dtype=torch.float32)
    of_bias = x.buffer.new_zeros(count, outputs, dtype=torch.float32)
    # Some functions have many more pairs than others: 120 of 660 in a minibatch of 64 programs.
    tiles = taps * triton.cdiv(inputs, LARGEST_TILE) * triton.cdiv(outputs, LARGEST_TILE)
    pairs = triton.cdiv(len(x.rows) * tiles, WEIGHT_PROGRAMS)

    def grid(chosen: dict[str, int]) -> tuple[int, int, int]:
        pieces = triton.cdiv(len(x.rows), pairs) + count
        return pieces, taps * triton.cdiv(inputs, chosen["BLOCK_M"]), triton.cdiv(outputs, chosen["BLOCK_N"])

    with torch.cuda.device_of(of_weight):
        weight_gradient_kernel[grid](
            *x, *gradient, ends_F, of_weight, of_bias, count, pairs, len(x.rows).bit_length() // 2,
            H=height, W=width, INPUTS=inputs, OUTPUTS=outputs, TAPS=taps, SIDE=round(taps**0.5), DILATION=dilation,
            FUNCTIONS=_padded(count),
        )  # fmt: skip
    return of_weight, of_bias


def _padded(num_functions: int) -> int:
    """Return a power of two, the same for most engines, so that kernels are compiled once."""
    return max(64, triton.next_power_of_2(num_functions))
