"""Judgements: torch's path, the best paths, the ratios."""

from __future__ import annotations

import itertools

import networkx as nx
import pytest

from verifier.redistribution.judging import Judge, Judgement, Regret
from verifier.redistribution.layouts import Space, parse_layout
from verifier.redistribution.models import AlphaBeta, Link, links_for, parse_link
from verifier.redistribution.torch_side import TorchSide

FAST, SLOW = Link(1e-6, 100e9), Link(10e-6, 1e9)


def judge(
    mesh: tuple[int, ...], shape: tuple[int, ...], *links: Link, flattened: bool = False, partial: str = "sum"
) -> Judge:
    space = Space(mesh, shape, partial=partial)
    return Judge(space, TorchSide(space, flattened=flattened), AlphaBeta(links or (FAST,) * len(mesh)))


def judged(one: Judge, source: str, target: str) -> Judgement:
    ndim, mesh_ndim = len(one.space.shape), len(one.space.mesh_shape)
    return one.judge(parse_layout(source, ndim, mesh_ndim), parse_layout(target, ndim, mesh_ndim))


def test_the_case_of_the_docs() -> None:
    """Torch gathers everything. One exchange among all ranks and a gather of two shards do with far less."""
    found = judged(judge((2, 4), (1024, 8, 1024)), "S(0)S(2)", "RS(0)")
    assert found.path is not None
    assert [step.kind for step in found.path.steps] == ["all_gather", "all_gather", "slice"]
    best = found.best["model"]
    assert [(step.kind, step.mesh_dims) for step in best.steps] == [("all_to_all", (0, 1)), ("all_gather", (0,))]
    size = 1024 * 8 * 1024 * 4
    assert found.path.bytes == size * 7
    assert best.bytes == found.bound.total
    assert found.bound.total == 7 * size // 4
    assert found.regrets["bytes"].ratio == 4
    assert found.regrets["memory"].ratio == 4
    assert found.blame == "planner"


def test_who_is_to_blame() -> None:
    small = judge((2, 4), (8, 8))
    assert judged(small, "PS(0)", "S(0)S(0)").blame == "step"
    assert judged(small, "S(0)R", "RR").blame == ""
    refused = judged(judge((2, 4), (8, 8), partial="max"), "S(0)R", "P(max)R")
    assert refused.path is None
    assert "does not execute" in refused.refusal
    assert refused.regrets == {}
    assert judged(judge((2, 2), (8, 8)), "S(0)S(0)", "RR").blame == "step", "one gather over four ranks is faster"
    assert judged(judge((2, 2), (8, 8), flattened=True), "S(0)S(0)", "RR").blame == ""


def test_links_decide_over_which_mesh_dim_to_send_more() -> None:
    """Over the slow mesh dim, the best path sends shards before they are gathered over the fast one."""
    best = {
        links: judged(judge((2, 2), (1024, 1024), *links), "S(0)S(1)", "RR").best["model"]
        for links in ((SLOW, FAST), (FAST, SLOW))
    }
    first = {links: path.steps[0].mesh_dims for links, path in best.items()}
    assert first == {(SLOW, FAST): (0,), (FAST, SLOW): (1,)}


@pytest.mark.parametrize("name", ["planner", "step", "model"])
def test_best_paths_cost_what_networkx_says(name: str) -> None:
    one = judge((2, 3), (5, 7), FAST, SLOW)
    cost = one.model.seconds if name == "model" else one.torch_side.seconds
    graph = nx.MultiDiGraph()
    graph.add_nodes_from(one.space.layouts)
    for step in one.graph.steps:
        if name != "planner" or one.is_torchs(step):
            graph.add_edge(step.source, step.target, weight=cost(step))
    lengths = dict(nx.all_pairs_dijkstra_path_length(graph))
    pairs = 0
    for source, target in itertools.permutations(one.space.layouts, 2):
        path = one.judge(source, target).best[name]
        assert path.seconds(cost) == pytest.approx(lengths[source][target], rel=1e-9, abs=1e-15)
        assert (path.source, path.target) == (source, target)
        pairs += 1
    assert pairs == 306


def test_no_path_of_torch_is_cheaper_than_the_best() -> None:
    for planner in ("greedy", "graph"):
        found = [one for one in judge((2, 4), (5, 3)).all_pairs(planner) if one.path]  # type: ignore[arg-type]
        assert len(found) > 200
        for one in found:
            for regret in one.regrets.values():
                assert regret.path >= regret.optimum * (1 - 1e-9)


def test_time_against_memory() -> None:
    """Every path of the front is faster than the next, which needs less memory."""
    one = judge((2, 4), (64, 64), Link(1e-4, 1e12), Link(1e-4, 1e12))
    source, target = (parse_layout(text, 2, 2) for text in ("S(0)S(1)", "S(1)S(0)"))
    front = one.pareto(source, target)
    seconds = [path.seconds(one.model.seconds) for path in front]
    assert seconds == sorted(seconds)
    assert [path.local_bytes for path in front] == sorted((path.local_bytes for path in front), reverse=True)
    ends = max(one.space.largest(source), one.space.largest(target))
    assert front[-1].local_bytes == ends, "arXiv 2112.01075: no path needs more memory than its ends"


def test_memory_of_every_pair_can_be_that_of_its_ends() -> None:
    one = judge((2, 2), (4, 4))
    for source, target in itertools.permutations(one.space.layouts, 2):
        ends = max(one.space.largest(source), one.space.largest(target))
        assert one.pareto(source, target)[-1].local_bytes == ends, f"{source} -> {target}"


def test_ratios() -> None:
    assert Regret(3.0, 2.0).ratio == 1.5
    assert Regret(0.0, 0.0).ratio == 1.0
    assert Regret(1.0, 0.0).ratio == float("inf")
    assert not Regret(1.005, 1.0).is_beaten


@pytest.mark.parametrize("text", ["", "2us", "2us,50", "us,50GB/s", "2us,0GB/s", "1.2.3us,1GB/s"])
def test_what_is_no_link_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no latency and bandwidth, as 2us,50GB/s"):
        parse_link(text)


def test_links_for_each_mesh_dim() -> None:
    assert links_for(["1us,1GB/s"], 2) == (Link(1e-6, 1e9),) * 2
    with pytest.raises(ValueError, match="3 links are given for 2 mesh dims"):
        links_for(["1us,1GB/s"] * 3, 2)
