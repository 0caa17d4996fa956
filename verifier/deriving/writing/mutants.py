"""Changes single lines of a derived function, and asks whether the calls that it rests on tell each change.

A change is caught if the changed function raises for a call, lists a rule that the call refutes, or leaves out one that
the call bears out and that the function listed.
"""

from __future__ import annotations

import ast
import contextlib
import copy
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from verifier.core.ops import resolve
from verifier.deriving.learning.evidence import CallEvidence, Inputs, Place, by_slot, slot_names
from verifier.deriving.learning.generalise import Derivation
from verifier.deriving.writing.subject import strategy_name
from verifier.planning.own_samples import overload_named
from verifier.torch_internals.names import pytree

__all__ = ["Mutants", "tried_mutants"]

_OTHER_KIND = {"sum": "max", "avg": "min", "product": "sum", "min": "max", "max": "min"}
_HALF = 2
_NO_BLOCKS = 1 << 20
"""So many ranks that shards begin at multiples of no block."""
_IN_BLOCKS = 4
"""What a rule for shards that begin at multiples of a block has: placements, a tensor, a dim, and the block."""
_FEW_RANKS = 2
"""So few ranks that each has elements."""
Row = tuple[Inputs, tuple[Placement | None, ...]]
"""Placements of the slots of a call, and those of its results and gradients; None for a result that the call lacks."""


@dataclass(frozen=True)
class Mutants:
    """How many changes were tried, and the lines and changes that no call tells.

    A change that lists other rules in the place of some, which hold for all calls as well, is none.

    Parameters
    ----------
    disagrees
        The calls for which the function itself lists a rule that they refute, or leaves out what it should list.
    """

    tried: int
    survivors: tuple[str, ...]
    disagrees: tuple[str, ...] = ()

    def __add__(self, other: Mutants) -> Mutants:
        return Mutants(
            self.tried + other.tried, self.survivors + other.survivors, self.disagrees + other.disagrees
        )  # fmt: skip


def tried_mutants(code: str, calls: Sequence[CallEvidence], made: Derivation) -> Mutants:
    """Return which changes of the functions of the rules of an op in ``code`` its calls tell."""
    module = ast.parse(code)
    scope = _imported(module)
    registering = (ast.Expr, ast.Assign, ast.Import, ast.ImportFrom)
    module.body = [
        node for node in module.body
        if not getattr(node, "decorator_list", None) and not isinstance(node, registering)
    ]  # fmt: skip
    start = strategy_name(overload_named(calls[0].case.op))
    functions = [
        node
        for node in module.body
        if isinstance(node, ast.FunctionDef) and node.name in (f"{start}_rules", f"{start}_in_blocks")
    ]
    names = [function.name for function in functions]
    points = [*_points_of_calls(calls), *_points_of_blocks(calls, made)]
    listing = _compiled(module, names, scope)
    listed: list[set[Row]] = []
    disagrees: dict[str, None] = {}
    for point in points:
        try:
            rows = set(point.rows(listing))
        except Exception as error:  # noqa: BLE001 - the code is what is tested here
            rows = set()
            disagrees[f"{point.call.origin}: it raised {type(error).__name__}: {error}"] = None
        for row in rows:
            if point.refutes(row):
                disagrees[f"{point.call.origin}: lists {_text(row)}, which does not hold"] = None
        listed.append(rows)
    survivors = []
    tried = 0
    kept = _conditions_of_tensors(calls)
    for text, changed in (change for function in functions for change in _changes(module, function, kept)):
        other = _compiled(changed, names, scope)
        if _is_as_good(points, listed, other):
            continue
        tried += 1
        if not any(_tells(point, rows, other) for point, rows in zip(points, listed, strict=True)):
            survivors.append(text)
    return Mutants(tried, tuple(survivors), tuple(disagrees))


def _imported(module: ast.Module) -> dict[str, Any]:
    """Return what a module imports, but for what raises: a file that defines ops cannot be run a second time."""
    scope: dict[str, Any] = {}
    for node in module.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            with contextlib.suppress(Exception):
                exec(compile(ast.Module([node], []), "derived", "exec"), scope)  # what the verifier itself has written
    return scope


def _compiled(module: ast.Module, names: Sequence[str], imported: Mapping[str, Any]) -> Callable[..., list[Any]]:
    """Return the function that lists the rules of the functions with these names."""
    scope = dict(imported)
    exec(compile(ast.fix_missing_locations(module), "derived", "exec"), scope)  # what the verifier itself has written

    def listing(*args: Any, **kwargs: Any) -> list[Any]:
        rows: list[Any] = []
        for name in names:
            found = scope[name](*args, **kwargs)
            rows += _in_their_blocks(found, args, kwargs) if name.endswith("_in_blocks") else found
        return rows

    return listing


