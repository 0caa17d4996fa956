"""What a process reports of values that it cannot send or compare; no rank is started."""

from __future__ import annotations

import mmap
from dataclasses import fields, replace
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import (
    Contribution,
    Difference,
    DifferenceKind,
    Executed,
    Issued,
    ProcessReport,
    Raised,
    Redistribution,
)
from verifier.core.verdict import Phase
from verifier.execution import runner as runtime
from verifier.execution.trial_log import TrialLog
from verifier.meshes.messages import pack_message, pack_report, unpack_message
from verifier.meshes.worker import _Messages
from verifier.oracle.comparison import Spot
from verifier.oracle.reference import make_reference
from verifier.torch_internals.dtensors import LocalShards

SPARSE = torch.eye(2).to_sparse()
PART = Contribution(Phase.FORWARD, "output", 0, "P(sum)", SPARSE)


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (ProcessReport((0,), Phase.DONE, contributions=(PART,)), "its layout is torch.sparse_coo"),
        (ProcessReport((0,), Phase.DONE, returned=lambda: None), "<lambda>"),
    ],
)
def test_a_report_that_cannot_be_sent_costs_its_trial_alone(report: ProcessReport, reason: str) -> None:
    ours, theirs = Pipe()
    messages = _Messages(theirs, mmap.mmap(-1, 1), trial=7)
    messages.report(report)
    messages.announce(report)
    for kind in ("report", "raised"):
        got, trial, sent = unpack_message(ours.recv_bytes())
        assert (got, trial, sent.ranks, sent.reached) == (kind, 7, (0,), Phase.DONE)
        assert sent.raised.ours
        assert sent.raised.message.startswith("what this process has to report cannot be sent: ")
        assert reason in sent.raised.message


FULL = ProcessReport(
    ranks=(2,),
    reached=Phase.BACKWARD,
    raised=Raised(Phase.BACKWARD, "RuntimeError", "größer", "f (a.py)", "Traceback", True, False, 1),
    placements=(("output", "S(0)"), ("weight.grad 0", "R")),
    differences=(Difference(DifferenceKind.VALUE, Phase.FORWARD, "output", 2, "nan", "1.0", (3, 0), None),),
    redistributions=(
        Redistribution(
            Phase.GATHER,
            "S(0)",
            "R",
            0,
            "all_gather",
            384,
            ("S(0)", "R"),
            peak=24,
            seconds=0.5,
            issued=(Issued("all_gather_into_tensor", (0, 1), "float64", 8, 16),),
        ),
    ),
    executed=(Executed(Phase.BACKWARD, 1, "aten.mm.default", ("S(0)", "R")),),
    collectives=(("gather", "all_gather_into_tensor", 2),),
    unchecked=("output: a masked partial has lost its mask",),
    other_kernel="cuda raises RuntimeError, and cpu returns, both without DTensor",
    seconds=(("setup", 0.25), (Phase.GATHER, 0.5)),
    cache_misses=3,
    issued=(4, 1),
)


@pytest.mark.parametrize("message", ["größer", "half a pair: \ud800"])
def test_a_report_arrives_as_it_was_sent(message: str) -> None:
    assert FULL.raised is not None
    report = replace(FULL, raised=replace(FULL.raised, message=message))
    for field in fields(ProcessReport):
        assert field.name in ("contributions", "returned") or getattr(report, field.name), f"{field.name} is not tested"
    kind, trial, sent = unpack_message(pack_report("raised", 7, report))
    assert (kind, trial, sent) == ("raised", 7, report)
    assert type(sent.reached) is type(sent.redistributions[0].phase) is Phase
    assert type(sent.differences[0].kind) is DifferenceKind


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.bool])
def test_parts_arrive_as_they_were_sent(dtype: torch.dtype) -> None:
    part = torch.tensor([[1, 0, 3], [0, 5, 6]]).to(dtype).T
    values = (part, part[:0], part.contiguous(), part[0, 0])
    sent = ProcessReport((0,), Phase.DONE, contributions=tuple(replace(PART, local=value) for value in values))
    _, _, got = unpack_message(pack_report("report", 0, sent))
    for there, here in zip(got.contributions, sent.contributions, strict=True):
        assert torch.equal(there.local, here.local)
        assert there.local.dtype is dtype
        assert there.local.stride() == here.local.stride() or not there.local.numel()
        assert replace(there, local=here.local) == here


