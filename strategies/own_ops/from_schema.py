"""Calls of an op that has no examples, from its schema alone: those of many calls that the op accepts.

An op may accept calls that nobody means, such as a tensor of three dims that happens to broadcast. So of the calls with
one number of dims those are kept for which the op's strategy lists the most rules, then those with the fewest dims.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from strategies.opinfo.calls.call import Call, Parameter, attempt, parameters, quiet
from strategies.opinfo.calls.running import copied, same_as_fake, undeclared_write
from verifier.core.case import MeshSpec, OpCase
from verifier.execution.registrations import module_of_op
from verifier.placements.algebra import sharded_dim
from verifier.rules.check import check_sample
from verifier.rules.claims import ASKED, claim_reader
from verifier.rules.enumerate import input_combinations
from verifier.rules.options import CheckOptions
from verifier.rules.samples import Values
from verifier.torch_internals.claims.reader import ClaimReader
from verifier.torch_internals.names import OpOverload

__all__ = ["ask", "calls_from_schema", "kinds_of_tensor", "rules_that_hold", "tensor_of_kind"]

_EXTENTS = (_A, _B, _C, _D) = (4, 6, 8, 10)
_SHAPES: tuple[tuple[int, ...], ...] = (
    *(shape for ndim in (2, 1, 3, 4) for shape in itertools.combinations(_EXTENTS, ndim)),
    *((_B, _A), (_C, _A), (_C, _B), ()),
)
"""Shapes of a tensor; equal extents of two tensors are the same one."""
_MOST_TRIES, _MOST_ACCEPTED, _MOST_CHECKED = 800, 60, 2
_INTEGRAL = (
    "id",
    "ids",
    "idx",
    "index",
    "indices",
    "label",
    "labels",
    "target",
    "targets",
    "token",
    "tokens",
    "offsets",
)
_FLAGS = ("mask", "masks", "keep", "cond", "condition")
_SEED = 0

Ndims = tuple[int, ...]
"""The numbers of dims of the tensors of a call."""
Rule = tuple[Placement, ...]
"""The placements of the tensors of a call on one mesh dim, at which its op runs as it is."""


@cache
def calls_from_schema(op: OpOverload, dtype: torch.dtype) -> tuple[Call, ...]:
    """Return calls of ``op`` with small tensors that the op accepts; none for an op that is not written in Python.

    A kernel of another language may read past the end of what does not fit together.
    """
    if module_of_op(op) is None or any(parameter.out for parameter in parameters(op)):
        return ()
    with torch.random.fork_rng(devices=()), quiet():
        torch.manual_seed(_SEED)
        accepted = list(itertools.islice(_accepted(op, dtype), _MOST_ACCEPTED))
        return tuple(_meant(accepted))


# ----------------------------------------------------------------------------------------------------------- candidates
def _accepted(op: OpOverload, dtype: torch.dtype) -> Iterator[Call]:
    for call in itertools.islice(_candidates(op, dtype), _MOST_TRIES):
        results = attempt(copied(call))
        if results is not None and not undeclared_write(call) and same_as_fake(call, results):
            yield call


def _candidates(op: OpOverload, dtype: torch.dtype) -> Iterator[Call]:
    """Yield calls with tensors of many shapes, and for each some values of the other arguments."""
    tensors = [parameter for parameter in parameters(op) if "Tensor" in parameter.type]
    others = [parameter for parameter in parameters(op) if "Tensor" not in parameter.type]
    ways = itertools.product(range(len(_SHAPES)), repeat=len(tensors))
    shapes = sorted(filter(_is_canonical, ways), key=lambda way: (len({*way}) > 1, sum(way), way))
    for kinds in itertools.product(*(_kinds(parameter) for parameter in tensors)):
        for way in shapes:
            given = {
                parameter.name: _tensors(parameter, kind, _SHAPES[number], dtype)
                for parameter, kind, number in zip(tensors, kinds, way, strict=True)
            }
            ndim = max((len(_SHAPES[number]) for number in way), default=0)
            values = [_values(parameter, ndim) for parameter in others]
            for number in range(max(map(len, values), default=1)):
                # all arguments change at the same time: their products would be many
                rest = {
                    p.name: v[(number + n) % len(v)] for n, (p, v) in enumerate(zip(others, values, strict=True)) if v
                }
                call = Call.of(op, {**given, **rest})
                if call is not None:
                    yield call


def _is_canonical(way: Sequence[int]) -> bool:
    """Return whether extents come up in order: other choices of shapes are the same calls with other extents."""
    extents = dict.fromkeys(extent for number in way for extent in _SHAPES[number])
    return tuple(extents) == _EXTENTS[: len(extents)]


def _kinds(parameter: Parameter) -> tuple[str, ...]:
    """Return the kinds of tensor to try; ``none`` stands for None, and comes first for an optional parameter."""
    kinds = kinds_of_tensor(parameter)
    return ("none", *kinds) if parameter.type.startswith("Optional") else kinds


def kinds_of_tensor(parameter: Parameter) -> tuple[str, ...]:
    """Return the kinds of tensor to try, ``float``, ``int`` or ``bool``, the likeliest for the name first."""
    words = parameter.name.lower().split("_")
    kinds = ["float", "int"]
    if any(word in _INTEGRAL for word in words):
        kinds.reverse()
    if any(word in _FLAGS for word in words):
        kinds.insert(0, "bool")
    return tuple(kinds)


def _tensors(parameter: Parameter, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> object:
    if kind == "none":
        return None
    one = tensor_of_kind(kind, shape, dtype)
    return [one, tensor_of_kind(kind, shape, dtype)] if "List" in parameter.type else one


def tensor_of_kind(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a small random tensor of a kind of :func:`kinds_of_tensor`."""
    if kind == "int":
        return torch.randint(_A, shape)
    if kind == "bool":
        return torch.rand(shape) < 0.5
    return torch.randint(-3, 5, shape).to(dtype)


