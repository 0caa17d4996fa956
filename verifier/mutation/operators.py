"""Small changes to the source of a strategy, each of a kind that people make by mistake.

mutmut and cosmic-ray were looked at. Both change arithmetic and comparisons well, know nothing of placements, and
start a test session for each mutant, where this needs the changed function inside a running process. So the operators
are our own.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass

__all__ = ["OPERATORS", "Edit", "edits_of"]

_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_KINDS = ("sum", "avg", "max", "min", "product")
_OTHER_AGGREGATE = {"min": "max", "max": "min", "sum": "max", "all": "any", "any": "all"}
_SHARDS = ("Shard", "_ShardingPlaceholder", "_StridedShard")

OPERATORS = {
    "comparison turned": "sizes or dims that are equal, and of size 0 or 1",
    "condition": "calls on both sides of the condition",
    "index off by one": "tensors with more dims, and operands of different shapes",
    "arithmetic": "other numbers of dims, negative dims, keepdim",
    "normalisation dropped": "negative dims",
    "shard dim": "tensors whose dims have different sizes",
    "Shard for Replicate": "tensors whose dims have different sizes",
    "Partial and Replicate": "arguments that are pending, with parts that differ",
    "reduce kind": "arguments that are pending, of every kind",
    "guard dropped": "uneven and empty shards",
    "aggregate": "operands of different shapes",
    "flag": "the other value of the flag",
    "number": "other numbers of dims and arguments",
    "statement dropped": "calls that need the statement",
    "cache key": "a second call with another argument",
    "rules of another op": "pending arguments, with values of both signs",
}
"""The operators, each with the class of input that tells its mutants from the original."""


@dataclass(frozen=True)
class Edit:
    """One change to a module's tree: ``replacement`` for ``original`` in a field of ``parent``.

    Parameters
    ----------
    function
        The innermost function around it, by its qualified name.
    index
        Where in the field, if that is a list.
    """

    operator: str
    function: str
    body: list[ast.stmt]
    parent: ast.AST
    field: str
    index: int | None
    original: ast.AST
    replacement: ast.AST

    @property
    def line(self) -> int:
        return int(self.original.lineno)  # type: ignore[attr-defined]

    @property
    def last_line(self) -> int:
        return int(self.original.end_lineno)  # type: ignore[attr-defined]

    @property
    def texts(self) -> tuple[str, str]:
        """The source before and after, each on one line."""
        before, after = (ast.unparse(node).split("\n")[0] for node in (self.original, self.replacement))
        return before, after

    def apply(self) -> Callable[[], None]:
        """Change the tree; return a function that takes the change back."""
        self._put(self.replacement)
        # what a closure does not name any more it would lose, and code with other free variables cannot be put into it
        kept: list[ast.stmt] = [ast.Expr(deepcopy(self.original))] if isinstance(self.original, ast.expr) else []
        dead = ast.If(ast.Constant(False), kept or [ast.Pass()], [])
        ast.copy_location(dead, self.body[0])
        ast.fix_missing_locations(dead)
        self.body.insert(0, dead)

        def undo() -> None:
            del self.body[0]
            self._put(self.original)

        return undo

    def _put(self, node: ast.AST) -> None:
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


def edits_of(tree: ast.Module) -> list[Edit]:
    """Return all changes to the bodies of the functions of a module, in the order of the source."""
    return list(_walk(tree, (), None))


@dataclass(frozen=True)
class _At:
    parent: ast.AST
    field: str
    index: int | None


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _walk(node: ast.AST, path: tuple[str, ...], body: list[ast.stmt] | None) -> Iterator[Edit]:
    """Yield the changes below ``node``; ``path`` is the qualified name and ``body`` the innermost function's."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr) or _is_logged(node) or _is_docstring(node):
        return
    fields = ("body",) if isinstance(node, _FUNCTIONS) else node._fields  # no decorators, defaults and annotations
    for field in fields:
        if field in ("annotation", "returns", "ctx", "type_comment"):
            continue
        value = getattr(node, field, None)
        children = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
        for index, child in children:
            if not isinstance(child, ast.AST):
                continue
            if body is not None:
                yield from _edits(child, _At(node, field, index), ".".join(path), body)
            if isinstance(child, _FUNCTIONS):
                yield from _walk(child, (*path, *(["<locals>"] if body is not None else []), child.name), child.body)
            elif isinstance(child, ast.ClassDef):
                yield from _walk(child, (*path, child.name), None)
            else:
                yield from _walk(child, path, body)


def _is_logged(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node).split(".")[0] in ("logger", "log", "warnings")


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _edits(node: ast.AST, at: _At, function: str, body: list[ast.stmt]) -> Iterator[Edit]:
    seen = {ast.dump(node)}
    for operator, replacement in _replacements(node, at):
        ast.copy_location(replacement, node)
        ast.fix_missing_locations(replacement)
        if ast.dump(replacement) not in seen:
            seen.add(ast.dump(replacement))
            yield Edit(operator, function, body, at.parent, at.field, at.index, node, replacement)


