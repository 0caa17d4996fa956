"""Which arguments kernels take, and which check the sizes of theirs; others read or write past the end of a tensor."""

from __future__ import annotations

from strategies.opinfo.calls.call import Call, parameters
from strategies.opinfo.calls.op_facts import CODES, TRUSTING
from strategies.opinfo.calls.op_names import base_of
from verifier.torch_internals.names import OpOverload

__all__ = ["codes_of", "is_trusting", "is_unchecked"]

_CHECKED_IN_PYTHON = ("binary_cross_entropy",)
"""Ops whose functions check sizes, and whose kernels take what these refuse."""
_CHECKED_BY_META = "_linalg_"
"""Helper ops of linear algebra compute the sizes of their results first, and check those of their arguments there."""


def codes_of(op: OpOverload, name: str) -> tuple[int, ...]:
    """Return the integers that an argument of ``op`` may be, if they stand for choices; none if any may be given."""
    return CODES.get(name, ()) if op.namespace == "aten" or name == "reduction" else ()


def is_trusting(call: Call) -> bool:
    """Return whether the kernel may not check its arguments, as in helper ops that users do not call."""
    base = base_of(str(call.op))
    helper = base.startswith("_") and not base.startswith(("_foreach", "_to_copy", "_softmax", "_log_softmax"))
    return helper or base.startswith(TRUSTING)


def is_unchecked(call: Call) -> bool:
    """Return whether a change of sizes may pass unseen: by the kernel, or because torch resizes an output."""
    base = base_of(str(call.op))
    fixed = any(parameter.out for parameter in parameters(call.op)) or "backward" in base or base in _CHECKED_IN_PYTHON
    trusting = is_trusting(call) and not base.startswith(_CHECKED_BY_META)
    return fixed or trusting or base.startswith(("_foreach", "_amp_foreach"))