def _values(parameter: Parameter, ndim: int) -> list[object]:
    """Return values to try of an argument that is no tensor; none to leave it out."""
    named_dim = any(word in ("dim", "dims", "axis", "axes") for word in parameter.name.lower().split("_"))
    type_ = parameter.type.removeprefix("Optional[").rstrip("]")
    if "bool" in type_:
        return [False, True]
    if type_.startswith("List[int"):
        lists: list[object] = [[0], [ndim - 1], [0, ndim - 1]] if named_dim else [[1], [2], [_A, _B]]
        return [*lists, [-1]] if named_dim else lists
    if parameter.type.endswith("int") and parameter.name not in ("dtype", "layout", "memory_format", "device"):
        return [*range(ndim), -1] if named_dim else [2, 1, 3, _A, _B]
    if "float" in type_ or "number" in type_:
        return [2.0, 0.5] if "float" in type_ else [2, 3]
    return []


# ---------------------------------------------------------------------------------------------------------------- meant
@dataclass(frozen=True)
class _Asked:
    """A call, the numbers of dims of its tensors, and the rules that its op's strategy lists for it."""

    call: Call
    ndims: Ndims
    rules: frozenset[Rule]

    @property
    def ndim(self) -> int:
        return max(self.ndims, default=0)

    @property
    def fits(self) -> bool:
        """Whether no rule shards a tensor dim that a tensor does not have."""
        shards = ((ndim, sharded_dim(p)) for rule in self.rules for ndim, p in zip(self.ndims, rule, strict=True))
        return all(dim is None or dim < ndim for ndim, dim in shards)


def _meant(calls: Sequence[Call]) -> list[Call]:
    """Return the calls that the author of the op's strategy is likely to have meant.

    A strategy may list the same rules for all numbers of dims from some number on; see :func:`_meant_ndims`.
    """
    asked = [one for one in map(ask, calls) if one.fits]
    asked = [one for one in asked if one.ndim] or asked
    kinds = [tuple(tensor.dtype for tensor in one.call.tensors) for one in asked]
    asked = [one for one, kind in zip(asked, kinds, strict=True) if kind == kinds[0]]
    rules: dict[Ndims, frozenset[Rule]] = {}
    for one in asked:
        rules[one.ndims] = rules.get(one.ndims, frozenset()) | one.rules
    best = {ndim: _best(asked, rules, ndim) for ndim in {max(ndims, default=0) for ndims in rules}}
    if max(best, default=0) > 1:
        best.pop(1, None)  # few strategies are for tensors of one dim, which most ops take, too
    most = max(best, default=0)
    same = next((ndim for ndim in sorted(best) if rules[best[ndim]] == rules[best[most]]), most)
    kept = _meant_ndims(asked, rules, best, same) if same < most else set(best.values())
    return _spread([one.call for one in asked if one.ndims in kept])


def _best(asked: Sequence[_Asked], rules: Mapping[Ndims, frozenset[Rule]], ndim: int) -> Ndims:
    """Return the numbers of dims, of which ``ndim`` is the largest, for which most rules are listed.

    Among such numbers those of tensors of one shape win if all rules hold for them, else the smallest ones.
    """
    ordered = sorted(
        (ndims for ndims in rules if max(ndims, default=0) == ndim),
        key=lambda ndims: (-len(rules[ndims]), 0 in ndims, ndims[:1] == (1,), sum(ndims)),
    )
    first, *others = [ndims for ndims in ordered if len(rules[ndims]) == len(rules[ordered[0]])]
    alike = [ndims for ndims in others if len({*ndims}) == 1 and rules[ndims]]
    return next((ndims for ndims in alike if _hold(asked, ndims, all)), first)


