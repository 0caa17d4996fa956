"""Level 1 accuses the rules that are wrong on purpose, and exactly those; and it finds true ones that are left out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_commands import run_module
from rule_mutants import MESHES, MUTANTS, RuleMutant, ShownBy, check, short
from rule_strategies import AVG, MIN, SUM, R, Rule, Strategy, mm, pointwise
from torch.distributed.tensor import Partial, Shard

from verifier.core.case import MeshSpec
from verifier.placements.parsing import parse_placements
from verifier.records.schema import MissingRuleRecord
from verifier.rules.options import DRAWS_FOR_MISSING, SIZES_FOR_MISSING
from verifier.rules.results import Rule as Claimed
from verifier.rules.results import SampleReport, WrongRule
from verifier.torch_internals.registries import replaced_strategy

ROOT = Path(__file__).resolve().parents[2]
aten = torch.ops.aten


def wrong_of(reports: list[SampleReport]) -> list[WrongRule]:
    return [wrong for report in reports for wrong in report.wrong]


def is_flat(rule: Claimed) -> bool:
    """Return whether the rule is one for a mesh of one dim."""
    return not any(text.startswith("(") for text in rule.inputs)


def on_mesh_dim(rule: Claimed, mesh_dim: int) -> str:
    sides = ([str(parse_placements(text)[mesh_dim]) for text in side] for side in (rule.inputs, rule.outputs))
    return " -> ".join(", ".join(side) for side in sides)


@cache
def accused_of_torch(op: str, most: int) -> frozenset[str]:
    accused = wrong_of(check(op, most, claims_only=True, meshes=MESHES[:2]))
    return frozenset(short(wrong.rule) for wrong in accused)


def overload(op: str) -> Any:
    packet, name = op.removeprefix("aten.").split(".")
    return getattr(getattr(torch.ops.aten, packet), name)


@cache
def confirmed_of_true(op: str, true: Strategy, most: int) -> tuple[frozenset[Claimed], ...]:
    """Return what is confirmed of the true rules in each sample, after making sure that none is accused."""
    with replaced_strategy(overload(op), lambda op, args, kwargs: true(*args, **kwargs)):
        reports = check(op, most, claims_only=True)
    assert wrong_of(reports) == []
    return tuple(frozenset(rule for rule in report.confirmed if is_flat(rule)) for report in reports)


# ------------------------------------------------------------------------------------------------------------- mutants
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught_and_nothing_else(mutant: RuleMutant) -> None:
    with mutant.registered():
        reports = check(mutant.op, mutant.most, claims_only=True)
    accused = wrong_of(reports)
    if mutant.shown_by is ShownBy.TWO_DIMS:
        assert {short(wrong.rule) for wrong in accused} == mutant.wrong
        assert {wrong.mesh for wrong in accused} == {"2x2"}
        return
    assert {short(wrong.rule) for wrong in accused if is_flat(wrong.rule)} == mutant.wrong
    for wrong in accused:
        if not is_flat(wrong.rule):  # then it is a product of wrong rules, refuted at other sizes only
            assert mutant.wrong & {on_mesh_dim(wrong.rule, 0), on_mesh_dim(wrong.rule, 1)}, wrong
    taken = {wrong.rule.inputs for wrong in accused}
    true = confirmed_of_true(mutant.op, mutant.true, mutant.most)
    for report, confirmed in zip(reports, true, strict=True):
        assert {rule for rule in confirmed if rule.inputs not in taken} <= report.confirmed
    assert any(true)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_rules_of_torch_are_accused_only_where_they_are_known_to_be_wrong(mutant: RuleMutant) -> None:
    assert accused_of_torch(mutant.op, mutant.most) <= mutant.known


@pytest.mark.parametrize("name", [m.name for m in MUTANTS if m.shown_by is ShownBy.UNEVEN])
def test_what_holds_for_even_shards_is_accused_on_uneven_ones_only(name: str) -> None:
    (mutant,) = (m for m in MUTANTS if m.name == name)
    with mutant.registered():
        reports = check(mutant.op, mutant.most)
    for wrong in wrong_of(reports):
        if is_flat(wrong.rule):
            (placement,) = parse_placements(wrong.rule.inputs[0])
            assert isinstance(placement, Shard)
            assert wrong.shapes[0][placement.dim] % int(wrong.mesh)


def test_replaced_rules_come_back() -> None:
    before = accused_of_torch("aten.relu.default", 2)
    with replaced_strategy(aten.relu.default, lambda *_: [[SUM, SUM]]):
        assert {short(wrong.rule) for wrong in wrong_of(check("aten.relu.default"))} >= {"P(sum) -> P(sum)"}
    accused_of_torch.cache_clear()
    assert accused_of_torch("aten.relu.default", 2) == before == frozenset()


class Counting:
    """A strategy that gives true rules at every other call, and a wrong one beside them at the others."""

    def __init__(self, turn: int) -> None:
        self.calls = turn

    def __call__(self, *_: object) -> list[Rule]:
        self.calls += 1
        return [[Shard(0), Shard(0)], *([[SUM, SUM]] * (self.calls % 2))]


def test_a_rule_that_comes_and_goes_is_accused_at_either_turn() -> None:
    messages = []
    for turn in (0, 1):
        with replaced_strategy(aten.relu.default, Counting(turn)):
            accused = [w for w in wrong_of(check("aten.relu.default", 2, claims_only=True)) if is_flat(w.rule)]
        assert {short(wrong.rule) for wrong in accused} == {"P(sum) -> P(sum)"}
        messages += [wrong.message for wrong in accused]
    text = "; the strategy does not claim this each time that it is asked about the call"
    assert any(message.endswith(text) for message in messages)


class OfTheCallBefore:
    """A strategy that gives the rules of the call before: all dims of it are sharded alike."""

    def __init__(self) -> None:
        self.last: list[Rule] | None = None

    def __call__(self, _op: object, args: tuple[Any, ...], _kwargs: object) -> list[Rule]:
        x, y = args[:2]
        rules = [[Shard(d)] * 3 for d in range(len(x.shape) if x.shape == getattr(y, "shape", None) else 0)]
        before, self.last = self.last, rules
        return rules if before is None else before


def test_a_strategy_that_gives_the_rules_of_the_call_before_is_accused() -> None:
    with replaced_strategy(aten.atan2.default, OfTheCallBefore()):
        accused = wrong_of(check("aten.atan2.default", 16, claims_only=True, meshes=(MeshSpec((2,)),)))
    text = "; the strategy does not claim this each time that it is asked about the call"
    assert any(wrong.message.endswith(text) for wrong in accused)


# ------------------------------------------------------------------------------------------------------- no false alarm
TRICKY = {
    "aten.linalg_vector_norm.default": ("S(0) -> _NormP(6)",),
    "aten.view.default": ("S(0) -> S(0)", "S(1) -> _S(0, 5)"),
    "aten.expand.default": ("S(0) -> S(0)",),
    "aten.new_zeros.default": ("S(0) -> R",),
    "aten.squeeze.dim": ("S(0) -> S(0)", "S(2) -> S(1)"),
    "aten.exp.default": ("P(max) -> P(max)",),
    "aten.embedding_dense_backward.default": ("S(1), R -> S(1)",),
    "aten.mean.default": ("S(0) -> P(avg)",),
}
"""Rules of torch's own that hold, and that a check which takes them at face value accuses."""


