"""``_scaled_mm`` on the CPU with scales for blocks, which CUDA takes and torch's own CPU kernel (2.13.0) refuses.

There are scales of float32 for blocks of 1 x 128 and of 128 x 128 elements, and scales of the format MX for blocks of
1 x 32. Scales of MX have one dim: those of 128 rows and of 4 blocks stand together, in the order that CUDA calls
SWIZZLE_32_4_4, and missing rows and blocks are filled up.
"""

from __future__ import annotations

import torch

from strategies.kernels.registering import registered_beside

__all__ = ["product"]

_BLOCK, _MX_BLOCK, _MX_ROWS, _MX_BLOCKS = 128, 32, 128, 4


def _blocks(extent: int, block: int) -> int:
    return -(-extent // block)


def _mx_shape(rows: int, inner: int) -> tuple[int, int]:
    """Return the tiles of 128 rows by 4 blocks that the scales of a matrix of the format MX fill."""
    return _blocks(rows, _MX_ROWS), _blocks(_blocks(inner, _MX_BLOCK), _MX_BLOCKS)


def _is_mx(scale: torch.Tensor) -> bool:
    return scale.dtype == torch.float8_e8m0fnu


def _fits_mx(rows: int, inner: int, scale: torch.Tensor) -> bool:
    down, across = _mx_shape(rows, inner)
    return scale.numel() == down * across * _MX_ROWS * _MX_BLOCKS and scale.is_contiguous()


def _block_extents(extent: int, scales: int) -> tuple[int, ...]:
    """Return how many elements each scale of a dim may stand for."""
    return tuple(block for block in (1, _BLOCK) if scales == _blocks(extent, block))


def _covers(
    self: torch.Tensor, mat2: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, *rest: object
) -> bool:  # fmt: skip
    """Return whether the scales are of one of the documented layouts for blocks."""
    (rows, inner), columns = self.shape, mat2.shape[1]
    if _is_mx(scale_a) and _is_mx(scale_b):
        return _fits_mx(rows, inner, scale_a) and _fits_mx(columns, inner, scale_b)
    if not scale_a.ndim == scale_b.ndim == 2 or {scale_a.dtype, scale_b.dtype} != {torch.float32}:
        return False
    blocks = _blocks(inner, _BLOCK)
    along_inner = scale_a.shape[1] == scale_b.shape[0] == blocks
    by_rows, by_columns = _block_extents(rows, scale_a.shape[0]), _block_extents(columns, scale_b.shape[1])
    return along_inner and bool(by_rows and by_columns) and 1 in (*by_rows, *by_columns)


def _spread(scale: torch.Tensor, extents: tuple[int, int]) -> torch.Tensor:
    """Return the scale of each element of a matrix."""
    for dim, extent in enumerate(extents):
        block = _block_extents(extent, scale.shape[dim])[0]
        scale = scale.repeat_interleave(block, dim).narrow(dim, 0, extent)
    return scale


def _spread_mx(scale: torch.Tensor, rows: int, inner: int) -> torch.Tensor:
    down, across = _mx_shape(rows, inner)
    tiles = scale.float().view(down, across, 32, 4, _MX_BLOCKS).permute(0, 3, 2, 1, 4)
    by_block = tiles.reshape(down * _MX_ROWS, across * _MX_BLOCKS)[:rows]
    return by_block.repeat_interleave(_MX_BLOCK, 1)[:, :inner]


def _product(
    self: torch.Tensor,
    mat2: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    (rows, inner), columns = self.shape, mat2.shape[1]
    if _is_mx(scale_a):
        first, second = _spread_mx(scale_a, rows, inner), _spread_mx(scale_b, columns, inner).t()
    else:
        first, second = _spread(scale_a, (rows, inner)), _spread(scale_b, (inner, columns))
    result = (self.float() * first) @ (mat2.float() * second)
    if bias is not None:
        result = result + bias
    if scale_result is not None:
        result = result * scale_result
    return result.to(out_dtype or self.dtype)


product = registered_beside("_scaled_mm", _product, _covers)
