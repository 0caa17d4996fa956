"""What the minimiser tries in the place of a failing trial."""

from __future__ import annotations

import torch

from verifier.cases import MeshSpec, OpCase, Trial, parse_placements
from verifier.minimising import _plainer_cases


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
        (*(options.keys() - plainer.case.kwargs.keys()),): plainer.case.exact for plainer in _plainer_cases(trial)
    }
    assert variants == {("mode",): False, ("padding_idx",): True, ("include_last_offset",): True}
