"""Puts remedies in force in a process, and takes them back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch.distributed.device_mesh import DeviceMesh

from verifier.core.remedies import installed_remedies
from verifier.core.wording import did_you_mean
from verifier.torch_internals.recording import forget_calls

__all__ = ["put_in_force", "remedied"]


@contextmanager
def remedied(names: Iterable[str]) -> Iterator[None]:
    """Have the named remedies in force inside the block, with DTensor's caches emptied at both ends.

    Raises
    ------
    ValueError
        If no installed package declares a remedy of that name.
    """
    installed = installed_remedies()
    with ExitStack() as stack:
        try:
            for name in names:
                if name not in installed:
                    raise ValueError(f"remedy {name!r} is not installed{did_you_mean(name, installed)}")
                stack.enter_context(installed[name].apply())
            forget_calls()
            yield
        finally:
            stack.close()
            forget_calls()


_in_force = ExitStack()


def put_in_force(mesh: DeviceMesh, names: tuple[str, ...]) -> None:
    """Have exactly the named remedies in force in this rank, until the next call; a task of ranks calls this."""
    _in_force.close()
    if names:
        _in_force.enter_context(remedied(names))
