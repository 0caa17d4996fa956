"""Judged redistributions as text for a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from verifier.core.wording import bytes_text, plural
from verifier.redistribution.graph import Path, Seconds
from verifier.redistribution.judging import OPTIMA, Judge, Judgement
from verifier.redistribution.properties import Outcome
from verifier.redistribution.steps import Step
from verifier.report.paths.words import brief, ratio_text, time_text

__all__ = ["all_pairs", "one_pair", "path_lines", "properties"]


def _step_line(step: Step, seconds: float) -> tuple[str, str, str]:
    return f"{step.source} -> {step.target}", _how(step), f"{bytes_text(step.bytes)}, {time_text(seconds)}"


def path_lines(path: Path, model: Seconds, padded: bool = False) -> list[str]:
    """Return a line for each step of ``path``, and one with their sum; with the padding if it is ``padded``."""
    rows = [_step_line(step, model(step)) for step in path.steps]
    if not rows:
        return ["  nothing to do"]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows]
    padding = f" and {bytes_text(path.padding)} of padding" if padded and path.padding else ""
    return [
        *lines,
        f"  in all {plural(path.collectives, 'collective')}; {bytes_text(path.bytes)} received by all ranks{padding}, "
        f"{bytes_text(path.busiest)} by the busiest rank; {time_text(path.seconds(model))}; largest local tensor "
        f"{bytes_text(path.local_bytes)}",
    ]


def blame_text(judge: Judge, judgement: Judgement) -> str:
    """Return a sentence without its full stop: why torch's path is dearer than it need be."""
    match judgement.blame:
        case "planner":
            return "the planner misses a path of torch's own steps that is cheaper by torch's own cost model"
        case "step":
            return f"torch has no {_missing(judge, judgement.best['step'])}"
        case "model":
            return "torch's cost model finds no path cheaper, the alpha-beta model does"
    return "no path is faster by either model"


def _missing(judge: Judge, best: Path) -> str:
    """Return the step of ``best`` that torch does not have."""
    missing = [step for step in best.steps if not judge.is_torchs(step)]
    step = max(missing or best.steps, key=lambda one: (not one.is_local, len(one.mesh_dims)))
    merged = ": the mesh has no such flattened submesh" if "merged" in judge.torch_side.available(step) else ""
    return f"{_how(step)} from {step.source} to {step.target}{merged}"


def _how(step: Step) -> str:
    dims = ", ".join(map(str, step.mesh_dims))
    local = {"slice": "local slice", "split": "local split into summands", "pad": "local filling up with zeros"}
    return local.get(step.kind, step.kind) + (f" over mesh dim{'s' * (len(step.mesh_dims) > 1)} {dims}" if dims else "")


def one_pair(judge: Judge, judgement: Judgement) -> Iterator[str]:
    """Yield the lines about one redistribution: what ran, what is better, and by how much."""
    model = judge.model.seconds
    if judgement.path is None:
        yield f"torch executes no path: {judgement.refusal}"
    else:
        yield f"torch's {judgement.planner} planner takes:"
        yield from path_lines(judgement.path, model, padded=True)
    if judgement.blame == "planner":
        yield "the cheapest path of torch's own steps, by torch's own cost model:"
        yield from path_lines(judgement.best["planner"], model)
    best = judgement.best["model"]
    if judgement.path is not None and best.seconds(model) >= judgement.path.seconds(model) * (1 - 1e-9):
        yield "no path of any steps is faster by the alpha-beta model"
    else:
        yield "the best path of all steps:"
        yield from path_lines(best, model)
    bound = judgement.bound
    yield (
        f"no path of any steps can do with less than {bytes_text(bound.total)} received by all ranks, "
        f"{bytes_text(bound.busiest)} by the busiest rank"
    )
    if judgement.path is None:
        return
    yield ""
    yield f"{'compared with':<42} {'torch':>10} {'optimum':>10}   ratio"
    for name, regret in judgement.regrets.items():
        show = time_text if name in ("planner", "step", "model") else (lambda value: bytes_text(int(value)))
        yield f"{OPTIMA[name]:<42} {show(regret.path):>10} {show(regret.optimum):>10}   {ratio_text(regret.ratio)}"
    yield f"why: {blame_text(judge, judgement)}"
    front = judge.pareto(judgement.source, judgement.target)
    if len(front) > 1:
        yield "time against memory, of all paths that no other path beats in both:"
        for path in front:
            yield (
                f"  {time_text(path.seconds(model))}, largest local tensor {bytes_text(path.local_bytes)}: "
                f"{' -> '.join(map(str, path.layouts))}"
            )


