"""Properties that torch's planners and cost model should have, checked over all layouts of a tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from verifier.redistribution.graph import Path
from verifier.redistribution.layouts import Layout, Space
from verifier.redistribution.torch_side import NoSuchStep, PlannedStep, PlannerName, Refused, TorchSide

__all__ = ["PROPERTIES", "Outcome", "Violation", "check_properties"]

_TOLERANCE = 1e-12
"""Seconds: a rounding error of sums of microseconds."""


@dataclass(frozen=True)
class Violation:
    """One violation: the layouts, in the order in which ``what`` speaks of them, and by how many seconds."""

    layouts: tuple[Layout, ...]
    what: str
    seconds: float = 0.0


@dataclass
class Outcome:
    """What the check of a property found: how many redistributions were checked, and the violations, worst first."""

    name: str
    statement: str
    checked: int = 0
    violations: list[Violation] = field(default_factory=list)


class _Asked:
    """Torch's answers for all pairs of layouts of ``space``, each asked once."""

    def __init__(self, space: Space, torch_side: TorchSide) -> None:
        self.space, self.torch = space, torch_side
        self.layouts = space.layouts
        self._plans: dict[tuple[Layout, Layout, PlannerName, bool], Path | Exception] = {}

    @property
    def pairs(self) -> Iterator[tuple[Layout, Layout]]:
        return itertools.permutations(self.layouts, 2)

    @cached_property
    def predicted(self) -> dict[tuple[Layout, Layout], float]:
        return {pair: self.torch.predicted(*pair) for pair in self.pairs}

    @cached_property
    def unmerged(self) -> TorchSide:
        return self.torch.without_submeshes() if self.torch.flattened else self.torch

    def plan(
        self, source: Layout, target: Layout, planner: PlannerName = "default", merged: bool = True
    ) -> Path | Exception:
        """Return torch's path, or why there is none."""
        key = (source, target, planner, merged)
        if key not in self._plans:
            try:
                self._plans[key] = (self.torch if merged else self.unmerged).plan(source, target, planner)
            except (Refused, NoSuchStep) as error:
                self._plans[key] = error
        return self._plans[key]

    def cost(self, path: Path | Exception) -> float:
        return path.seconds(self.torch.seconds) if isinstance(path, Path) else math.inf


_Found = Iterator[Violation | None]
"""None for each redistribution that was checked and is as it should be."""


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.2f} us"


def _predicted_is_executed(asked: _Asked) -> _Found:
    for source, target in asked.pairs:
        path = asked.plan(source, target)
        if not isinstance(path, Path) or any(step.kind == "pad" for step in path.steps):
            continue  # torch takes a shard for summands only on request, and says so by an infinite cost
        predicted, executed = asked.predicted[source, target], asked.cost(path)
        apart = abs(predicted - executed)
        steps = ", ".join(f"{step.kind} over {step.mesh_dims}" for step in path.steps if not step.is_local)
        what = f"redistribute_cost is {_us(predicted)}, what is executed costs {_us(executed)} by its formulas: {steps}"
        yield Violation((source, target), what, apart) if apart > _TOLERANCE else None


def _triangle(asked: _Asked) -> _Found:
    costs = asked.predicted
    for source, via, target in itertools.permutations(asked.layouts, 3):
        direct, first, second = costs[source, target], costs[source, via], costs[via, target]
        if math.inf in (direct, first, second):
            continue
        saved = direct - first - second
        what = f"redistribute_cost is {_us(direct)}, but {_us(first)} + {_us(second)} by way of {via}"
        yield Violation((source, target, via), what, saved) if saved > _TOLERANCE else None


def _graph_is_cheapest(asked: _Asked) -> _Found:
    """By the costs of the steps before merging: the graph planner knows nothing of merging."""
    for source, target in asked.pairs:
        greedy = asked.cost(asked.plan(source, target, "greedy", merged=False))
        graph = asked.cost(asked.plan(source, target, "graph", merged=False))
        saved = graph - greedy if math.inf not in (graph, greedy) else 0.0
        what = f"the greedy planner's path costs {_us(greedy)}, the graph planner's {_us(graph)}"
        yield Violation((source, target), what, saved) if saved > _TOLERANCE else None


def _steps_can_be(asked: _Asked) -> _Found:
    for source, target in asked.pairs:
        planners: tuple[PlannerName, ...] = ("greedy", "graph")
        for planner in planners:
            path = asked.plan(source, target, planner)
            yield Violation((source, target), f"{path}") if isinstance(path, NoSuchStep) else None


