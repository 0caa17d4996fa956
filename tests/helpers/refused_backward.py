"""What DTensor refuses in a backward pass, although it has accepted the forward pass: causes of torch's own."""

from __future__ import annotations

from verifier.calls.result import VerificationError
from verifier.core.verdict import VerdictKind

__all__ = ["is_refused_in_backward"]

_SAYS = ("from one partial type", "Cannot flatten unevenly sharded", "Please redistribute the tensor")


def is_refused_in_backward(error: VerificationError) -> bool:
    """Return whether a call failed only because DTensor refuses a redistribution or a view of its backward pass."""
    verdict = error.failure.verdict
    said = any(text in verdict.message for text in _SAYS)
    return verdict.kind is VerdictKind.CRASH and verdict.backward is not None and said
