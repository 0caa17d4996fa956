"""Puts our own sharding strategies in the place of DTensor's, and takes them back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from strategies.embedding import sharding as embedding
from verifier.torch_internals import install_sharded_op, replaced_sharded_op

__all__ = ["SHARDED_OPS", "install", "installed"]

SHARDED_OPS = (embedding.LOOKUP, embedding.GRADIENT)
"""The ops that DTensor is to run by our own rules and kernels."""


def install() -> None:
    """Install them all for good. To do so twice changes nothing."""
    for sharded in SHARDED_OPS:
        install_sharded_op(sharded)


@contextmanager
def installed() -> Iterator[None]:
    """Install them all inside the block, and have after it what was there before."""
    with ExitStack() as stack:
        for sharded in SHARDED_OPS:
            stack.enter_context(replaced_sharded_op(sharded))
        yield
