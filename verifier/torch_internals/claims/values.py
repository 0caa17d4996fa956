"""What DTensor answers when it is asked about a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from verifier.torch_internals.placements import Combination, Placements

__all__ = ["ListedRule", "Propagation", "RuleFailure", "Slot"]

ListedRule = tuple[Combination, tuple[Placements | None, ...]]
"""The placements of the inputs, and of the results: None for one that is no tensor."""


@dataclass(frozen=True)
class Slot:
    """Stands for tensor argument number ``index`` in a call that DTensor has rewritten."""

    index: int


@dataclass(frozen=True)
class Propagation:
    """What DTensor decides, on one rank, for a call with given placements of its tensors.

    Parameters
    ----------
    inputs
        The placements to which DTensor redistributes each tensor argument before it runs the op.
    outputs
        The placements of each result, None for one that is no tensor; None if the op returns no DTensor.
    call
        ``(op, args)`` if DTensor runs another op or other arguments than it was given; else None. A :class:`Slot`
        stands for each tensor.
    """

    inputs: tuple[Placements, ...]
    outputs: tuple[Placements | None, ...] | None
    call: tuple[Callable[..., object], tuple[object, ...]] | None = None


@dataclass(frozen=True)
class RuleFailure:
    """How DTensor fails when it is asked for rules: it raises what is no refusal, or does not come back.

    Parameters
    ----------
    kind
        Type of the exception; empty if DTensor does not come back.
    message
        Its message.
    where
        The function that raised.
    """

    kind: str
    message: str
    where: str = ""
