"""Which exceptions are DTensor's clear refusals, and which are those of a lost connection."""

from __future__ import annotations

import os
import re
from types import CodeType

import torch
from torch.autograd.graph import _engine_run_backward
from torch.distributed import DistBackendError
from torch.distributed.tensor import DTensor

__all__ = [
    "asks_otherwise",
    "is_cut_off",
    "is_refusal",
    "lacks_strategy",
    "raised_in",
    "returns_none",
]

_BACKEND_REFUSALS = (
    "Cannot use ReduceOp",  # gloo and nccl, for a reduction that they lack
    "Unsupported data type",
    "Invalid scalar type",
)
_LOST = ("Connection closed by peer", "Connection reset by peer")
"""What gloo says of a process that has ended, or has dropped its connections. Gloo has no type for it."""
_REDUCTIONS = ("does not support complex tensors",)  # an all-reduce by product, minimum or maximum
_REFUSALS = (
    "Please redistribute the tensor before this operation",  # a view must not communicate
    "Please redistribute the input first",  # as above
    "Please redistribute the input explicitly before",  # unbind along a sharded dim, from 2.15 on
    "which is disallowed by the current operator",  # the same until 2.14
    "redistributing to Partial is for internal use only",
    "got mixed torch.Tensor and DTensor",  # if a function of torch makes plain tensors itself, say
    "for tensor parallel convolution",  # for some strides, dilations and sizes
    "cannot be evenly sharded",  # nll_loss, whose mean would be biased
)
_FAILURES = ("Unsupported op strategy type",)
"""What DTensor says of a strategy that returns no strategy."""
_NOT_REGISTERED = re.compile(r"Operator (\S+) does not have a sharding strategy registered")
"""What DTensor says of an op without a strategy, and of one whose strategy returns None."""
_SAYS_SO = re.compile(
    r"\b(not (yet )?supported|unsupported|(does not|doesn't|cannot) support|only\b.*\b(is|are) supported"
    r"|no valid sharding strategy)\b",
    re.IGNORECASE,
)
_OF_PYTHON = re.compile(r"not supported between instances of|unsupported operand type\(s\)")
"""What Python says of operands: a rule has taken an argument for something else."""

_ENGINE = _engine_run_backward.__code__
_TORCH = os.path.join(torch.__path__[0], "")
_DISTRIBUTED = os.path.join(_TORCH, "distributed", "")


def is_refusal(error: BaseException) -> bool:
    """Return True if DTensor or the backend says plainly that it does not support the call.

    In a backward pass, whose forward pass DTensor has accepted, an op without a strategy is no refusal: autograd calls
    the op. What other messages ask for, such as to redistribute first, nobody can do there.
    """
    if _is_of_backend(error):
        return True
    if isinstance(error, NotImplementedError):
        return not (returns_none(error) or (lacks_strategy(error) and _raised_in_backward(error)))
    return asks_otherwise(error) and not _raised_in_backward(error)


def is_cut_off(error: BaseException) -> bool:
    """Return True if the connection to another process was lost."""
    return isinstance(error, DistBackendError) or any(said in str(error) for said in _LOST)


def lacks_strategy(error: BaseException) -> bool:
    """Return True if DTensor says that an op has no sharding strategy."""
    return isinstance(error, NotImplementedError) and _NOT_REGISTERED.match(str(error)) is not None


def asks_otherwise(error: BaseException) -> bool:
    """Return True if the message asks for another call, or says that this one is not supported.

    ``NotImplementedError`` is the documented way. View ops and others raise what they like, and their refusals are
    recognised by known messages. Any other exception from DTensor, or from a rule that it asks, must say so in its
    message.
    """
    text = str(error)
    if isinstance(error, RuntimeError | ValueError) and any(refusal in text for refusal in _REFUSALS):
        return True
    says_so = _SAYS_SO.search(_OF_PYTHON.sub("", text))
    return _raised_by_dtensor(error) and text not in _FAILURES and says_so is not None


def returns_none(error: BaseException) -> bool:
    """Return whether DTensor says that an op has no strategy, and it has one, which has returned None."""
    named = _NOT_REGISTERED.match(str(error))
    strategies = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    return named is not None and any(str(op) == named[1] for op in strategies)


def _is_of_backend(error: BaseException) -> bool:
    text = str(error)
    said = text.startswith(_BACKEND_REFUSALS) or any(refusal in text for refusal in _REDUCTIONS)
    return isinstance(error, RuntimeError | ValueError) and said


def _raised_in_backward(error: BaseException) -> bool:
    """Return whether the exception came through autograd's engine."""
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code is not _ENGINE:
        step = step.tb_next
    return step is not None


def _raised_by_dtensor(error: BaseException) -> bool:
    """Return whether torch's distributed package, or a rule that it calls, and not a kernel, raised the exception."""
    last = ""
    step = error.__traceback__
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        last = file if file.startswith(_TORCH) else last
        step = step.tb_next
    return last.startswith(_DISTRIBUTED)


def raised_in(error: BaseException) -> CodeType | None:
    """Return the code that raised ``error``; None if it has not been raised."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return None if step is None else step.tb_frame.f_code