def _in_their_blocks(found: Sequence[Any], args: Any, kwargs: Any) -> Iterator[Any]:
    """Yield the rules that a filter keeps: those whose tensor is cut at multiples of their block."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if hasattr(leaf, "mesh")]
    for row, number, dim, block in found:
        (ranks,), extent = tensors[number].mesh.shape, tensors[number].shape[dim]
        length = -(-extent // ranks)
        if length % block == 0 and length * (ranks - 1) < extent:
            yield row


# --------------------------------------------------------------------------------------------------------------- points
@dataclass(frozen=True)
class _Point:
    """A call, perhaps at other extents and on some ranks, and what is known to hold there.

    Parameters
    ----------
    known
        By the placements of the slots those of the results; empty if they are refuted.
    """

    call: CallEvidence
    known: dict[Inputs, tuple[frozenset[Placement], ...]]
    extents: Place | None = None

    def rows(self, listing: Callable[..., Any]) -> Iterator[Row]:
        """Yield what a function lists here."""
        names = slot_names(self.call.case)
        for row in listing(*self._args[0], **self._args[1]):
            gradients: list[Placement] = []
            if isinstance(row, tuple):  # of register_sharding, or of local_map
                outputs, inputs, *of_tensors = row
                inputs = [p for p in inputs if p is not None]
                for given in of_tensors:
                    by_name = dict(zip(names, given, strict=True))
                    gradients = [by_name[name] for name in self.call.gradients]
            else:
                outputs, inputs = row[: len(row) - len(names)], row[len(row) - len(names) :]
            placed = by_slot(names, inputs)
            assert placed is not None
            yield placed, (*outputs, *gradients)

    @property
    def _args(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with stand-ins for tensors that have the extents, dtype and mesh."""
        case, (extents, ranks) = self.call.case, self.extents or ((), _NO_BLOCKS)
        mesh = SimpleNamespace(shape=(ranks,), ndim=1)
        names = iter(slot_names(case))
        dims = {slot: p.dim for slot, p in self._shards}

        def given(leaf: object) -> object:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            slot = self.call.slots.index(next(names))
            shape = list(leaf.shape)
            if extents and slot in dims:
                shape[dims[slot]] = extents[slot]
            return SimpleNamespace(shape=torch.Size(shape), dtype=leaf.dtype, ndim=leaf.ndim, mesh=mesh)

        args, kwargs = pytree.tree_map(given, (tuple(case.args), dict(case.kwargs)))
        return args, kwargs

    @property
    def _shards(self) -> list[tuple[int, Shard]]:
        placed = next(iter(self.known)) if self.extents else ()
        return [(slot, p) for slot, p in enumerate(placed) if isinstance(p, Shard)]

    def refutes(self, row: Row) -> bool:
        """Return whether a rule is known not to hold here."""
        inputs, all_ = row
        outputs = [p for p in all_ if p is not None]
        if tuple(place for place, p in enumerate(all_) if p is None) != self.call.absent:
            return True
        if len(outputs) != self._returned:
            return True
        ndims = [*zip(inputs, self.call.ndims, strict=True), *zip(outputs, self.call.results, strict=False)]
        if any(isinstance(p, Shard) and not 0 <= p.dim < ndim for p, ndim in ndims):
            return True
        allowed = self.known.get(inputs)
        if allowed is None:
            return False
        # what is only written to has no placement in a strategy
        return not allowed or not all(p in some for p, some in zip(outputs, allowed, strict=False))

    @property
    def _returned(self) -> int:
        """The number of results that come back, and of gradients."""
        returns = resolve(self.call.case.call)._schema.returns  # type: ignore[attr-defined]
        if any("List" in str(one.type) for one in returns):
            return len(self.call.results)
        return len(returns) - len(self.call.absent) + len(self.call.gradients)

    def bears_out(self, row: Row) -> bool:
        """Return whether a rule is known to hold here."""
        return bool(self.known.get(row[0])) and not self.refutes(row)

    def asks_for(self, row: Row) -> bool:
        """Return whether a rule is known to hold here, and DTensor does not add it by itself."""
        return bool(self.known.get(row[0])) and any(p != Replicate() for p in row[0])


def _points_of_calls(calls: Sequence[CallEvidence]) -> Iterator[_Point]:
    for call in calls:
        yield _Point(call, dict(call.rules), None)


def _points_of_blocks(calls: Sequence[CallEvidence], made: Derivation) -> Iterator[_Point]:
    for call in calls:
        anywhere = made.blocks.get(id(call), {}) and _known_in_blocks(call, made)
        if anywhere:
            yield _Point(call, anywhere, ((), _FEW_RANKS))
        for inputs, place in call.refuted_in_blocks.items():
            yield _Point(call, {inputs: ()}, place)
        for inputs, blocks in made.blocks.get(id(call), {}).items():
            for place in blocks.held:
                yield _Point(call, {inputs: blocks.outputs}, place)
            for place in blocks.failed:
                yield _Point(call, {inputs: ()}, place)


def _known_in_blocks(call: CallEvidence, made: Derivation) -> dict[Inputs, tuple[frozenset[Placement], ...]]:
    """Return what holds, or does not hold, where shards begin at multiples of a block as well as elsewhere."""
    return {inputs: some for inputs, some in call.rules.items() if inputs not in made.blocks[id(call)]}


