"""Calls of grouped and scaled matrix products, in every layout of the matrices and of the scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from strategies.kernels import SCALED_MM
from strategies.opinfo.handmade.sample import Draw, Way

__all__ = ["WAYS"]


def _columns_first(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the strides of a transposed matrix."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


# ------------------------------------------------------------------------------------------------------------- grouped
# groups, rows, inner and columns: multiples of 16 bytes, so that the kernels take a matrix by rows and by columns
_GROUPED = ((3, 40, 16, 24), (2, 24, 32, 16), (8, 8, 8, 8), (4, 16, 48, 32), (5, 32, 16, 40))
_ENDS = "the ends of the groups fit these matrices only: only what DTensor claims is tried"


def _ends(draw: Draw, groups: int, extent: int, step: int) -> torch.Tensor:
    """Return where the groups end, as multiples of ``step``; some groups may be empty."""
    inner = draw.integers(0, extent // step + 1, groups - 1).sort().values * step
    return torch.cat([inner, torch.tensor([extent])]).to(torch.int32)


@dataclass(frozen=True)
class _Grouped:
    """A grouped product of matrices of ``left`` and ``right`` dims.

    The dim that both of two matrices of 2 dims share, or that the matrix of 3 dims lacks, consists of the groups.
    """

    left: int
    right: int
    columns_first: bool
    dtype: torch.dtype

    def arguments(self, draw: Draw) -> tuple[object, ...]:
        groups, rows, inner, columns = _GROUPED[draw.size]
        # large beside the summands of a Partial, which bfloat16 rounds; float32 keeps them all
        factor = 16 if self.dtype is torch.bfloat16 else 1
        a = draw.values(*([groups] if self.left == 3 else []), rows, inner, dtype=self.dtype) * factor
        b = draw.values(*([groups] if self.right == 3 else []), inner, columns, dtype=self.dtype) * factor
        cut = {(2, 3): (rows, 1), (3, 2): (columns, 8), (2, 2): (inner, 8)}.get((self.left, self.right))
        ends = None if cut is None else _ends(draw, groups, *cut)
        return a, _columns_first(b) if self.columns_first else b, ends


def _grouped() -> Iterator[Way]:
    for left, right in ((2, 3), (3, 2), (2, 2), (3, 3)):
        for columns_first in (True, False) if right == 2 else (False,):  # a file keeps no such strides of 3 dims
            label = f"{left}-d by {right}-d, the second by {'columns' if columns_first else 'rows'}"
            limit = "" if left == right == 3 else _ENDS
            for dtype, note in ((torch.float32, ""), (torch.bfloat16, ", bfloat16")):
                make = _Grouped(left, right, columns_first, dtype).arguments
                exact = dtype is torch.float32
                yield Way("aten._grouped_mm.default", label + note, make, exact=exact, claims_only=limit)


# -------------------------------------------------------------------------------------------------------------- scaled
# rows, inner and columns without blocks; CUDA needs multiples of 16 for the last two
_SCALED = ((10, 48, 32), (2, 16, 64), (32, 32, 32), (7, 64, 16), (16, 80, 48))
# rows, inner and columns with blocks: shards of the inner dim end within a block, or at its end
_BLOCKED = ((6, 384, 16), (4, 256, 32), (16, 512, 16), (9, 640, 48), (3, 768, 16))
_SQUARES = ((4, 384, 256), (2, 256, 384), (6, 128, 512), (3, 640, 256), (5, 256, 640))
_TALL = ((256, 384, 16), (384, 256, 32), (512, 128, 16), (256, 640, 16), (640, 256, 16))
_MX = ((256, 32, 16), (16, 128, 256), (128, 64, 32), (384, 32, 16), (16, 160, 128))


@dataclass(frozen=True)
class _Scales:
    """A layout of scales: how many elements a scale stands for along rows and inner dim, and inner dim and columns.

    An extent of 0 stands for the whole dim.
    """

    label: str
    sizes: tuple[tuple[int, int, int], ...]
    first: tuple[int, int]
    second: tuple[int, int]
    stand_in: bool = True
    dtype: torch.dtype = torch.float32
    ndim: int = 2

    def arguments(self, draw: Draw) -> tuple[object, ...]:
        rows, inner, columns = self.sizes[draw.size]
        a = draw.values(rows, inner, dtype=torch.float8_e4m3fn)
        b = _columns_first(draw.values(inner, columns)).to(torch.float8_e4m3fn)
        scales = (self._scale(draw, self.first, rows, inner), self._scale(draw, self.second, inner, columns))
        return a, b, *scales, None, None, self.dtype

    def buffer(self, draw: Draw) -> Mapping[str, object]:
        rows, _, columns = self.sizes[draw.size]
        return {"out": torch.full((rows, columns), float("nan"), dtype=self.dtype)}

    def _scale(self, draw: Draw, blocks: tuple[int, int], *extents: int) -> torch.Tensor:
        shape = [-(-extent // block) if block else 1 for extent, block in zip(extents, blocks, strict=True)]
        scale = draw.integers(1, 5, *shape).to(torch.float32)
        return scale if self.ndim == 2 else scale.reshape([1] * self.ndim)

    def ways(self) -> Iterator[Way]:
        path = SCALED_MM if self.stand_in else ""
        yield Way("aten._scaled_mm.default", self.label, self.arguments, exact=True, path=path)
        if not self.stand_in:
            yield Way("aten._scaled_mm.out", self.label, self.arguments, self.buffer, exact=True)


def _mx(draw: Draw) -> tuple[object, ...]:
    """Return a call with the scales of the format MX, of one dim: 512 for each tile of 128 rows by 4 blocks."""
    rows, inner, columns = _MX[draw.size]
    a, b = draw.values(rows, inner), draw.values(inner, columns)
    one, other = (2.0 ** draw.integers(-1, 3, 512 * -(-extent // 128) * -(-inner // 128)) for extent in (rows, columns))
    return (
        a.to(torch.float8_e4m3fn), _columns_first(b).to(torch.float8_e4m3fn),
        one.to(torch.float8_e8m0fnu), other.to(torch.float8_e8m0fnu), None, None, torch.float32,
    )  # fmt: skip


_LAYOUTS = (
    _Scales("one scale", _SCALED, (0, 0), (0, 0), stand_in=False, ndim=0),
    _Scales("one scale of one dim", _SCALED, (0, 0), (0, 0), stand_in=False, ndim=1, dtype=torch.bfloat16),
    _Scales("one scale of two dims", _SCALED, (0, 0), (0, 0), stand_in=False),
    _Scales("a scale for each row and column", _SCALED, (1, 0), (0, 1), stand_in=False),
    _Scales("scales for blocks of 1 x 128", _BLOCKED, (1, 128), (128, 1)),
    _Scales("scales for blocks of 1 x 128 and squares", _SQUARES, (1, 128), (128, 128)),
    _Scales("scales for squares and blocks of 1 x 128", _TALL, (128, 128), (128, 1)),
)


WAYS: tuple[Way, ...] = (
    *_grouped(),
    *(way for layout in _LAYOUTS for way in layout.ways()),
    Way("aten._scaled_mm.default", "scales of the format MX", _mx, exact=True, path=SCALED_MM),
)