@st.composite
def with_any_strides(draw: st.DrawFn) -> torch.Tensor:
    """Return a tensor of up to four dims, some of size 0 or 1, with gaps, repeats and an offset in its memory."""
    shape = draw(st.lists(st.sampled_from((0, 1, 1, 2, 3)), max_size=4))
    strides = draw(st.lists(st.integers(0, 7), min_size=len(shape), max_size=len(shape)))
    if draw(st.booleans()):  # contiguous but for the dims along which no step is made
        dense = torch.empty(shape).stride()
        strides = [made if size > 1 else stride for made, size, stride in zip(dense, shape, strides, strict=True)]
    offset = draw(st.integers(0, 3))
    dtype = draw(
        st.sampled_from((torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.int16, torch.uint8))
    )
    memory = torch.arange(offset + 1 + sum(2 * stride for stride in strides)) * 7 % 11
    return memory.to(dtype).as_strided(shape, strides, offset)


@given(with_any_strides())
def test_parts_of_any_strides_arrive_with_their_values(part: torch.Tensor) -> None:
    sent = ProcessReport((0,), Phase.DONE, contributions=(replace(PART, local=part),))
    _, _, got = unpack_message(pack_report("report", 0, sent))
    local = got.contributions[0].local
    assert (local.dtype, local.shape) == (part.dtype, part.shape)
    assert torch.equal(local, part)


@pytest.mark.parametrize("stride", [0, 2])
def test_a_part_of_one_element_may_have_any_stride(stride: int) -> None:
    part = torch.arange(4.0, dtype=torch.float64).as_strided((1,), (stride,), 3)
    assert part.is_contiguous()
    _, _, got = unpack_message(
        pack_report("report", 0, ProcessReport((0,), Phase.DONE, contributions=(replace(PART, local=part),)))
    )
    assert got.contributions[0].local.tolist() == [3.0]


@pytest.mark.parametrize("returned", [(1, "two"), {"a": torch.float32}, MeshSpec((2, 2))], ids=str)
def test_what_a_task_returned_arrives_as_it_was(returned: object) -> None:
    sent = ProcessReport((0,), Phase.DONE, returned=returned)
    assert unpack_message(pack_report("report", 0, sent)) == ("report", 0, sent)
    assert unpack_message(pack_message("built", 0, returned)) == ("built", 0, returned)


@pytest.mark.parametrize("placement", [Replicate(), Partial()])
def test_sparse_results_are_not_compared(monkeypatch: pytest.MonkeyPatch, placement: Placement) -> None:
    case = OpCase("aten._to_sparse.default", "torch.ops.aten._to_sparse.default", (torch.eye(2),))
    reference, log = make_reference(case), TrialLog()
    trial = Trial(case, MeshSpec((2,)), ((placement,),))
    monkeypatch.setattr(runtime, "local_shards", lambda _: LocalShards((placement,), {0: SPARSE}))
    steps = runtime._Steps(SimpleNamespace(mesh=None), trial, reference, log)  # type: ignore[arg-type]
    (expected,), held = reference.outputs, SimpleNamespace(shape=SPARSE.shape)
    steps.check(Spot(Phase.FORWARD, "output"), held, expected)  # type: ignore[arg-type]
    steps.gather(Spot(Phase.GATHER, "output"), held, expected)  # type: ignore[arg-type]
    assert log.unchecked == ["output: tensors of layout torch.sparse_coo are not compared"]
    assert (log.raised, log.differences, log.contributions) == (None, [], [])
