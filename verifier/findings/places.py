"""Where in torch a failure comes from: what tells failures apart that one change to torch would mend."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from pathlib import Path

import torch.distributed.tensor

from verifier.core.ops import resolve
from verifier.core.verdict import VerdictKind
from verifier.execution.imports import places_of_rules
from verifier.findings.failures import Failure, first_error
from verifier.findings.grouping import rule_class
from verifier.torch_internals.amending.propagation import rule_function
from verifier.torch_internals.names import OpOverload

__all__ = ["place_of", "strategy_of"]

_TORCH = Path(torch.distributed.tensor.__file__).parents[2]
_BY_TIMING = (VerdictKind.HANG, VerdictKind.DIED, VerdictKind.RANKS_DISAGREE)
"""Verdicts on ranks that got apart, which say nothing about where."""


def place_of(failure: Failure, own_rules: Collection[str] = ()) -> str:
    """Return the place of a failure: the function of DTensor that raised, or else the function that claims the rules.

    It is empty if neither is known: for an op that DTensor decomposes, or if ranks got apart. Where ranks got apart at
    an op of ``own_rules``, whose rules an import registers, they did so by these rules. Calls of two such ops have one
    place only if one function of the import claims the rules of both: each op that an import changes is judged.
    """
    op_name, called = rule_class(failure).op, failure.trial.case.op
    if failure.verdict.kind in _BY_TIMING:
        return f"the rules of {op_name}, by which ranks got apart" if op_name in own_rules else ""
    in_torch = f", in calls of {called}" if called in own_rules else ""
    error = first_error(failure.observation)
    if error is not None and error.file in _dtensors_files():
        return f"{error.where}{in_torch}"
    op = overload_of(op_name)
    function = None if op is None else rule_function(op)
    if function is None:
        return ""
    name = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    if op_name not in own_rules:
        name += in_torch
    # one function may make the rules of many ops, each its own
    return f"{name} of {op}" if "<locals>" in name or "<lambda>" in name else name


def strategy_of(op_name: str) -> str:
    """Return where the strategy of an op is defined, as ``FILE:LINE``; empty if that is not known.

    Files of the user's are relative to this folder where they can be. Torch's are named from torch's folder.
    """
    if (own := places_of_rules().get(op_name)) is not None:
        return f"{own[0]}:{own[1]}"
    op = overload_of(op_name)
    function = None if op is None else rule_function(op)
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    file = Path(code.co_filename)
    return f"{file.relative_to(_TORCH.parent)}:{code.co_firstlineno}" if _TORCH in file.parents else ""


def overload_of(name: str) -> OpOverload | None:
    """Return the overload that is called ``name``; None if it is the name of something else, as of a program."""
    try:
        found = resolve(f"torch.ops.{name}")
    except ValueError:
        return None
    return found if isinstance(found, OpOverload) else None


@cache
def _dtensors_files() -> frozenset[str]:
    return frozenset(path.name for path in Path(torch.distributed.tensor.__file__).parent.rglob("*.py"))
