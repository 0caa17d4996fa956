"""Replaces DTensor's sharding strategies by our own, for good or inside a context."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from strategies.embedding import renorm
from strategies.embedding import sharding as embedding
from strategies.embedding.ops import ROW_POWERS
from strategies.embedding_bag import sharding as embedding_bag
from strategies.embedding_bag.ops import BAG_OPS
from strategies.fill_rules import FILLING_OPS
from strategies.remedies import REMEDIES
from strategies.reshape_rules import GUARDS, install_embedding_bag, replaced_embedding_bag
from verifier.execution.imports import once_imported
from verifier.execution.remedies import remedied
from verifier.torch_internals.registries import (
    guarded,
    install_guard,
    install_handler,
    install_sharded_op,
    replaced_handler,
    replaced_sharded_op,
)

__all__ = ["HANDLERS", "SHARDED_OPS", "install", "install_remedies", "installed", "take_back_remedies"]

SHARDED_OPS = (embedding.LOOKUP, embedding.GRADIENT, ROW_POWERS, *BAG_OPS, *FILLING_OPS)
"""The ops that DTensor runs by our own rules and kernels."""
HANDLERS = renorm.HANDLERS | embedding_bag.HANDLERS
"""The ops for which DTensor calls a function of ours, which computes them by other ops."""


def install() -> None:
    """Install all of them for good. A second call changes nothing."""
    for sharded in SHARDED_OPS:
        install_sharded_op(sharded)
    for op, handler in HANDLERS.items():
        install_handler(op, handler)
    for op, guard in GUARDS.items():
        install_guard(op, guard)
    install_embedding_bag()


_remedies = ExitStack()
_in_force: list[str] = []


def install_remedies() -> None:
    """Put all our remedies in force for good. A second call changes nothing.

    An import that calls this has them in force once it has run: what they change does not count as registered by it.
    """
    once_imported(_put_in_force)


def _put_in_force() -> None:
    if not _in_force:
        _in_force.extend(remedy.name for remedy in REMEDIES.remedies)
        _remedies.enter_context(remedied(_in_force))
        atexit.register(take_back_remedies)  # while modules can still be imported


def take_back_remedies() -> None:
    """Take back what :func:`install_remedies` has put in force."""
    _remedies.close()
    _in_force.clear()


@contextmanager
def installed() -> Iterator[None]:
    """Install all of them inside the block, and restore DTensor's own strategies after it."""
    with ExitStack() as stack:
        for sharded in SHARDED_OPS:
            stack.enter_context(replaced_sharded_op(sharded))
        for op, handler in HANDLERS.items():
            stack.enter_context(replaced_handler(op, handler))
        for op, guard in GUARDS.items():
            stack.enter_context(guarded(op, guard))
        stack.enter_context(replaced_embedding_bag())
        yield
