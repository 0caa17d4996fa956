"""Faults around a right rule are caught by the programs, each by the right verdict, and by no plain call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import program_mutants as mutants
import pytest
import torch
from torch_versions import torch_is

from strategies.opinfo.composing import COMPOSITIONS, composed
from strategies.opinfo.random_ops import RANDOM, random_case
from verifier.calls.result import Crash, VerificationError, WrongDtype, WrongGradient, WrongShape, WrongValue
from verifier.calls.verifier import Verifier
from verifier.core.case import MeshSpec, OpCase
from verifier.core.verdict import VerdictKind

MESH = MeshSpec((2,))


def tensor(*shape: int) -> torch.Tensor:
    """Return small integers of mixed sign, no two of them equal."""
    numbers = torch.arange(1.0, 1.0 + torch.Size(shape).numel(), dtype=torch.float64)
    numbers[::3] *= -1
    return numbers.reshape(shape)


def plain(op: str, *args: object) -> OpCase:
    return OpCase(op, f"torch.ops.{op}", args, family="opinfo")


MUL = plain("aten.mul.Tensor", tensor(4, 3), tensor(4, 3) + 2)
SUM = plain("aten.sum.dim_IntList", tensor(4, 3), [0])
TURNED = plain("aten.transpose.int", tensor(4, 3), 0, 1)
MATMUL = plain("aten.matmul.default", tensor(4, 3), tensor(3, 2))
SQUARED = plain("aten.pow_.Scalar", tensor(4, 3), 2)
TRIANGLES = plain("aten.tril.default", tensor(3, 4, 4), 1)

MUTANTS: dict[Callable[..., Any], tuple[str, OpCase, tuple[type[VerificationError], ...]]] = {
    mutants.loses_one_gradient: ("one tensor twice", MUL, (WrongGradient,)),
    mutants.reduces_in_place: ("result used twice", SUM, (WrongValue,)),
    mutants.takes_pending_for_whole: ("pending argument", MUL, (WrongValue,)),
    mutants.remembers_first_call: ("second call", TRIANGLES, (WrongValue, WrongDtype)),
    mutants.stays_held: ("after an exception", MUL, (Crash,)),
    mutants.pending_in_inference_mode: ("inference mode", MATMUL, (WrongValue, WrongShape)),
    mutants.write_is_hidden: ("write to a copy", SQUARED, (WrongGradient,)),
    mutants.view_is_a_copy: ("write to a view", TURNED, (WrongValue,)),
}
RANDOM_MUTANTS: list[tuple[Callable[..., Any], str]] = [
    (mutants.own_seeds, "aten.uniform_.default"),
    (mutants.wrong_scale, "aten.uniform_.default"),
    (mutants.gradient_passes, "aten.native_dropout.default"),
    (mutants.gradient_passes, "aten.uniform_.default"),
    (mutants.gradient_passes, "aten.bernoulli.default"),
    (mutants.next_category, "aten.multinomial.default"),
]


def wanting(case: OpCase) -> OpCase:
    kwargs = {
        name: value.clone().requires_grad_() if isinstance(value, torch.Tensor) else value
        for name, value in case.kwargs.items()
    }
    return replace(case, kwargs=kwargs)


def programs_of(kind: str, case: OpCase) -> list[OpCase]:
    """Return five programs of a kind around a call, with gradients."""
    made = [composed(case, kind, MESH, seed) for seed in range(5)]
    found = [program for program in made if program is not None]
    assert found, f"no program of the kind {kind!r} around {case.op}"
    return [wanting(program) for program in found]


def run(verify: Verifier, cases: list[OpCase]) -> Counter[VerdictKind]:
    counts: Counter[VerdictKind] = Counter()
    for case in cases:
        counts.update(verify(case, mesh=MESH, cap=8, allow_nothing=True, record=False).counts)
    return counts


GOOD = {VerdictKind.PASS, VerdictKind.INCONCLUSIVE, VerdictKind.UNSUPPORTED}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutant_is_caught_and_the_right_program_is_not(mutant: Callable[..., Any], verify: Verifier) -> None:
    kind, case, errors = MUTANTS[mutant]
    right = programs_of(kind, case)
    counts = run(verify, right)
    assert set(counts) <= GOOD
    assert counts[VerdictKind.PASS] >= 10
    with pytest.raises(VerificationError) as caught:
        run(verify, [replace(program, call=f"{mutants.__name__}.{mutant.__name__}") for program in right])
    assert isinstance(caught.value, errors), caught.value


@pytest.mark.parametrize("case", [plain("aten.zero_.default", tensor(4, 3)), plain("aten.fill_.Scalar", tensor(4), 3)])
def test_a_hidden_write_of_what_is_the_same_everywhere_is_caught_by_its_gradient(
    case: OpCase, verify: Verifier
) -> None:
    (right, *_) = programs_of("write to a copy", case)
    hidden = replace(right, call=f"{mutants.__name__}.{mutants.write_is_hidden.__name__}")
    if torch_is(">=2.14") and case.op == "aten.fill_.Scalar":  # a copy of parts is made of parts, and each is filled
        for one in ("R", "S(0)"):
            kinds = set(verify(right, mesh=MESH, placements=[one], allow_nothing=True, record=False).counts)
            assert kinds <= GOOD
            with pytest.raises(WrongGradient):
                verify(hidden, mesh=MESH, placements=[one], allow_nothing=True, record=False)
        with pytest.raises(WrongValue, match=r"under P\(sum\)"):
            verify(right, mesh=MESH, placements=["P(sum)"], record=False)
        return
    assert set(run(verify, [right])) <= GOOD
    with pytest.raises(WrongGradient):
        run(verify, [hidden])


@pytest.mark.parametrize(("mutant", "op"), RANDOM_MUTANTS)
def test_wrong_random_numbers_are_caught(mutant: Callable[..., Any], op: str, verify: Verifier) -> None:
    drawn = (random_case(op, torch.float64, variant) for variant in range(20))
    case = next(case for case in drawn if not case.call.endswith("called_twice"))  # DTensor fails that one itself
    counts = run(verify, [case])
    assert set(counts) <= {VerdictKind.PASS, VerdictKind.UNSUPPORTED}, "nothing is written to what is pending"
    assert counts[VerdictKind.PASS] >= 3
    with pytest.raises(WrongValue):
        run(verify, [replace(case, call=f"{mutants.__name__}.{mutant.__name__}")])


def test_random_numbers_that_each_rank_adds_to_are_caught(verify: Verifier) -> None:
    case = random_case("aten.randn_like.default", torch.float64, 0)
    assert set(run(verify, [case])) == {VerdictKind.PASS}
    with pytest.raises(WrongValue, match=r"P\(sum\)"):
        run(verify, [replace(case, call=f"{mutants.__name__}.{mutants.numbers_stay_pending.__name__}")])


@pytest.mark.parametrize("op", ["aten.bernoulli.default", "aten.native_dropout.default", "aten.randn_like.default"])
def test_uneven_shards_of_what_is_pending_are_drawn_for_as_one_tensor(op: str, verify: Verifier) -> None:
    case = random_case(op, torch.float64, 0)
    case = replace(case, kwargs={"input": torch.tensor([0.25, 0.75], dtype=torch.float64).repeat(3, 4, 3)})
    verify(case, mesh="2x2", placements=["(P(sum), S(0))"], record=False)
    if op == "aten.randn_like.default":
        wrong = replace(case, call=f"{mutants.__name__}.{mutants.numbers_stay_pending.__name__}")
        with pytest.raises(WrongValue):
            verify(wrong, mesh="2x2", placements=["(P(sum), S(0))"], record=False)


def test_a_dropout_that_drops_nothing_is_caught_however_many_ranks_may_hold_the_same_numbers(verify: Verifier) -> None:
    drawn = (random_case("aten.native_dropout.default", torch.float64, variant) for variant in range(20))
    case = next(case for case in drawn if len(case.kwargs["input"]) == 8)  # of an empty shard torch makes another mask
    verify(case, mesh=4, placements=["S(0)"], record=False)
    wrong = replace(case, call=f"{mutants.__name__}.{mutants.drops_nothing.__name__}")
    with pytest.raises(WrongValue):
        verify(wrong, mesh=4, placements=["S(0)"], record=False)


def test_every_kind_of_program_has_a_mutant() -> None:
    assert {kind for kind, _, _ in MUTANTS.values()} == set(COMPOSITIONS)
    own = {f for name, f in vars(mutants).items() if callable(f) and name[0] != "_"}
    tried = {f for f in own if getattr(f, "__module__", "") == mutants.__name__}
    random = {mutant for mutant, _ in RANDOM_MUTANTS}
    alone = {mutants.gradient_is_plain, mutants.drops_nothing, mutants.numbers_stay_pending}
    assert tried == {*MUTANTS, *random, *alone}
    assert RANDOM not in COMPOSITIONS


def test_a_gradient_that_is_no_dtensor_is_named(verify: Verifier) -> None:
    call = f"{mutants.__name__}.{mutants.gradient_is_plain.__name__}"
    with pytest.raises(WrongGradient, match=r"input\.grad: structure got a plain tensor, expected a DTensor"):
        verify(call, tensor(4, 3).requires_grad_(), mesh=MESH, placements=["R"], record=False)
