"""Wrong rules of pending reductions that only some values of the parts show."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.tensor import Partial
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy

from strategies.opinfo.source import SOURCE
from verifier.core.case import MeshSpec
from verifier.rules.check import check_sample
from verifier.rules.options import CheckOptions
from verifier.rules.results import SampleReport
from verifier.rules.samples import SampleOptions, is_rare
from verifier.torch_internals.names import OpOverload
from verifier.torch_internals.registries import replaced_strategy

aten = torch.ops.aten


def reports(op: OpOverload, kind: str) -> Iterator[SampleReport]:
    """Yield what level 1 says of usual calls of ``op`` under the claim that it passes a pending reduction on."""
    with replaced_strategy(op):
        register_single_dim_strategy(op)(lambda op, args, kwargs: [[Partial(kind), Partial(kind)]])
        (target,) = SOURCE.select([str(op)])
        for sample in SOURCE.samples(target, SampleOptions(max_samples=2)):
            if not is_rare(sample):
                yield check_sample(sample, CheckOptions((MeshSpec((2,)),), claims_only=True, samples_called_again=0))


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        (aten.isinf.default, "max"),  # -inf in a part is no infinity of the maximum
        (aten.isneginf.default, "max"),
        (aten.isinf.default, "sum"),  # inf and -inf in the parts are NaN in the sum
        (aten.isnan.default, "sum"),
    ],
)
def test_an_infinity_that_the_reduction_hides_or_makes_a_nan_of_shows_it(op: OpOverload, kind: str) -> None:
    assert any(report.special for report in reports(op, kind))


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        (aten.isposinf.default, "max"),
        (aten.isposinf.default, "min"),
        (aten.isnan.default, "max"),
        (aten.relu.default, "max"),
    ],
)
def test_what_holds_of_infinite_parts_as_well_is_not_accused(op: OpOverload, kind: str) -> None:
    some = list(reports(op, kind))
    assert some
    assert not any(report.special or report.wrong for report in some)


@pytest.mark.parametrize("kind", ["sum", "max", "product"])
def test_fractions_of_whole_numbers_would_show_nothing(kind: str) -> None:
    assert any(report.wrong for report in reports(aten.frac.default, kind))