def summary_rows(judgements: Sequence[Judgement]) -> list[tuple[str, str, str, str]]:
    """Return a row for each optimum: its name, how many paths it beats, and their median and worst ratio."""
    rows = []
    for name, text in OPTIMA.items():
        having = [one.regrets[name] for one in judgements if name in one.regrets]
        ratios = [regret.ratio for regret in having if regret.is_beaten]
        middle = ratio_text(statistics.median_high(ratios)) if ratios else "-"
        finite = [ratio for ratio in ratios if ratio != float("inf")]
        worst = ratio_text(max(finite)) if finite else "-"
        free = len(ratios) - len(finite)
        rows.append((text, f"{len(ratios):,} of {len(having):,}", middle, f"{worst}, {free:,} free" if free else worst))
    return rows


def all_pairs(judge: Judge, judgements: Sequence[Judgement], worst: int) -> Iterator[str]:
    """Yield the lines about all redistributions: how often torch is beaten by each optimum, and the worst paths."""
    planned = [one for one in judgements if one.path is not None]
    yield (
        f"{plural(len(judge.space.layouts), 'layout')} (placements with shard order), "
        f"{len(judgements):,} ordered pairs, {len(planned):,} with a path that torch executes"
    )
    yield ""
    header = ("compared with", "torch costs over 1 % more", "median", "worst")
    yield from _table([header, *summary_rows(planned)])
    refused = [one for one in judgements if one.path is None]
    if refused:
        yield ""
        yield f"no path that torch executes: {len(refused):,}, as {refused[0].source} -> {refused[0].target}"
        yield f"  {refused[0].refusal}"
    yield ""
    yield from worst_pairs(judge, planned, worst)


def worst_pairs(judge: Judge, judgements: Sequence[Judgement], worst: int) -> Iterator[str]:
    """Yield the paths that receive most bytes beyond the lower bound, with the best path beside each."""
    model = judge.model.seconds
    ranked = sorted((one for one in judgements if one.excess), key=_badness)
    if not ranked or worst < 1:
        return
    yield f"the worst {min(worst, len(ranked))} of {len(ranked):,} that receive more bytes than the lower bound:"
    for one in ranked[:worst]:
        assert one.path is not None
        yield (
            f"{one.source} -> {one.target}: {bytes_text(one.path.bytes)} where {bytes_text(one.bound.total)} must be "
            f"({ratio_text(one.regrets['bytes'].ratio)})"
        )
        yield f"  torch  {brief(one.path, model)}"
        yield f"  best   {brief(one.best['model'], model)}"
        yield f"  why    {blame_text(judge, one)}"


def properties(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield a line for each property, and the worst violation of each that does not hold."""
    rows = [(one.statement, f"{one.checked:,}", f"{len(one.violations):,}" if one.checked else "-") for one in outcomes]
    yield from _table([("property", "checked", "violated"), *rows])
    for outcome in outcomes:
        for violation in outcome.violations[:1]:
            source, target, *_ = violation.layouts
            yield ""
            yield f"violated: {outcome.statement}"
            yield f"  {source} -> {target}"
            yield f"  {violation.what}"


def _badness(one: Judgement) -> tuple[float, float, str, str]:
    return -one.excess, -one.regrets["model"].ratio, str(one.source), str(one.target)


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *others = zip(row, widths, strict=True)
        yield f"{first[0]:<{first[1]}}  " + "  ".join(f"{text:>{width}}" for text, width in others)
