"""Ops of one's own that tests declare examples for: they are registered once in a process."""

from __future__ import annotations

import torch

OPS = torch.ops.test_own_ops
LIBRARY = torch.library.Library("test_own_ops", "FRAGMENT")


@torch.library.custom_op("test_own_ops::scale", mutates_args=())
def scale(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return rows * factors[:, None]


@torch.library.custom_op("test_own_ops::softmax", mutates_args=())
def softmax(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)


@torch.library.custom_op("test_own_ops::softmax_of", mutates_args=())
def softmax_of(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return x.softmax(dim)


@torch.library.custom_op("test_own_ops::attend", mutates_args=())
def attend(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT).softmax(-1) @ k


@torch.library.custom_op("test_own_ops::total", mutates_args=())
def total(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.sum(dim)


@torch.library.custom_op("test_own_ops::pick", mutates_args=())
def pick(table: torch.Tensor, ids: torch.Tensor, rows: int) -> torch.Tensor:
    return table[:rows].index_select(0, ids)


@torch.library.custom_op("test_own_ops::looked_up", mutates_args=())
def looked_up(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    inside = ids < len(table)
    return torch.where(inside[..., None], table[ids.clamp(0, len(table) - 1)], 0.0)


@torch.library.custom_op("test_own_ops::bump_", mutates_args=("x",))
def bump_(x: torch.Tensor, by: float) -> None:
    x.add_(by)


@torch.library.custom_op("test_own_ops::reduced", mutates_args=())
def reduced(x: torch.Tensor, how: str) -> torch.Tensor:
    return x.amax(0) if how == "max" else x.sum(0)


@torch.library.custom_op("test_own_ops::shifted", mutates_args=())
def shifted(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.relu() if bias is None else x + bias


@torch.library.custom_op("test_own_ops::rotated", mutates_args=())
def rotated(x: torch.Tensor, by: list[int]) -> torch.Tensor:
    return x.roll(by, list(range(len(by))))


@torch.library.custom_op("test_own_ops::converted", mutates_args=())
def converted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype, copy=True)


@torch.library.custom_op("test_own_ops::leaky", mutates_args=())
def leaky(x: torch.Tensor, slope: float) -> torch.Tensor:
    return torch.where(x > 0, x, x * slope)


@torch.library.custom_op("test_own_ops::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


@torch.library.custom_op("test_own_ops::folded", mutates_args=())
def folded(x: torch.Tensor, mean: bool = False) -> torch.Tensor:
    return x.mean(0) if mean else x.sum(0)


@torch.library.custom_op("test_own_ops::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


@torch.library.custom_op("test_own_ops::secret", mutates_args=())
def secret(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


@torch.library.custom_op("test_own_ops::peaks", mutates_args=())
def peaks(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(x.shape[0], -1, 32).amax(-1)


@torch.library.custom_op("test_own_ops::named", mutates_args=())
def named(x: torch.Tensor, mode: str) -> torch.Tensor:
    return x * len(mode)


for op in (scale, softmax, attend, bump_, noise, secret, named):
    if op is not bump_:
        op.register_fake(lambda x, *_: torch.empty_like(x))
total.register_fake(lambda x, dim: x.sum(dim))
looked_up.register_fake(lambda table, ids: table.new_empty(*ids.shape, table.shape[1]))
pick.register_fake(lambda table, ids, rows: table.new_empty(ids.shape[0], table.shape[1]))
peaks.register_fake(lambda x: x.new_empty(x.shape[0], x.shape[1] // 32))
LIBRARY.define("flagged(Tensor x, bool center, bool scale) -> Tensor")
LIBRARY.impl(
    "flagged",
    lambda x, center, scale: (x - x.mean(0) * center) / (1 + x.abs().sum(0) * scale),
    "CompositeExplicitAutograd",
)
LIBRARY.define("mixed(Tensor[] parts, *, Tensor scale, Tensor? bias=None) -> Tensor[]")
LIBRARY.impl(
    "mixed",
    lambda parts, *, scale, bias=None: [part * scale + (0 if bias is None else bias) for part in parts],
    "CompositeExplicitAutograd",
)


LIBRARY.define("gated(Tensor x, Tensor? bias=None, Tensor? mask=None, Tensor? gate=None) -> Tensor")


def gated(x: torch.Tensor, bias: object = None, mask: object = None, gate: object = None) -> torch.Tensor:
    kept = x if bias is None else x + bias
    for factor in (mask, gate):
        kept = kept if factor is None else kept * factor
    return kept.clone()


LIBRARY.impl("gated", gated, "CompositeExplicitAutograd")


@torch.library.custom_op("test_own_ops::rows", mutates_args=())
def rows(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1, keepdim=True)


rows.register_fake(lambda x: x.new_empty(x.shape[:-1]))


@torch.library.custom_op("test_own_ops::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    return (x > 0).sum(1)


positive.register_fake(lambda x: x.new_empty(x.shape[0]))


@torch.library.custom_op("test_own_ops::even_rows", mutates_args=())
def even_rows(x: torch.Tensor) -> torch.Tensor:
    return x[::2].clone()


even_rows.register_fake(lambda x: x.new_empty(x.shape[0] // 2, *x.shape[1:]))


@torch.library.custom_op("test_own_ops::first_columns", mutates_args=())
def first_columns(x: torch.Tensor) -> torch.Tensor:
    return x[:, :128].sum(1)


first_columns.register_fake(lambda x: x.new_empty(x.shape[0]))


@torch.library.custom_op("test_own_ops::without_large", mutates_args=())
def without_large(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < 100, x, 0)


without_large.register_fake(torch.empty_like)


@torch.library.custom_op("test_own_ops::linear", mutates_args=())
def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x @ w.T if bias is None else x @ w.T + bias


@torch.library.custom_op("test_own_ops::multiplied", mutates_args=())
def multiplied(x: torch.Tensor, by: torch.Tensor | None = None, unread: torch.Tensor | None = None) -> torch.Tensor:
    return x * 2 if by is None else x * by


@torch.library.custom_op("test_own_ops::quartered", mutates_args=())
def quartered(x: torch.Tensor) -> torch.Tensor:
    return x / 4 if x.is_floating_point() else x // 4


@torch.library.custom_op("test_own_ops::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return torch.mul(x, 0.5).to(x.dtype)