def _finite_has_a_plan(asked: _Asked) -> _Found:
    for source, target in asked.pairs:
        if asked.predicted[source, target] == math.inf:
            continue
        path = asked.plan(source, target)
        what = f"redistribute_cost is {_us(asked.predicted[source, target])}, but {path}"
        yield Violation((source, target), what) if isinstance(path, Exception) else None


def _history_does_not_matter(asked: _Asked) -> _Found:
    """The planner of a mesh and tensor is kept, and with it the Partials and strided shards of all its targets."""
    history = _special_targets(asked)
    later = asked.torch.graph_planner(history)
    for source, target in asked.pairs:
        alone, after = asked.torch.graph_planner()(source, target), later(source, target)
        what = (
            f"a new planner takes {_short(alone)}; after {history[-1][0]} -> {history[-1][1]} it takes {_short(after)}"
        )
        yield Violation((source, target), what) if alone != after else None


def _hash_seed_does_not_matter(asked: _Asked) -> _Found:
    history = _special_targets(asked)
    forwards, backwards = (asked.torch.graph_planner(history, turned) for turned in (False, True))
    for source, target in asked.pairs:
        one, other = forwards(source, target), backwards(source, target)
        what = f"with its sets in one order torch takes {_short(one)}; in the other, {_short(other)}"
        yield Violation((source, target), what) if one != other else None


def _special_targets(asked: _Asked) -> list[tuple[Layout, Layout]]:
    """Return redistributions from Replicate to each Partial and each strided shard."""
    whole = next(layout for layout in asked.layouts if set(layout.placements) == {"R"})
    found: dict[str, Layout] = {}
    for layout in asked.layouts:
        for text in layout.placements:
            if text.startswith(("P", "_S")):
                found.setdefault(text, layout)
    return [(whole, layout) for layout in found.values()]


def _short(steps: Sequence[PlannedStep]) -> str:
    return " then ".join(f"{one.before} -> {one.after} on mesh dim {one.mesh_dims[0]}" for one in steps)


def _merging_costs_no_more(asked: _Asked) -> _Found:
    if not asked.torch.flattened:
        return
    for source, target in asked.pairs:
        merged, single = asked.plan(source, target), asked.plan(source, target, merged=False)
        if not isinstance(merged, Path) or len(merged.steps) == len(getattr(single, "steps", ())):
            continue
        more = asked.cost(merged) - asked.cost(single)
        what = (
            f"by torch's formulas the path costs {_us(asked.cost(merged))} merged, {_us(asked.cost(single))} not merged"
        )
        yield Violation((source, target), what, more) if more > _TOLERANCE else None


def _communication_is_not_free(asked: _Asked) -> _Found:
    for source in asked.layouts:
        for target, seconds in asked.torch.move_seconds(source).items():
            changed = [d for d, (a, b) in enumerate(zip(source.placements, target.placements, strict=True)) if a != b]
            if len(changed) != 1 or source.kind(changed[0]) == "R":
                continue
            if (source.kind(changed[0]), target.kind(changed[0])) == ("S", "P"):
                continue  # zeros take the place of the other shards
            what = f"the graph planner takes the step {source.placements[changed[0]]} -> "
            what += f"{target.placements[changed[0]]} on mesh dim {changed[0]} for free"
            yield Violation((source, target), what) if seconds == 0 else None


PROPERTIES: dict[str, tuple[str, Callable[[_Asked], _Found]]] = {
    "predicted": ("the predicted cost is that of the steps that are executed", _predicted_is_executed),
    "triangle": ("no detour is cheaper than the direct redistribution", _triangle),
    "cheapest": ("the greedy planner's path is never cheaper than the graph planner's", _graph_is_cheapest),
    "possible": ("in each planned step, ranks can get what they are to hold", _steps_can_be),
    "planned": ("what has a finite cost has a plan that is executed", _finite_has_a_plan),
    "history": ("a plan does not depend on what was planned before", _history_does_not_matter),
    "hash seed": ("a plan does not depend on the hash seed", _hash_seed_does_not_matter),
    "merging": ("merged collectives never cost more", _merging_costs_no_more),
    "free": ("a step with communication is not free", _communication_is_not_free),
}
"""Each property by its name: what should hold, and the check."""


def check_properties(
    space: Space, torch_side: TorchSide, names: Iterable[str] = tuple(PROPERTIES)
) -> Iterator[Outcome]:
    """Check the properties of these names in :data:`PROPERTIES` over all layouts of ``space``."""
    asked = _Asked(space, torch_side)
    for name in names:
        statement, check = PROPERTIES[name]
        outcome = Outcome(name, statement)
        for found in check(asked):
            outcome.checked += 1
            if found is not None:
                outcome.violations.append(found)
        outcome.violations.sort(key=lambda one: (-one.seconds, *map(str, one.layouts)))
        yield outcome