def _meant_ndims(
    asked: Sequence[_Asked], rules: Mapping[Ndims, frozenset[Rule]], best: Mapping[int, Ndims], least: int
) -> set[Ndims]:
    """Return the numbers of dims that a strategy is for that lists the same rules for all, from ``least`` dims on.

    These are the fewest, unless none of the rules holds for them, and all of them hold for more dims of all tensors.
    """
    fewest = best[least]
    more = sorted(ndims for ndims in rules if len({*ndims}) == 1 and ndims[0] > least and rules[ndims] == rules[fewest])
    if len({*fewest}) == 1 and more and not _hold(asked, fewest, any):
        return {next((ndims for ndims in more if _hold(asked, ndims, all)), fewest)}
    return {fewest}


def _hold(asked: Sequence[_Asked], ndims: Ndims, how_many: Callable[[Iterable[bool]], bool]) -> bool:
    """Return whether any or all rules that are listed for calls of these numbers of dims hold on two ranks."""
    calls = [one.call for one in asked if one.ndims == ndims][:_MOST_CHECKED]
    confirmed, wrong = rules_that_hold(*calls)
    return how_many([rule not in wrong for rule in {*confirmed, *wrong}])


def rules_that_hold(*calls: Call) -> tuple[set[str], set[str]]:
    """Return the rules that the strategy of the op claims on two ranks: those that hold for each call, and others.

    Rules for replicated tensors alone are left out.
    """
    options = CheckOptions((MeshSpec((2,)),), sizes=1, claims_only=True, products=0, samples_called_again=0)
    reports = [check_sample(_OneCall(call), options) for call in calls]
    confirmed = {str(rule) for report in reports for rule in report.confirmed if {*rule.inputs} != {"R"}}
    wrong = {str(found.rule) for report in reports for found in report.wrong}
    return confirmed - wrong, wrong


@dataclass(frozen=True)
class _OneCall:
    """A call as it is; see :class:`verifier.rules.samples.Sample`."""

    call: Call
    origin: str = ""
    not_testable: str = ""
    claims_only: str = ""

    @property
    def op(self) -> str:
        return str(self.call.op)

    def draw(self, size: int, draw: int, values: Values = Values.USUAL) -> OpCase | None:
        """Return the call with other numbers in its floating tensors at each draw."""
        if size or values is not Values.USUAL:
            return None
        generator = torch.Generator().manual_seed(draw)
        leaves = [
            torch.randint(-3, 5, leaf.shape, generator=generator).to(leaf.dtype)
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
            for leaf in self.call.leaves
        ]  # fmt: skip
        call = self.call.with_leaves(list(leaves))
        return OpCase(self.op, f"torch.ops.{self.op}", call.args, call.kwargs, exact=False)


def ask(call: Call) -> _Asked:
    """Return a call with the rules that its op's strategy lists for it on two ranks."""
    ndims = tuple(tensor.ndim for tensor in call.tensors)
    reader = claim_reader(call.op, call.args, call.kwargs, call.op(*copied(call).args, **call.kwargs))
    listed = reader.listed((2,), [])
    if listed is None:
        rules_of_one = (tuple(p for (p,) in rule) for rule in reader.enumerated((2,)))
        listed = [rule for rule in rules_of_one if {*rule} != {Replicate()}] or _answered(call, reader)
    rules = {rule for rule in listed if len(rule) == len(ndims) and {*rule} != {Replicate()}}
    return _Asked(call, ndims, frozenset(rules))


def _answered(call: Call, reader: ClaimReader) -> list[Rule]:
    """Return the placements at which DTensor runs the op as it is, of a strategy that decides by what it is shown."""
    kinds = tuple((tensor.ndim, tensor.dtype) for tensor in call.tensors)
    free = input_combinations(kinds, tuple((number,) for number in range(len(kinds))), ASKED)
    decided = ((one, reader.at(one, (2,))) for one in free)
    return [tuple(p for (p,) in one) for one, made in decided if made is not None and made.inputs == one]


def _spread(calls: Sequence[Call]) -> list[Call]:
    """Return one call of each shape and of each choice of other arguments."""
    found: dict[str, Call] = {}
    for call in calls:
        found.setdefault(call.signature(), call)
    return list(found.values())
