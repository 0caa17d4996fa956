"""Ops and redistributions in a row, driven as a state machine: each rule appends a step, the end checks the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from refused_backward import is_refused_in_backward
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from strategies.redistribution.inputs import SEQUENCE_OP, next_steps, one_of, sequence_case, target_placements
from strategies.redistribution.programs import SEQUENCE, sequence
from strategies.tensors import Layout, filled
from verifier.calls.result import VerificationError, WrongValue
from verifier.calls.verifier import Verifier
from verifier.core.case import MeshSpec
from verifier.core.verdict import VerdictKind
from verifier.placements.algebra import in_order
from verifier.planning.families import DrawContext

MESH = MeshSpec((2, 2))
CONTEXT = DrawContext(MESH, (torch.float64,), (SEQUENCE_OP,))
HOW = settings(
    max_examples=12,
    stateful_step_count=4,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
    print_blob=False,
)
PLACEMENTS = target_placements(MESH, 2, [Replicate(), Shard(0), Shard(1)])


class Steps(RuleBasedStateMachine):
    """Values that ops and redistributions make out of two matrices of uneven sizes."""

    verify: Verifier
    call = SEQUENCE

    def __init__(self) -> None:
        super().__init__()
        trainable = Layout(requires_grad=True)
        self.first, self.second = (
            filled((5, 3), torch.float64, 0, trainable),
            filled((3, 5), torch.float64, 1, trainable),
        )
        self.values = [self.first.detach(), self.second.detach()]
        self.steps: list[list[Any]] = []
        self.source = ["R", "R"]

    def append(self, step: list[Any]) -> None:
        self.steps.append(step)
        self.values.append(sequence(self.values[0], self.values[1], self.steps)[-1])

    @rule(data=st.data(), placements=PLACEMENTS)
    def redistribute(self, data: st.DataObject, placements: list[Any]) -> None:
        position = data.draw(st.sampled_from([i for i, value in enumerate(self.values) if value.ndim == 2]))
        self.append(["redistribute", position, placements])

    @rule(data=st.data())
    def apply_op(self, data: st.DataObject) -> None:
        # what torch 2.13.0 makes of a write to a slice is a test of its own
        left_out = ("redistribute", "flatten", "add_to_slice")
        steps = [step for step in next_steps(self.values, self.steps) if step[0] not in left_out]
        self.append(data.draw(one_of(steps)))

    @precondition(lambda self: not self.steps)
    @rule(text=st.sampled_from(["(S(0), R)", "(S(0), S(0))", "(S(1), S(0))", "(R, P(sum))", "(P(max), S(1))"]))
    def place_first(self, text: str) -> None:
        self.source[0] = text

    def teardown(self) -> None:
        if self.steps:
            case = sequence_case(self.first, self.second, self.steps, CONTEXT, self.call)
            source = [text if text != "R" else "(R, R)" for text in self.source]
            try:
                self.verify(case, mesh=MESH, placements=source, allow_nothing=True, record=False)
            except VerificationError as error:
                if not is_refused_in_backward(error):
                    raise


def forgetful(first: torch.Tensor, second: torch.Tensor, steps: list[list[Any]]) -> list[torch.Tensor]:
    """A sequence in which an op on what a redistribution has made doubles the results."""
    results = sequence(first, second, steps)
    made = {2 + number: name for number, (name, *_) in enumerate(steps)}
    wrong = any(name != "redistribute" and made.get(a[0]) == "redistribute" for name, *a in steps)
    return [result * 2 if wrong and isinstance(result, DTensor) else result for result in results]


@pytest.fixture
def machine(verify: Verifier) -> type[Steps]:
    return type("Machine", (Steps,), {"verify": staticmethod(verify)})


def test_steps_in_a_row_agree_with_the_local_program(machine: type[Steps]) -> None:
    run_state_machine_as_test(machine, settings=HOW)


def test_machine_shrinks_to_the_shortest_wrong_sequence(machine: type[Steps]) -> None:
    """A deliberate fault that needs a redistribution and an op on its result, and nothing else."""
    machine.call = f"{forgetful.__module__}.forgetful"
    with pytest.raises(WrongValue) as caught:
        run_state_machine_as_test(machine, settings=settings(HOW, max_examples=60))
    steps: Any = caught.value.failure.trial.case.args[2]
    assert len(steps) == 2
    assert steps[0][0] == "redistribute"
    assert steps[1][1] == 2  # the result of the first step


def test_a_value_is_used_in_two_placements(verify: Verifier) -> None:
    """The same tensor sharded by rows and by columns, and both added up: as a residual around a resharded branch."""
    tensor = filled((5, 3), torch.float64, 0, Layout(requires_grad=True))
    rows, columns = [Shard(0), Replicate()], [Replicate(), Shard(1)]
    steps: list[list[Any]] = [["redistribute", 0, rows], ["redistribute", 0, columns], ["add", 2, 3], ["mul", 4, 2]]
    case = sequence_case(tensor, tensor.detach().clone(), steps, CONTEXT)
    result = verify(case, mesh=MESH, placements=["(S(1), P(sum))", "(R, R)"])
    assert result.counts == {VerdictKind.PASS: 1}


def test_values_stay_pending_and_in_a_shard_order_between_ops(verify: Verifier) -> None:
    """A sum that is not reduced yet is redistributed on the other mesh dim alone; rows are cut from right to left."""
    tensors = [filled((5, 3), torch.float64, seed, Layout(requires_grad=True)) for seed in (0, 1)]
    steps: list[list[Any]] = [
        ["redistribute", 0, [Partial(), Replicate()]],
        ["neg", 2],
        ["redistribute", 3, [Partial(), Shard(0)]],
        ["redistribute", 1, list(in_order((Shard(0), Shard(0)), MESH.shape, (1, 0)))],
        ["add", 4, 5],
        ["redistribute", 5, [Replicate(), Shard(1)]],
    ]
    case = sequence_case(*tensors, steps, CONTEXT)
    assert case.tags >= {"Partial target", "shard order"}
    result = verify(case, mesh=MESH, placements=["(P(sum), S(1))", "(S(0), R)"])
    assert result.counts == {VerdictKind.PASS: 1}


def test_every_kind_of_step_agrees_in_one_sequence(verify: Verifier) -> None:
    """In-place, by a value and by a number; slices, by range and by index; views; joined values."""
    tensors = [filled((5, 3), torch.float64, seed, Layout(requires_grad=True)) for seed in (0, 1)]
    steps: list[list[Any]] = [
        ["clone", 0],
        ["add_", 2, 1],
        ["redistribute", 3, [Replicate(), Shard(1)]],
        ["mul_", 4, -2.0],
        ["add_to_slice", 5, 5.0, 0, 1, 4],  # along the dim that is not cut
        ["narrow", 6, 0, 1, 3],
        ["cat", 7, 6, 0],
        ["select", 8, 0, 7],
        ["t", 8],
    ]
    case = sequence_case(*tensors, steps, CONTEXT)
    assert case.tags >= {"cat", "in-place", "slice", "view", "write to a slice"}
    result = verify(case, mesh=MESH, placements=["(S(1), R)", "(R, R)"])
    assert result.counts == {VerdictKind.PASS: 1}


def test_a_write_to_a_slice_that_dtensor_has_to_gather_is_lost(verify: Verifier) -> None:
    """What torch 2.13.0 does: the slice is of a gathered copy, and so is what is written to it."""
    tensors = [filled((5, 3), torch.float64, seed) for seed in (0, 1)]
    case = sequence_case(*tensors, [["clone", 0], ["add_to_slice", 2, 5.0, 0, 0, 3]], CONTEXT)
    assert verify(case, mesh=MESH, placements=["(S(1), R)", "(R, R)"]).counts == {VerdictKind.PASS: 1}
    with pytest.raises(WrongValue, match="output"):
        verify(case, mesh=MESH, placements=["(S(0), R)", "(R, R)"], record=False)
