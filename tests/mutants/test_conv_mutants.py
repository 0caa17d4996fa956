"""Level 1 runs DTensor's handlers for convolutions: it accuses rules and handlers that are wrong, and no others."""

from __future__ import annotations

from functools import cache

import conv_mutants
import pytest
import torch
from conv_mutants import BACKWARD, FORWARD, HANDLERS, RULES, ConvMutant
from rule_mutants import short
from rule_strategies import SUM, R, Rule
from torch.distributed.tensor import Shard

from strategies.opinfo.handmade import handmade_samples
from verifier.core.case import MeshSpec
from verifier.rules.check import check_sample
from verifier.rules.options import CheckOptions
from verifier.rules.results import SampleReport
from verifier.rules.samples import Sample, SampleOptions
from verifier.torch_internals.registries import replaced_strategy

OPTIONS = CheckOptions((MeshSpec((2,)), MeshSpec((3,))), sizes=1, claims_only=True, samples_called_again=0)
LABELS = (
    "conv2d, borders exchanged", "conv2d, equal sizes", "conv2d, equal sizes in groups", "conv2d, stride",
    "conv1d, groups and stride", "conv2d, transposed, equal sizes",
)  # fmt: skip
aten = torch.ops.aten


@cache
def samples(op: str) -> tuple[Sample, ...]:
    """Return some handmade calls of ``op``."""
    chosen = [f"handmade, {label}{end}" for label in LABELS for end in ("", ", gradients 111")]
    return tuple(sample for sample in handmade_samples(op, SampleOptions()) if sample.origin in chosen)


def check(op: str, options: CheckOptions = OPTIONS) -> list[SampleReport]:
    return [check_sample(sample, options) for sample in samples(op)]


def accused(reports: list[SampleReport]) -> set[str]:
    return {short(wrong.rule) for report in reports for wrong in report.wrong}


@pytest.mark.parametrize(
    ("op", "rules"),
    [
        (FORWARD, {"S(0), R, R -> S(0)", "S(0), R -> S(0)", "R, R, R -> R"}),
        (BACKWARD, {"S(0), S(0), R -> S(0), P(sum), P(sum)", "R, R, R -> R, R, R"}),
    ],
)
def test_torch_s_own_rules_hold(op: str, rules: set[str]) -> None:
    reports = check(op)
    assert accused(reports) == set()
    assert {short(rule) for report in reports for rule in report.confirmed} >= rules


def test_what_the_handler_redistributes_itself_is_no_wrong_rule() -> None:
    with replaced_strategy(aten.convolution_backward.default, whole_gradient):
        assert accused(check(BACKWARD)) == set()


def whole_gradient(op: object, args: object, kwargs: object) -> list[Rule]:
    return [[Shard(0), SUM, SUM, R, Shard(0), R]]


@pytest.mark.parametrize("mutant", [*RULES, *HANDLERS], ids=lambda mutant: mutant.name)
def test_a_wrong_rule_or_handler_is_accused(mutant: ConvMutant) -> None:
    with mutant.apply():
        assert any(accused([check_sample(sample, OPTIONS)]) for sample in samples(mutant.op))


# -------------------------------------------------------------------------------------------------- exchange of borders
def width(op: object, args: object, kwargs: object) -> list[Rule]:
    """Return the rule that cuts the last dim of an image."""
    return [[Shard(3), Shard(3), R, R]]


def exchanged(sample: str = "conv2d, borders exchanged") -> SampleReport:
    (chosen,) = (one for one in samples(FORWARD) if one.origin == f"handmade, {sample}")
    return check_sample(chosen, OPTIONS)


def test_the_handler_s_exchange_of_borders_is_run() -> None:
    with replaced_strategy(aten.convolution.default, width):
        report = exchanged()
    assert accused([report]) == set()
    assert {short(rule) for rule in report.confirmed} == {"S(3), R, R -> S(3)", "R, R, R -> R"}


@pytest.mark.parametrize(
    ("function", "before", "after"),
    [
        ("tp_convolution", "d = weight.shape[-1] - 1", "d = weight.shape[-1] + 1"),
        ("tp_convolution", "padding_w:w", "0:w"),
        ("tp_convolution", "if rank == 0:", "if rank != 0:"),
        ("_ring_send_recv_construct", "-d1:", ":d1"),
        ("_ring_send_recv_construct", "[recv_from_left, in_tensor, recv_from_right]",
         "[recv_from_right, in_tensor, recv_from_left]"),
        ("_requires_data_exchange", "padding[-1] != 0", "padding[-1] == 0"),
    ],
)  # fmt: skip
def test_a_wrong_exchange_of_borders_is_accused(function: str, before: str, after: str) -> None:
    with replaced_strategy(aten.convolution.default, width), conv_mutants.edited(function, before, after):
        assert accused([exchanged()]) == {"S(3), R, R -> S(3)"}
