"""Judges paths: what torch takes, the best path under each cost model, the lower bound, and the ratio to each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from verifier.redistribution.bounds import Bound, lower_bound
from verifier.redistribution.graph import Graph, Path, Seconds
from verifier.redistribution.layouts import Layout, Space
from verifier.redistribution.models import AlphaBeta
from verifier.redistribution.steps import Step
from verifier.redistribution.torch_side import NoSuchStep, PlannerName, Refused, TorchSide

__all__ = ["OPTIMA", "Judge", "Judgement", "Regret"]

OPTIMA = {
    "planner": "torch's cost model, torch's steps",
    "step": "torch's cost model, all steps",
    "model": "alpha-beta model, all steps",
    "bytes": "lower bound on bytes received",
    "memory": "largest local tensor, before or after",
}
"""What a path is compared with. A regret against the first is the planner's; against the second only, a step is missing
in torch; against the third only, torch's cost model is wrong. The others hold whatever the steps are."""

_EQUAL = 1.01
"""Less than one per cent is no difference that anybody would measure."""


@dataclass(frozen=True)
class Regret:
    """What torch's path costs, and what the optimum costs: seconds, or bytes."""

    path: float
    optimum: float

    @property
    def ratio(self) -> float:
        """How many times the optimum the path costs; infinite if the optimum is free."""
        if self.path <= self.optimum:
            return 1.0
        return self.path / self.optimum if self.optimum else float("inf")

    @property
    def is_beaten(self) -> bool:
        """Whether the path costs over one per cent more."""
        return self.ratio > _EQUAL


@dataclass(frozen=True)
class Judgement:
    """A redistribution, judged.

    Parameters
    ----------
    planner
        Which of torch's planners made the path: ``greedy`` or ``graph``.
    path
        What torch takes; None if it plans nothing, and then ``refusal`` says why.
    best
        The best paths: by torch's cost model with torch's steps (``planner``) and with all steps (``step``), and by the
        alpha-beta model with all steps (``model``).
    regrets
        By the names of :data:`OPTIMA`; empty without a path.
    """

    source: Layout
    target: Layout
    planner: str
    path: Path | None
    refusal: str
    best: dict[str, Path]
    bound: Bound
    regrets: dict[str, Regret]

    @property
    def excess(self) -> int:
        """Bytes that ranks receive beyond the lower bound."""
        return self.path.bytes - self.bound.total if self.path else 0

    @property
    def blame(self) -> str:
        """The first of ``planner``, ``step`` and ``model`` that beats the path; empty if none does."""
        return next((name for name in self.best if name in self.regrets and self.regrets[name].is_beaten), "")


class Judge:
    """Judges redistributions of the tensor and mesh of ``space``.

    Parameters
    ----------
    torch_side
        Torch's planners for the same ``space``.
    model
        The alpha-beta model.
    """

    def __init__(self, space: Space, torch_side: TorchSide, model: AlphaBeta) -> None:
        self.space, self.torch_side, self.model = space, torch_side, model
        self.graph = Graph(space)
        self._paths: dict[tuple[str, Layout], dict[Layout, Path]] = {}
        self._plans: dict[tuple[Layout, Layout, str], Path | str] = {}

    def is_torchs(self, step: Step) -> bool:
        """Return whether torch takes ``step`` on this mesh: merged steps need flattened submeshes."""
        return any(name != "merged" or self.torch_side.flattened for name in self.torch_side.available(step))

    @cached_property
    def _ways(self) -> dict[str, dict[Layout, list[tuple[Step, float]]]]:
        by_torch: Seconds = self.torch_side.seconds
        return {
            "planner": self.graph.ways(by_torch, self.is_torchs),
            "step": self.graph.ways(by_torch),
            "model": self.graph.ways(self.model.seconds),
        }

    def _best(self, name: str, source: Layout) -> dict[Layout, Path]:
        if (name, source) not in self._paths:
            self._paths[name, source] = self.graph.paths(source, self._ways[name])
        return self._paths[name, source]

    def plan(self, source: Layout, target: Layout, planner: PlannerName) -> tuple[str, Path | str]:
        """Return which planner torch takes if it is asked for ``planner``, and its path, or why there is none."""
        by_order = not (source.default_order and target.default_order) or self._strided(source, target)
        used: PlannerName = "graph" if planner == "graph" or by_order else "greedy"
        key = (source, target, used)
        if key not in self._plans:
            try:
                self._plans[key] = self.torch_side.plan(source, target, used)
            except (Refused, NoSuchStep) as error:
                self._plans[key] = str(error)
        return used, self._plans[key]

    @staticmethod
    def _strided(*layouts: Layout) -> bool:
        return any(text.startswith("_S") for layout in layouts for text in layout.placements)

    def judge(self, source: Layout, target: Layout, planner: PlannerName = "default") -> Judgement:
        """Judge the path that torch takes from ``source`` to ``target``."""
        used, plan = self.plan(source, target, planner)
        path, refusal = (None, plan) if isinstance(plan, str) else (plan, "")
        found = {name: self._best(name, source) for name in ("planner", "step", "model")}
        best = {name: paths[target] for name, paths in found.items() if target in paths}
        bound = lower_bound(self.space, source, target)
        regrets = {} if path is None else self._regrets(path, best, bound)
        return Judgement(source, target, used, path, refusal, best, bound, regrets)

    def _regrets(self, path: Path, best: dict[str, Path], bound: Bound) -> dict[str, Regret]:
        models: dict[str, Seconds] = {
            "planner": self.torch_side.seconds, "step": self.torch_side.seconds, "model": self.model.seconds
        }  # fmt: skip
        regrets = {
            name: Regret(path.seconds(models[name]), optimum.seconds(models[name])) for name, optimum in best.items()
        }
        regrets["bytes"] = Regret(path.bytes, bound.total)
        ends = max(self.space.largest(path.source), self.space.largest(path.target))
        return regrets | {"memory": Regret(max(path.local_bytes, ends), ends)}

    def all_pairs(self, planner: PlannerName = "default") -> Iterator[Judgement]:
        """Judge the redistributions between all layouts, except from one to itself."""
        for source, target in itertools.permutations(self.space.layouts, 2):
            yield self.judge(source, target, planner)

    def pareto(self, source: Layout, target: Layout) -> list[Path]:
        """Return the paths that no path beats both in seconds of the alpha-beta model and in memory."""
        return self.graph.pareto(source, target, self.model.seconds)
