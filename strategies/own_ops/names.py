"""Which ops are the user's own, and how they are named."""

from __future__ import annotations

from verifier.execution.registrations import module_of_op
from verifier.planning.own_samples import callable_of, overload_named, sampled_ops
from verifier.rules.samples import names_overload
from verifier.torch_internals.ops import registered_overloads

__all__ = ["own_ops", "own_ops_named"]

_WITH_OWN_SAMPLES = "strategies."
"""Packages of the distribution, which have samples of the ops that they define."""


def own_ops() -> tuple[str, ...]:
    """Return the overloads of which samples were declared, and those with a rule that the user has defined, sorted."""
    defined = []
    for op in registered_overloads():
        if op.namespace not in ("aten", "prims"):
            source = module_of_op(op)
            if source is not None and not source.module.startswith(_WITH_OWN_SAMPLES):
                defined.append(str(op))
    return tuple(sorted({*sampled_ops(), *defined}))


def own_ops_named(pattern: str) -> tuple[str, ...]:
    """Return the user's own overloads that a glob names, such as ``mylib.*`` or ``mylib::my_op``.

    A name without a glob may also name an op that has no rule, or what stands for a function.
    """
    pattern = pattern.removeprefix("torch.ops.").replace("::", ".")
    if callable_of(pattern):
        return (pattern,)
    found = tuple(op for op in own_ops() if names_overload(pattern, op))
    if found or any(letter in pattern for letter in "*?[") or pattern.startswith(("aten.", "prims.")):
        return found
    try:
        op = overload_named(pattern)
    except ValueError:
        return ()
    source = module_of_op(op)
    return (str(op),) if source is not None and not source.module.startswith(_WITH_OWN_SAMPLES) else ()