def _replacements(node: ast.AST, at: _At) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.expr) and (
        at.field == "ifs" or (at.field == "test" and not isinstance(node, ast.Constant))
    ):
        yield "condition", ast.Constant(False)
        if not isinstance(at.parent, ast.While):
            yield "condition", ast.Constant(True)
            yield "condition", ast.UnaryOp(ast.Not(), deepcopy(node))
    match node:
        case ast.Compare(ops=[turned, *rest]):
            changed = deepcopy(node)
            changed.ops = [_TURNED[type(turned)](), *rest]
            yield "comparison turned", changed
        case ast.BoolOp(op=op, values=values):
            changed_op = deepcopy(node)
            changed_op.op = ast.And() if isinstance(op, ast.Or) else ast.Or()
            yield "condition", changed_op
            for left_out in range(len(values)):
                kept = [deepcopy(value) for number, value in enumerate(values) if number != left_out]
                yield "condition", kept[0] if len(kept) == 1 else ast.BoolOp(deepcopy(op), kept)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "condition", deepcopy(operand)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))) if at.field == "slice":
            yield (
                "index off by one",
                ast.Constant(1 - number) if number == 1 else ast.UnaryOp(ast.USub(), ast.Constant(number - 1)),
            )
        case ast.BinOp():
            yield from _of_arithmetic(node)
        case ast.Constant():
            yield from _of_constant(node, at)
        case ast.Call():
            yield from _of_call(node)
        case ast.Expr(value=ast.Call()) | ast.Continue() | ast.AugAssign():
            yield "statement dropped", ast.Pass()


def _of_arithmetic(node: ast.BinOp) -> Iterator[tuple[str, ast.AST]]:
    if any(isinstance(side, ast.List | ast.Tuple | ast.ListComp | ast.JoinedStr) for side in (node.left, node.right)):
        return
    if isinstance(node.op, ast.Mod):
        yield "normalisation dropped", deepcopy(node.left)
    elif isinstance(node.op, ast.Add | ast.Sub):
        other: ast.operator = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        yield "arithmetic", ast.BinOp(deepcopy(node.left), other, deepcopy(node.right))
        yield "arithmetic", deepcopy(node.left)


def _of_constant(node: ast.Constant, at: _At) -> Iterator[tuple[str, ast.AST]]:
    value = node.value
    if isinstance(value, bool):
        if isinstance(at.parent, ast.Call | ast.keyword | ast.Assign | ast.Return):
            yield "flag", ast.Constant(not value)
    elif isinstance(value, int):
        if at.field in ("slice", "lower", "upper") or isinstance(at.parent, ast.Slice):
            yield "index off by one", ast.Constant(value + 1)
        elif isinstance(at.parent, ast.Compare | ast.Call | ast.keyword | ast.Assign | ast.Return) and not (
            isinstance(at.parent, ast.Call) and _name(at.parent) in _SHARDS
        ):
            yield "number", ast.Constant(value + 1)
    elif isinstance(value, str) and value in _KINDS:
        yield "reduce kind", ast.Constant(_other_kind(value))


def _other_kind(kind: str) -> str:
    return _KINDS[(_KINDS.index(kind) + 1) % len(_KINDS)]


def _of_call(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    name = _name(node)
    first = node.args[0] if node.args else None
    if "normalize" in name and first is not None:
        yield "normalisation dropped", deepcopy(first)
    if "shardable" in name:
        yield "guard dropped", ast.Constant(True)
    if isinstance(node.func, ast.Name) and name in _OTHER_AGGREGATE:
        yield "aggregate", ast.Call(ast.Name(_OTHER_AGGREGATE[name], ast.Load()), node.args, node.keywords)
    if name == "Partial":
        yield "Partial and Replicate", _made("Replicate", node)
        if first is None:
            yield "reduce kind", ast.Call(deepcopy(node.func), [ast.Constant("max")], [])
    elif name == "Replicate":
        yield "Partial and Replicate", _made("Partial", node)
    elif name in _SHARDS and first is not None:
        yield "Shard for Replicate", _made("Replicate", node)
        for step in (1, -1):
            moved = deepcopy(node)
            moved.args[0] = ast.BinOp(deepcopy(first), ast.Add() if step > 0 else ast.Sub(), ast.Constant(1))
            yield "shard dim", moved


def _made(name: str, like: ast.Call) -> ast.Call:
    """Return a call of the class ``name``, found where the class of ``like`` is found."""
    func = deepcopy(like.func)
    if isinstance(func, ast.Attribute):
        func.attr = name
    else:
        func = ast.Name(name, ast.Load())
    return ast.Call(func, [], [])


def _name(node: ast.Call) -> str:
    func = node.func
    return func.id if isinstance(func, ast.Name) else func.attr if isinstance(func, ast.Attribute) else ""
