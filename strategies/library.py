"""The library ``sharded_rows``: our own operators, which together compute ops that no single rule describes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from verifier.planning.boundary import declares
from verifier.torch_internals.dtensors import is_fake
from verifier.torch_internals.sharded_ops import RankView, ShardedOp

__all__ = ["sharded_op"]

declares("torch.ops.sharded_rows")


def sharded_op(
    name: str,
    schema: str,
    rules: Callable[[object, tuple[object, ...], dict[str, object]], list[list[Placement | None]]],
    kernel: Callable[..., torch.Tensor],
    shape: Callable[..., torch.Tensor],
    static_argnum: int,
) -> ShardedOp:
    """Define ``sharded_rows::name`` and return it with its rules.

    Parameters
    ----------
    schema
        Arguments and result, tensors first, without defaults.
    rules, kernel, static_argnum
        See :class:`verifier.torch_internals.sharded_ops.ShardedOp`. On plain tensors the op calls the kernel as on a
        mesh of one rank.
    shape
        Returns an empty tensor with the shape and dtype of the result.
    """

    def whole(*args: object) -> torch.Tensor:
        shapes = tuple(tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor))
        return kernel(RankView((1,), (0,), shapes, ((Replicate(),),) * len(shapes)), *args)

    def part(view: RankView, *args: object) -> torch.Tensor:
        return shape(*args) if any(map(is_fake, args)) else kernel(view, *args)

    torch.library.custom_op(f"sharded_rows::{name}", whole, mutates_args=(), schema=schema).register_fake(shape)
    return ShardedOp(getattr(torch.ops.sharded_rows, name).default, rules, part, static_argnum=static_argnum)
