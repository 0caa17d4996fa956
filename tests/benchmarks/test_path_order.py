"""The benchmark of the order of paths chooses and ranks what it says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from verifier.redistribution.layouts import Space, parse_layout
from verifier.redistribution.models import LAUNCH
from verifier.redistribution.steps import steps_between
from verifier.redistribution.torch_side import TorchSide


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    yield
    sys.modules.pop("path_order", None)


def test_ranks_and_their_correlation() -> None:
    import path_order

    assert path_order.ranks_of([3.0, 1.0, 1.0, 2.0]) == [3.0, 0.5, 0.5, 2.0]
    assert path_order.rank_correlation([1, 2, 3, 4], [10, 20, 40, 80]) == pytest.approx(1.0)
    assert path_order.rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)


def test_fifty_different_paths_are_chosen_that_a_caller_can_ask_for() -> None:
    import path_order

    paths = path_order.paths_of(TorchSide(Space((2, 2), (64, 64)), torch.float32), 50)
    assert len({path.layouts for path in paths}) == 50
    assert not any(step.kind in ("split", "pad") for path in paths for step in path.steps)
    assert all(path.collectives for path in paths)
    assert {step.kind for path in paths for step in path.steps} >= {"all_gather", "all_reduce", "all_to_all"}


def test_a_link_explains_the_gathers_that_it_was_measured_by() -> None:
    import path_order

    link = path_order.calibration([1e-4, 3e-4], large=2_000_000, small=0)
    assert link.bandwidth == pytest.approx(1e10)
    assert link.latency == pytest.approx(1e-4 - LAUNCH)


def test_a_link_by_kind_gives_back_what_it_was_measured_by() -> None:
    import path_order

    kinds = [(kind, dim) for kind in path_order.ALONE for dim in range(2)]
    links = {
        kind: path_order.calibration(
            [1e-4 * (n + 1), 9e-4], *(path_order.busiest_of(path_order.alone(*kind), size) for size in (1024, 32))
        )
        for n, kind in enumerate(kinds[:4])
    }
    space = Space((2, 2), (1024, 1024))
    for n, (kind, dim) in enumerate(kinds[:4]):
        ends = [
            next(one for one in space.layouts if one.placements == placements)
            for placements in path_order.alone(kind, dim)
        ]
        step = next(one for one in steps_between(space, *ends) if one.kind == kind)
        assert step.mesh_dims == (dim,)
        assert path_order.ByKind(links).seconds(step) == pytest.approx(9e-4), n


def test_an_all_to_all_on_gloo_has_the_bytes_of_an_all_gather() -> None:
    import path_order

    space = Space((2, 2), (8, 8))
    ends = (parse_layout(text, 2, 2) for text in ("S(0)R", "S(1)R"))
    exchange = next(iter(steps_between(space, *ends)))
    gathered = path_order.as_gloo(exchange, space)
    assert (exchange.kind, exchange.busiest) == ("all_to_all", 64)
    assert (gathered.kind, gathered.busiest, gathered.target) == ("all_gather", 128, exchange.target)