@pytest.mark.parametrize("op", TRICKY)
def test_tricky_true_rules_are_confirmed(op: str) -> None:
    reports = check(op, 4, claims_only=True)
    assert not {short(wrong.rule) for wrong in wrong_of(reports)} & set(TRICKY[op])
    assert set(TRICKY[op]) <= {short(rule) for report in reports for rule in report.confirmed}


# ------------------------------------------------------------------------------------------------------- missing rules
def all_of_neg(*_: object) -> list[Rule]:
    same: list[Rule] = [[p, p] for p in (Shard(0), Shard(1), SUM, AVG)]
    return [*same, [Partial("min"), Partial("max")], [Partial("max"), Partial("min")]]


def all_of_mm(*args: object) -> list[Rule]:
    pending: list[Rule] = [[p, *pair] for p in (SUM, AVG) for pair in ((p, R), (R, p))]
    return [*mm(*args), *pending]  # type: ignore[arg-type]


def missing_without(op: str, rules: Strategy, *left_out: list[object]) -> list[tuple[Claimed, MissingRuleRecord]]:
    def strategy(_: object, args: Sequence[object], kwargs: Mapping[str, object]) -> list[Rule]:
        return [rule for rule in rules(*args, **kwargs) if rule not in left_out]

    with replaced_strategy(overload(op), strategy):
        reports = check(op)
    assert wrong_of(reports) == []
    return [pair for report in reports for pair in report.missing.items()]


