"""The graph of all steps between all layouts, and the best paths in it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from verifier.redistribution.layouts import Layout, Space
from verifier.redistribution.steps import Step, steps_between

__all__ = ["Graph", "Path", "Seconds"]

Seconds = Callable[[Step], float]
"""A cost model."""


@dataclass(frozen=True)
class Path:
    """Steps one after another, from ``source``."""

    source: Layout
    steps: tuple[Step, ...] = ()

    @property
    def target(self) -> Layout:
        return self.steps[-1].target if self.steps else self.source

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return (self.source, *(step.target for step in self.steps))

    @cached_property
    def bytes(self) -> int:
        """Bytes that all ranks receive together, without padding."""
        return sum(step.bytes for step in self.steps)

    @cached_property
    def busiest(self) -> int:
        """Bytes that the rank with most of them receives over all steps, without padding."""
        return max(map(sum, zip(*(step.received for step in self.steps), strict=True)), default=0)

    @property
    def padding(self) -> int:
        return sum(sum(step.padding) for step in self.steps)

    @property
    def collectives(self) -> int:
        return sum(not step.is_local for step in self.steps)

    @property
    def local_bytes(self) -> int:
        """Bytes of the largest local tensor on the way."""
        return max((step.local_bytes for step in self.steps), default=0)

    def seconds(self, model: Seconds) -> float:
        return sum(map(model, self.steps))


_Cost = tuple[float, int, int]
"""Seconds, then bytes, then the number of steps: the first decides, the others break ties."""


class Graph:
    """All layouts of ``space`` with all steps between them."""

    def __init__(self, space: Space) -> None:
        self.space = space

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        layouts = self.space.layouts
        return tuple(
            step
            for source, target in itertools.product(layouts, layouts)
            for step in steps_between(self.space, source, target)
        )

    def paths(self, source: Layout, ways: Mapping[Layout, list[tuple[Step, float]]]) -> dict[Layout, Path]:
        """Return the best path from ``source`` to each layout that is reached (Dijkstra's algorithm)."""
        done: dict[Layout, Step | None] = {}
        counter = itertools.count()
        heap: list[tuple[_Cost, int, Layout, Step | None]] = [((0.0, 0, 0), next(counter), source, None)]
        while heap:
            (seconds, size, count), _, layout, step = heapq.heappop(heap)
            if layout in done:
                continue
            done[layout] = step
            for onward, more in ways.get(layout, ()):
                if onward.target not in done:
                    cost = (seconds + more, size + onward.bytes, count + 1)
                    heapq.heappush(heap, (cost, next(counter), onward.target, onward))
        return {layout: _back(source, layout, done) for layout in done}

    def ways(
        self, model: Seconds, allowed: Callable[[Step], bool] | None = None
    ) -> dict[Layout, list[tuple[Step, float]]]:
        """Return the steps from each layout, with their seconds by ``model``: those that are ``allowed``."""
        result: dict[Layout, list[tuple[Step, float]]] = {}
        for step in self.steps:
            if allowed is None or allowed(step):
                result.setdefault(step.source, []).append((step, model(step)))
        return result

    def pareto(self, source: Layout, target: Layout, model: Seconds) -> list[Path]:
        """Return the paths that no other path beats in both seconds and :attr:`Path.local_bytes`, fastest first."""
        front: list[Path] = []
        limit = float("inf")
        while True:
            most = limit
            ways = self.ways(model, lambda step: step.local_bytes < most)  # noqa: B023 - is called at once
            path = self.paths(source, ways).get(target)
            if path is None:
                return front
            if front and path.seconds(model) <= front[-1].seconds(model) * (1 + 1e-12):
                front[-1] = path
            else:
                front.append(path)
            if not path.steps:
                return front
            limit = path.local_bytes

    def to_networkx(
        self,
        available: Callable[[Step], Iterable[str]] | None = None,
        models: Mapping[str, Seconds] | None = None,
    ) -> Any:
        """Return a ``networkx.MultiDiGraph`` with scalars as attributes, as GraphML needs them.

        Nodes are layouts as text, with ``local_bytes`` (of the largest local tensor) and ``bytes_by_rank``. Edges are
        steps: ``kind``, ``mesh_dims``, ``bytes``, ``busiest``, ``padding`` (bytes of all ranks
        together, of the busiest rank, of padding), ``hops``, ``local_bytes``, ``torch`` (who in torch has the step) and
        ``seconds_NAME`` for each of ``models``.
        """
        import networkx as nx  # type: ignore[import-untyped]

        graph = nx.MultiDiGraph()
        for layout in self.space.layouts:
            sizes = self.space.local_bytes(layout)
            graph.add_node(str(layout), local_bytes=max(sizes), bytes_by_rank=" ".join(map(str, sizes)))
        for step in self.steps:
            graph.add_edge(
                str(step.source),
                str(step.target),
                key=f"{step.kind}/{','.join(map(str, step.mesh_dims))}",
                kind=step.kind,
                mesh_dims=",".join(map(str, step.mesh_dims)),
                bytes=step.bytes,
                busiest=step.busiest,
                padding=sum(step.padding),
                hops=step.hops,
                local_bytes=step.local_bytes,
                torch=" ".join(available(step)) if available else "",
                **{f"seconds_{name}": model(step) for name, model in (models or {}).items()},
            )
        return graph


def _back(source: Layout, layout: Layout, done: Mapping[Layout, Step | None]) -> Path:
    steps: list[Step] = []
    while (step := done[layout]) is not None:
        steps.append(step)
        layout = step.source
    return Path(source, tuple(reversed(steps)))
