"""Failures are told apart by the place in torch where they come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement
from torch_versions import torch_is

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Executed, Fate, Observation, ProcessReport, Raised
from verifier.core.verdict import Phase, Verdict, VerdictKind
from verifier.findings.failures import Failure
from verifier.findings.places import place_of, strategy_of
from verifier.placements.parsing import parse_placements
from verifier.torch_internals.registries import replaced_strategy

aten = torch.ops.aten


def failure(op: str, kind: VerdictKind = VerdictKind.WRONG_VALUE, file: str = "", where: str = "") -> Failure:
    case = OpCase(op, "torch.neg", (torch.ones(3),), family="family")
    trial = Trial(case, MeshSpec((2,)), (parse_placements("S(0)"),))
    raised = Raised(Phase.FORWARD, "RuntimeError", "no", where, file=file) if file else None
    report = ProcessReport((0,), Phase.FORWARD if file else Phase.DONE, raised)
    return Failure(trial, Observation(trial, Fate.COMPLETED, (report,)), Verdict(kind, "", Phase.FORWARD, "output"))


def failing_step(op: str, step: str) -> Failure:
    """Return a failure of a program that calls ``op`` and whose last step is ``step``."""
    found = failure(op)
    executed = Executed(Phase.FORWARD, None, step, ("R",))
    report = replace(found.observation.reports[0], executed=(executed,))
    return replace(found, observation=replace(found.observation, reports=(report,)))


def test_the_strategy_of_an_op_of_torch_is_named_from_the_folder_of_torch() -> None:
    file, _, line = strategy_of("aten.cumsum.default").rpartition(":")
    assert file == "torch/distributed/tensor/_ops/_math_ops.py"
    written = (Path(torch.__file__).parents[1] / file).read_text().splitlines()
    assert "aten.cumsum.default" in "".join(written[int(line) - 1 : int(line) + 3])
    assert strategy_of("no.such_op.default") == ""
    assert strategy_of("aten.dist.default") == "", "DTensor decomposes it"


def test_ops_whose_rules_one_function_claims_are_one_place_whatever_the_verdict() -> None:
    place = place_of(failure("aten.cumsum.default"))
    name = "scan_strategy" if torch_is("<2.14") else "scan_single_dim_strategy"
    assert place == f"torch.distributed.tensor._ops._math_ops.{name}"
    assert place_of(failure("aten.cumprod.default", VerdictKind.WRONG_SHAPE)) == place
    assert place_of(failure("aten.median.default")) != place


def test_ops_whose_rules_a_factory_makes_are_places_of_their_own() -> None:
    assert place_of(failure("aten.exp.default")) != place_of(failure("aten.sin.default"))


def test_a_function_of_dtensor_that_raises_is_the_place_and_a_kernel_is_not() -> None:
    crash = VerdictKind.CRASH
    raised = failure("aten.exp.default", crash, "_view_ops.py", "expand in _view_ops.py")
    assert place_of(raised) == "expand in _view_ops.py"
    assert place_of(failure("aten.cumsum.default", crash, "functional.py", "softmax in functional.py")) == place_of(
        failure("aten.cumsum.default")
    )


def scan(*args: object) -> list[list[Placement | None]]:
    return [[Replicate(), Replicate()]]


def test_the_place_is_the_user_s_function_where_the_user_has_registered_one() -> None:
    with replaced_strategy(aten.cumsum.default, scan):
        assert place_of(failure("aten.cumsum.default")) == f"{__name__}.scan"


def test_calls_of_two_ops_of_an_import_are_two_places_where_torchs_rules_of_another_op_fail() -> None:
    own = ("aten.bernoulli.default", "aten.randint_like.default")
    first, second = (failure(op, VerdictKind.CRASH, "_view_ops.py", "expand in _view_ops.py") for op in own)
    assert place_of(first) == place_of(second)
    assert place_of(first, own) != place_of(second, own)
    first, second = (failing_step(op, "aten.clone.default") for op in own)
    assert place_of(first) == place_of(second)
    assert place_of(first, own) != place_of(second, own)
    assert place_of(first, own[1:]) == place_of(first)


def test_no_place_is_known_of_what_dtensor_decomposes_or_timing_decides() -> None:
    assert place_of(failure("aten.mse_loss.default")) == ""
    assert place_of(failure("dtensor.redistribute")) == ""
    assert place_of(failure("aten.cumsum.default", VerdictKind.HANG)) == ""


def test_ranks_that_got_apart_by_the_user_s_rules_did_so_in_one_place() -> None:
    own = ["aten.cumsum.default"]
    places = {place_of(failure(own[0], kind), own) for kind in (VerdictKind.HANG, VerdictKind.DIED)}
    assert len(places) == 1
    assert "" not in places
    assert place_of(failure("aten.cumprod.default", VerdictKind.HANG), own) == ""
    assert place_of(failure(own[0]), own) == place_of(failure(own[0]))
