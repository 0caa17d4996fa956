"""What a process reports of values that it cannot send or compare; no rank is started."""

from __future__ import annotations

import mmap
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from verifier import runtime
from verifier.cases import Contribution, MeshSpec, OpCase, Phase, ProcessReport, Trial
from verifier.codec import unpack
from verifier.comparison import Spot
from verifier.meshes.worker import _Messages
from verifier.reference import make_reference
from verifier.torch_internals import LocalShards
from verifier.trial_log import TrialLog

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
        got, trial, sent = unpack(ours.recv_bytes())
        assert (got, trial, sent.ranks, sent.reached) == (kind, 7, (0,), Phase.DONE)
        assert sent.raised.ours
        assert sent.raised.message.startswith("what this process has to report cannot be sent: ")
        assert reason in sent.raised.message


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
