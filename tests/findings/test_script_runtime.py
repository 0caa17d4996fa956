"""What scripts of findings hold of the runtime: its functions by themselves, and that a script has all that it uses."""

from __future__ import annotations

import ast
import builtins
import resource
import symtable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.ops import argument_names
from verifier.core.verdict import Phase, Verdict, VerdictKind
from verifier.findings.script import runtime
from verifier.findings.script.render import render_script
from verifier.findings.script.source import Inlined
from verifier.placements.algebra import split
from verifier.placements.parsing import parse_placements

R = parse_placements("R")


# ------------------------------------------------------------------------------------------------------ what is inlined
def test_what_is_inlined_comes_once_and_with_all_that_it_uses() -> None:
    inlined = Inlined()
    first = inlined("check_strides", "", None)
    assert first.startswith("class Rank(NamedTuple):")
    assert "def check_strides(" in first
    second = inlined("check_strides", "check")
    assert "class Rank" not in second
    assert "def check_strides(" not in second
    assert second.index("@contextlib.contextmanager\ndef sharded(") < second.index("def check(")
    assert "\n\n\n\n" not in second


def test_constants_stand_together() -> None:
    lines = Inlined()("run").splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("START_LIMIT"))
    names = ["START_LIMIT", "QUIET_LIMIT", "LATE_LIMIT", "SEEN_LIMIT", ""]
    assert [line.partition(" ")[0] for line in lines[at : at + 5]] == names


def unknown_names(source: str) -> set[str]:
    """Return the names that a module looks up, in functions and annotations as well, and that it does not have."""
    top = symtable.symtable(source, "the_script", "exec")
    defined = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    local = {name for table in tables(top) for name in bound_in(table)}
    used = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    return used - defined - local - set(dir(builtins)) - {"__name__"}


def tables(table: symtable.SymbolTable) -> list[symtable.SymbolTable]:
    return [one for child in table.get_children() for one in (child, *tables(child))]


def bound_in(table: symtable.SymbolTable) -> set[str]:
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_local() or symbol.is_parameter()}


@pytest.mark.parametrize("kind", [VerdictKind.WRONG_VALUE, VerdictKind.MUTATED_INPUT, VerdictKind.HANG])
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("imports", [(), ("math",)])
@pytest.mark.parametrize("call", ["torch.ops.aten.neg.default", "torch.ops.aten.neg_.default"])
def test_a_script_has_every_name_that_it_uses(
    kind: VerdictKind, limited: bool, imports: tuple[str, ...], call: str
) -> None:
    weight = torch.ones(3, 2, dtype=torch.float64, requires_grad=not call.endswith("_.default"))
    case = OpCase(call.removeprefix("torch.ops."), call, (weight,))
    cotangents = ((parse_placements("S(0)"),),) if weight.requires_grad else ()
    trial = Trial(case, MeshSpec((2,)), (R,) * len(argument_names(case)), cotangents)
    phase = Phase.BACKWARD if cotangents else Phase.FORWARD
    source = render_script(trial, Verdict(kind, "as it was", phase, out_of_memory=limited), 110 << 20, imports)
    assert unknown_names(source) == set()
    assert ("import resource" in source) == ("memory_limited" in source) == ("MEMORY_LIMIT" in source) == limited
    assert ("import importlib.util" in source) == ("import_all(IMPORTS)" in source) == bool(imports)
    assert ("check_gradients(" in source) == ("COTANGENT_LOCAL" in source) == bool(cotangents)
    assert ("check_written(" in source) == (kind is VerdictKind.MUTATED_INPUT)


def test_an_unknown_name_is_seen() -> None:
    assert unknown_names("def f(x: Any) -> None:\n    y = missing(x)\n    return y") == {"Any", "missing"}


# ----------------------------------------------------------------------------------------------------------- functions
@pytest.mark.parametrize(
    "placements", ["S(0)", "(S(0), S(0))", "(S(1), S(0))", "(R, S(1))", "(_S(0, 2), S(0))", "(R, R)"]
)
def test_a_rank_is_promised_what_the_algebra_cuts(placements: str) -> None:
    """The script says by its own short algebra what the verifier's says."""
    where = parse_placements(placements)
    shape = (2, 3)[: len(where)]
    whole = torch.arange(7.0 * 5).reshape(7, 5)
    for rank, part in enumerate(split(whole, where, shape, 0)):
        found = runtime.promised(whole, where, shape, rank)
        assert found is not None
        assert torch.equal(found, part)


def test_a_rank_is_promised_nothing_of_a_partial_tensor() -> None:
    assert runtime.promised(torch.ones(2), (Replicate(), Partial()), (2, 2), 3) is None
    assert runtime.promised(torch.ones(2), (Shard(0), Partial("max")), (2, 2), 3) is None


@pytest.mark.parametrize(
    ("got", "expected", "absolute", "differ"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), 0.0, False),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), 0.0, True),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), 0.5, False),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.5]), 0.5, True),
        (torch.tensor([1.0]), torch.tensor([[1.0]]), 0.0, True),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), 0.0, True),
        (torch.tensor([1.0]), torch.tensor([1.0]).to_sparse(), 0.0, True),
        (torch.tensor([1.0]).to(torch.float8_e5m2), torch.tensor([1.0]).to(torch.float8_e5m2), 0.0, False),
        (torch.tensor([1 + 1j]).to(torch.complex32), torch.tensor([1 - 1j]).to(torch.complex32), 0.0, True),
    ],
)
def test_differs(got: torch.Tensor, expected: torch.Tensor, absolute: float, differ: bool) -> None:
    assert runtime.differs(got, expected, absolute) == differ


def test_results_are_flattened_and_described() -> None:
    one, two = torch.ones(1), torch.ones(2)
    result = {"a": (one, 3), "b": [two]}
    assert runtime.tensors(result) == [one, two]
    assert runtime.nesting(result) == "dict['a', 'b'](tuple(_, _), list(_))"
    written: Any = {"x": one, "y": torch.zeros(3)}
    assert [t.numel() for t in runtime.outputs(one, written, ["x", "y"])] == [1, 3]


def test_local_keeps_what_the_call_does_to_the_whole_tensors() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    local = runtime.Local(lambda x: (x * x, x.detach()), {"x": x}, [], [torch.tensor([1.0, 1.0])])
    assert local.unlike(None) == ""
    assert local.nesting == "tuple(_, _)"
    assert local.flowing == [0]
    assert [g.tolist() for g in local.gradients] == [[2.0, 4.0]]
    y = torch.ones(2)
    local = runtime.Local(lambda y: y.add_(1), {"y": y}, ["y"])
    assert local.left["y"].tolist() == [2.0, 2.0]
    assert y.tolist() == [1.0, 1.0]


def test_the_limit_of_memory_is_taken_back() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)

    @runtime.memory_limited(64 << 20)
    def allocate(size: int) -> int:
        return torch.empty(size, dtype=torch.uint8).numel()

    assert allocate(1 << 20) == 1 << 20
    with pytest.raises(RuntimeError, match="allocate memory"):
        allocate(1 << 30)
    assert resource.getrlimit(resource.RLIMIT_AS) == (before[1], before[1])
