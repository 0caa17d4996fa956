"""What the minimiser tries in the place of a failing trial."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Difference, DifferenceKind, Fate, Observation, ProcessReport
from verifier.core.verdict import Phase
from verifier.findings.failures import Failure
from verifier.findings.minimising import Minimiser, _is_determined
from verifier.findings.script.render import render_script
from verifier.findings.variants import plainer_cases
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.placements.parsing import parse_placements


def test_a_call_without_its_mode_is_not_held_to_be_exact() -> None:
    arguments = {
        "weight": torch.ones(2, 2, dtype=torch.float64),
        "input": torch.tensor([0, 1]),
        "offsets": torch.tensor([0]),
    }
    options = {"mode": "max", "padding_idx": 1, "include_last_offset": True}
    case = OpCase("aten._embedding_bag.default", "torch.nn.functional.embedding_bag", (), {**arguments, **options})
    trial = Trial(case, MeshSpec((2,)), (parse_placements("R"),) * 3)
    assert case.exact
    variants = {
        (*(options.keys() - plainer.case.kwargs.keys()),): plainer.case.exact for plainer in plainer_cases(trial)
    }
    assert variants == {("mode",): False, ("padding_idx",): True, ("include_last_offset",): True}


def test_results_that_cannot_be_compared_are_no_reason_to_stop() -> None:
    case = OpCase("aten._to_sparse.default", "torch.ops.aten._to_sparse.default", (torch.eye(2),))
    assert _is_determined(make_reference(case))


def test_what_makes_something_else_each_time_is_no_smaller_failure() -> None:
    options = {"lower": 0.25, "upper": 0.25, "training": True}
    case = OpCase("aten.rrelu.default", "torch.rrelu", (torch.tensor([-1.0, 2.0]),), options)
    trial = Trial(case, MeshSpec((2,)), (parse_placements("R"),))

    def always_wrong(tried: Trial) -> Observation:
        difference = Difference(DifferenceKind.VALUE, Phase.FORWARD, "output", 0, "1.0", "2.0", (0,))
        return Observation(
            tried, Fate.COMPLETED, tuple(ProcessReport((r,), Phase.DONE, differences=(difference,)) for r in range(2))
        )

    minimiser = Minimiser(always_wrong, None, 0, float("inf"))
    observation = always_wrong(trial)
    failure = Failure(trial, observation, judge(observation, make_reference(case)))
    assert minimiser.attempt(trial, failure) is not None
    for name in ("lower", "upper"):
        random = replace(case, kwargs={key: value for key, value in options.items() if key != name})
        assert minimiser.attempt(replace(trial, case=random), failure) is None


@pytest.mark.parametrize("fate", [Fate.DIED, Fate.HANG])
def test_the_backward_pass_that_no_rank_named_is_found_and_is_in_the_script(fate: Fate) -> None:
    case = OpCase("aten.neg.default", "torch.neg", (torch.ones(2, 2, dtype=torch.float64, requires_grad=True),))
    passes = tuple((parse_placements(text),) for text in ("R", "S(0)", "S(1)"))
    trial = Trial(case, MeshSpec((2,)), (parse_placements("R"),), passes)

    def fails_in_one(tried: Trial) -> Observation:
        if passes[1] in tried.cotangents:
            return Observation(tried, fate, (None, None), "rank 1 ended with signal SIGABRT in backward")
        return Observation(tried, Fate.COMPLETED, tuple(ProcessReport((r,), Phase.DONE) for r in range(2)))

    observation = fails_in_one(trial)
    failure = Failure(trial, observation, judge(observation, make_reference(case)))
    smallest, _ = Minimiser(fails_in_one, None, 0, float("inf")).minimise(failure, lambda _: False)
    assert (smallest.trial.cotangents, smallest.trial.seed) == ((passes[1],), trial.seed + 1)
    assert "COTANGENT_PLACEMENTS = [[Shard(0)]]" in render_script(smallest.trial, smallest.verdict)
