"""Writes derived rules as a module: a strategy that DTensor registers, or a function of DTensors."""

from __future__ import annotations

import builtins
import re
from collections.abc import Sequence
from dataclasses import dataclass

from verifier.deriving.learning.learned import Learned
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


def strategy_text(learned: Sequence[Learned], target: Target, given: Provenance, uneven: bool = True) -> str:
    """Return a module that registers the derived rules as the strategies of their ops.

    Parameters
    ----------
    learned
        The op that was asked for, then those that run in its gradient.
    uneven
        Whether the rules may be used where a rank has no elements.

    Raises
    ------
    CannotWriteError
        If ``target`` cannot have such rules, with the reason.
    """
    gradient_of = ["", *[str(learned[0].op)] * (len(learned) - 1)]
    first, *others = [_written(*one, target, given, uneven) for one in zip(learned, gradient_of, strict=True)]
    every = (first, *others)
    lines = [line for one in every for line in (*one.function, *one.tail)]
    whole = "\n".join(lines)
    used = [name for name in _PUBLIC if any(re.search(rf"\b{name}\b", "\n".join(one.names)) for one in every)]
    functions = list(helpers(lines))
    imports = list(dict.fromkeys(line for one in every for line in one.imports))
    of_trees = [name for name in _OF_TREES if any(f"{name}(" in line for line in (*functions, *lines))]
    imports += [f"from torch.utils._pytree import {', '.join(of_trees)}"] if of_trees else []
    standard = [name for name in _STANDARD if f"{name}." in "\n".join([*functions, whole])]
    text = [
        *first.comment, "", *(f"import {name}" for name in standard), *[""] * bool(standard),
        "import torch", f"from torch.distributed.tensor import {', '.join(used)}" if used else "",
        *imports, "", "", *functions, *first.function, *first.tail,
    ]  # fmt: skip
    for one in others:
        text += ["", "", *one.comment, *one.function, *one.tail]
    return "\n".join(text) + "\n"


_PUBLIC = ("DTensor", "Partial", "Replicate", "Shard")
_STANDARD = ("builtins", "functools", "math")
_OF_TREES = ("tree_leaves", "tree_map")


@dataclass(frozen=True)
class _Written:
    """The lines of one op: its comment, the functions of its rules, what registers them, and their imports.

    ``names`` are the lines that may name what DTensor's package offers.
    """

    comment: list[str]
    function: list[str]
    tail: list[str]
    imports: list[str]
    names: list[str]


def _written(learned: Learned, gradient_of: str, target: Target, given: Provenance, uneven: bool) -> _Written:
    op, made = learned.op, learned.made
    subject = Subject(op, learned.calls, target)
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
        imports = imports_of_single_dim(subject, bool(blocks))
        tail = registered_for_single_dim(subject, uneven, plain, bool(blocks))
    function = [*writer.head, *writer.prepared(body), *body, "    return rules"] if plain else []
    if blocks:
        function += ["", ""] if plain else []
        function += [*writer.head_of_blocks, *writer.prepared(blocks), *blocks, "    return rules", *filtering]
    for argument in op._schema.arguments:
        if hasattr(builtins, argument.name):  # such as topk's argument sorted
            pattern = re.compile(rf"(?<![\w.]){argument.name}\(")
            function = [pattern.sub(f"builtins.{argument.name}(", line) for line in function]
    header = [f"# {line}" for line in comment(subject, made, given, left_out, gradient_of)]
    return _Written(header, function, tail, imports, [*body, *blocks, *filtering, *tail])


def _defining(op: OpOverload, imports: Sequence[str]) -> list[str]:
    """Return the lines that import what defines an op, if nothing else has: a function runs wherever it is imported."""
    modules = [name.removesuffix(".py").rpartition("/")[2] if name.endswith(".py") else name for name in imports]
    lines = [f"    import {name}  # noqa: F401" for name in modules]
    unknown = f'if not hasattr(torch.ops.{op.namespace}, "{op._opname}"):  # what defines the op'
    return [] if op.namespace == "aten" or not lines else ["", unknown, *lines]