def _is_as_good(points: Sequence[_Point], listed: Sequence[set[Row]], other: Callable[..., Any]) -> bool:
    """Return whether a changed function lists other results for the same placements, which are known to hold, too."""
    changes = False
    for point, before in zip(points, listed, strict=True):
        try:
            rows = set(point.rows(other))
        except Exception:  # noqa: BLE001 - a changed function may raise anything
            return False
        same = len(rows) == len(before) and {row[0] for row in rows} == {row[0] for row in before}
        if not same or not all(point.bears_out(row) for row in rows - before):
            return False
        changes |= rows != before
    return changes


def _tells(point: _Point, listed: set[Row], other: Callable[..., Any]) -> bool:
    """Return whether a changed function raises here, lists what does not hold, or lacks what it has to list."""
    try:
        rows = set(point.rows(other))
    except Exception:  # noqa: BLE001 - a changed function may raise anything
        return True
    inputs = {row[0] for row in rows}
    return any(point.refutes(row) for row in rows - listed) or any(
        row[0] not in inputs and point.asks_for(row) for row in listed
    )


# -------------------------------------------------------------------------------------------------------------- changes
def _conditions_of_tensors(calls: Sequence[CallEvidence]) -> set[str]:
    """Return the conditions that a call has a tensor, which the lengths of rules ask for: they are kept."""
    schema = resolve(calls[0].case.call)._schema  # type: ignore[attr-defined]
    names = [argument.name for argument in schema.arguments if "Tensor" in str(argument.type)]
    return {
        f"{start}{name}{end}"
        for name in names
        for start, end in (
            ("hasattr(", ", 'shape')"),
            ("not hasattr(", ", 'shape')"),
            ("", " is None"),
            ("", " is not None"),
            ("len(", ") > 0"),
            ("not len(", ") > 0"),
        )
    }


def _changes(module: ast.Module, function: ast.FunctionDef, kept: Container[str]) -> Iterator[tuple[str, ast.Module]]:
    """Yield the changes of a function, each with what is changed in which line; the conditions ``kept`` are."""
    for number, node in enumerate(ast.walk(function)):
        for text, change in _changes_of(node, kept):
            changed = copy.deepcopy(module)
            (other,) = (one for one in changed.body if isinstance(one, ast.FunctionDef) and one.name == function.name)
            change(next(one for place, one in enumerate(ast.walk(other)) if place == number))
            yield f"line {getattr(node, 'lineno', 0)}: {text}", changed


def _changes_of(node: ast.AST, kept: Container[str]) -> Iterator[tuple[str, Callable[[Any], None]]]:
    if isinstance(node, ast.If):
        for place, part in enumerate(_conditions(node)):
            if ast.unparse(part) in kept:
                continue
            yield f"without the condition {ast.unparse(part)}", lambda other, n=place: _drop(other, n)  # type: ignore[misc]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id == "Shard":
            for step in (1, -1):
                yield f"{ast.unparse(node)} with its dim shifted by {step}", lambda other, n=step: _shift(other, n)  # type: ignore[misc]
        elif node.func.id == "Partial":
            yield f"{ast.unparse(node)} of another kind", _other_kind
        elif node.func.id.startswith("_begin") and isinstance(node.args[-1], ast.Constant):
            yield f"{ast.unparse(node)} with half the block", _halve
    if isinstance(node, ast.Expr) and ast.unparse(node).startswith("rules.append("):
        yield f"without {ast.unparse(node)}", _empty
    if isinstance(node, ast.Tuple) and len(node.elts) == _IN_BLOCKS and isinstance(node.elts[0], ast.List):
        yield f"{ast.unparse(node)} with another dim", _shift_cut
        block = node.elts[-1]
        if isinstance(block, ast.Constant) and block.value != 1:
            yield f"{ast.unparse(node)} with half the block", _halve_cut


def _conditions(node: ast.If) -> list[ast.expr]:
    both = isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And)
    return node.test.values if both else [node.test]  # type: ignore[attr-defined]


def _drop(node: ast.If, place: int) -> None:
    kept = [part for n, part in enumerate(_conditions(node)) if n != place]
    node.test = ast.BoolOp(ast.And(), kept) if len(kept) > 1 else kept[0] if kept else ast.Constant(True)


def _shift(node: ast.Call, step: int) -> None:
    node.args[0] = ast.BinOp(node.args[0], ast.Add(), ast.Constant(step))


def _other_kind(node: ast.Call) -> None:
    kind = ast.literal_eval(node.args[0]) if node.args else "sum"
    node.args = [ast.Constant(_OTHER_KIND[kind])]


def _shift_cut(node: ast.Tuple) -> None:
    node.elts[2] = ast.BinOp(node.elts[2], ast.Add(), ast.Constant(1))


def _halve_cut(node: ast.Tuple) -> None:
    _halve_number(node.elts[-1])


def _halve(node: ast.Call) -> None:
    _halve_number(node.args[-1])


def _halve_number(block: ast.expr) -> None:
    assert isinstance(block, ast.Constant)
    assert isinstance(block.value, int)
    block.value //= _HALF


def _empty(node: ast.Expr) -> None:
    node.value = ast.Constant(None)


def _text(row: Row) -> str:
    return " -> ".join(", ".join(map(str, some)) for some in row)
