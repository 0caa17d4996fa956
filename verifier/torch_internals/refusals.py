"""Which exceptions are DTensor's clear refusals."""

from __future__ import annotations

import os
import re
from types import CodeType

from torch.distributed.tensor import DTensor

__all__ = [
    "is_refusal",
    "raised_in",
    "returns_none",
]

_BACKEND_REFUSALS = (
    "Cannot use ReduceOp",  # gloo and nccl, for a reduction that they lack
    "Unsupported data type",
    "Invalid scalar type",
)
_REFUSALS = (
    "Please redistribute the tensor before this operation",  # a view must not communicate
    "Please redistribute the input first",  # as above
    "which is disallowed by the current operator",  # unbind along a sharded dim
    "redistributing to Partial is for internal use only",
    "does not support complex tensors",  # an all-reduce by product, minimum or maximum
    "got mixed torch.Tensor and DTensor",  # if a function of torch makes plain tensors itself, say
    "for tensor parallel convolution",  # for some strides, dilations and sizes
    "cannot be evenly sharded",  # nll_loss, whose mean would be biased
)
_FAILURES = ("Unsupported op strategy type",)
"""What DTensor says of a strategy that returns no strategy."""
_NOT_REGISTERED = re.compile(r"Operator (\S+) does not have a sharding strategy registered")
"""What DTensor says of an op without a strategy, and of one whose strategy returns None."""
_SAYS_SO = re.compile(r"\b(not (yet )?supported|unsupported|(does not|doesn't|cannot) support)\b", re.IGNORECASE)


def is_refusal(error: BaseException) -> bool:
    """Return True if DTensor or the backend says plainly that it does not support the call.

    ``NotImplementedError`` is the documented way. The communication backends and the view ops raise RuntimeError, and
    their refusals are recognised by known messages. Any other exception from DTensor must say so in its message.
    """
    if isinstance(error, NotImplementedError):
        return not returns_none(error)
    text = str(error)
    if isinstance(error, RuntimeError | ValueError) and text.startswith(_BACKEND_REFUSALS):
        return True
    if isinstance(error, RuntimeError | ValueError) and any(refusal in text for refusal in _REFUSALS):
        return True
    return _raised_by_dtensor(error) and text not in _FAILURES and bool(_SAYS_SO.search(text))


def returns_none(error: BaseException) -> bool:
    """Return whether DTensor says that an op has no strategy, and it has one, which has returned None."""
    named = _NOT_REGISTERED.match(str(error))
    strategies = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    return named is not None and any(str(op) == named[1] for op in strategies)


def _raised_by_dtensor(error: BaseException) -> bool:
    """Return whether code of torch's distributed package, and not a kernel, raised the exception."""
    code = raised_in(error)
    return code is not None and f"{os.sep}torch{os.sep}distributed{os.sep}" in code.co_filename


def raised_in(error: BaseException) -> CodeType | None:
    """Return the code that raised ``error``; None if it has not been raised."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return None if step is None else step.tb_frame.f_code