@pytest.mark.parametrize(
    ("op", "rules", "left_out", "collectives"),
    [
        ("aten.neg.default", all_of_neg, [Shard(0), Shard(0)], {"all_to_all", "all_gather"}),
        ("aten.neg.default", all_of_neg, [SUM, SUM], {"all_reduce", "reduce_scatter"}),
        ("aten.neg.default", all_of_neg, [Partial("min"), Partial("max")], {"all_reduce", "reduce_scatter"}),
        ("aten.mm.default", all_of_mm, [SUM, Shard(1), Shard(0)], {"all_to_all", "all_gather"}),
        ("aten.mm.default", all_of_mm, [AVG, R, AVG], {"all_reduce", "reduce_scatter"}),
    ],
    ids=lambda value: str(value) if isinstance(value, list) else None,
)
def test_a_rule_that_was_left_out_is_missing(
    op: str, rules: Strategy, left_out: list[object], collectives: set[str]
) -> None:
    assert missing_without(op, rules) == []
    found = missing_without(op, rules, left_out)
    result, *inputs = left_out
    expected = f"{', '.join(map(str, inputs))} -> {result}"
    assert {short(rule) for rule, _ in found} == {expected}
    for _, missing in found:
        assert missing.draws >= DRAWS_FOR_MISSING
        assert missing.sizes >= SIZES_FOR_MISSING
        assert missing.world_sizes == [2, 3]
        assert {transfer.collective for transfer in missing.saves} <= collectives
        assert missing.bytes_saved > 0


def test_a_rule_that_is_reached_without_communication_is_not_missing() -> None:
    def rules(*tensors: object) -> list[Rule]:
        return [*pointwise(*tensors), [MIN, MIN, MIN], [MIN, MIN, R]]

    # (R, P(min)) -> P(min) holds for minimum, too; DTensor makes P(min) of the replicated one where it is, and is there
    found = {short(rule) for rule, _ in missing_without("aten.minimum.default", rules)}
    assert found == {"P(max), R -> P(max)", "R, P(max) -> P(max)"}


# ---------------------------------------------------------------------------------------------------- the command line
IMPORTED = """
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding


@register_sharding(torch.ops.aten.tanh.default)
def tanh(x):
    dims = [([Shard(dim)], [Shard(dim)]) for dim in range(len(x.shape))]
    return [([Replicate()], [Replicate()]), ([Partial()], [Partial()]), *dims]
"""


@pytest.mark.processes
def test_the_command_line_accuses_an_imported_rule(tmp_path: Path) -> None:
    file = tmp_path / "wrong_tanh.py"
    file.write_text(IMPORTED)
    command = ["rules", "aten.tanh.default", "--import", str(file), "--format=json"]
    command += ["--max-samples=1", "--sizes=1", "--world-size=2", "--jobs=1", f"--out={tmp_path / 'runs'}"]
    done = run_module("verifier", *command, folder=ROOT)
    assert done.returncode == 1, done.stderr
    made = json.loads(done.stdout)
    assert made["tool_errors"] == []
    wrong = made["ops"]["aten.tanh.default"]["wrong"]
    assert [(one["input_placements"], one["output_placements"]) for one in wrong] == [(["P(sum)"], ["P(sum)"])]
    assert "P(sum)" in json.dumps(made["findings"])
