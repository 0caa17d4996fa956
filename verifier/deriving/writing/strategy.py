"""Writes derived rules as a module: a strategy that DTensor registers, or a function of DTensors."""

from __future__ import annotations

import builtins
import re
from collections.abc import Sequence

from verifier.deriving.learning.evidence import CallEvidence
from verifier.deriving.learning.generalise import Derivation
from verifier.deriving.writing.body import Body, helpers
from verifier.deriving.writing.comment import comment, why_left_out
from verifier.deriving.writing.local_map import run_on_locals
from verifier.deriving.writing.registering import (
    filter_of_products,
    imports_of_single_dim,
    registered_by_sharding,
    registered_for_single_dim,
)
from verifier.deriving.writing.subject import CannotWriteError, Provenance, Subject, Target
from verifier.torch_internals.names import OpOverload

__all__ = ["strategy_text"]

_IMPORTS_OF_LOCAL_MAP = ("from torch.distributed.tensor.experimental import local_map",)
_IMPORTS_OF_REGISTER_SHARDING = ("from torch.distributed.tensor.experimental import register_sharding",)


def strategy_text(
    op: OpOverload,
    calls: Sequence[CallEvidence],
    made: Derivation,
    target: Target,
    given: Provenance,
    uneven: bool = True,
) -> str:
    """Return a module that registers the derived rules as the strategy of ``op``.

    Parameters
    ----------
    uneven
        Whether the rules may be used where a rank has no elements.

    Raises
    ------
    CannotWriteError
        If ``target`` cannot have such rules, with the reason.
    """
    subject = Subject(op, calls, target)
    writer = Body(subject)
    in_blocks = [rule for rule in made.rules if rule.cut is not None]
    filtered = in_blocks if target is Target.SINGLE_DIM and not subject.per_element else []
    left_out = [] if filtered or subject.sees_mesh else in_blocks
    written = [rule for rule in made.rules if rule not in left_out and rule not in filtered]
    if not written and not filtered:
        raise CannotWriteError(f"{op}: {why_left_out(left_out[0])}")
    body, blocks = writer.rules(written), writer.rules(filtered, in_blocks=True)
    plain = bool(body) or not blocks
    filtering = filter_of_products(subject, plain) if blocks else []
    if target is Target.LOCAL_MAP:
        imports, tail = list(_IMPORTS_OF_LOCAL_MAP), run_on_locals(subject)
        imports += [f"import {subject.module}"] if subject.module else _defining(op, given.imports)
    elif target is Target.REGISTER_SHARDING:
        imports, tail = list(_IMPORTS_OF_REGISTER_SHARDING), registered_by_sharding(subject)
    else:
        imports, tail = (
            imports_of_single_dim(subject, bool(blocks)),
            registered_for_single_dim(subject, uneven, plain, bool(blocks)),
        )
    header = "\n".join(f"# {line}" for line in comment(subject, made, given, left_out))
    used = [
        name
        for name in ("DTensor", "Partial", "Replicate", "Shard")
        if any(re.search(rf"\b{name}\b", line) for line in (*body, *blocks, *filtering, *tail))
    ]
    prepared = writer.prepared(body)
    function = [*helpers([*prepared, *body, *filtering, *tail])]
    function += [*writer.head, *prepared, *body, "    return rules"] if plain else []
    of_trees = "from torch.utils._pytree import tree_map"
    imports += [of_trees] if of_trees not in imports and any("tree_map(" in line for line in function) else []
    if blocks:
        function += ["", ""] if plain else []
        function += [*writer.head_of_blocks, *writer.prepared(blocks), *blocks, "    return rules", *filtering]
    text = "\n".join(function)
    hidden = [argument.name for argument in op._schema.arguments if hasattr(builtins, argument.name)]
    for name in hidden:  # such as topk's argument sorted
        text = re.sub(rf"(?<![\w.]){name}\(", f"builtins.{name}(", text)
    whole = "\n".join([text, *tail])
    standard = [name for name in ("builtins", "functools", "math") if f"{name}." in whole]
    lines = [
        header, "", *(f"import {name}" for name in standard), *[""] * bool(standard),
        "import torch", f"from torch.distributed.tensor import {', '.join(used)}" if used else "",
        *imports, "", "", text, *tail,
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _defining(op: OpOverload, imports: Sequence[str]) -> list[str]:
    """Return the lines that import what defines an op, if nothing else has: a function runs wherever it is imported."""
    modules = [name.removesuffix(".py").rpartition("/")[2] if name.endswith(".py") else name for name in imports]
    lines = [f"    import {name}  # noqa: F401" for name in modules]
    unknown = f'if not hasattr(torch.ops.{op.namespace}, "{op._opname}"):  # what defines the op'
    return [] if op.namespace == "aten" or not lines else ["", unknown, *lines]
