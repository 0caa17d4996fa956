"""Seconds, ratios and paths as words, without torch."""

from __future__ import annotations

from verifier.core.wording import bytes_text
from verifier.redistribution.graph import Path, Seconds
from verifier.redistribution.steps import Step

__all__ = ["brief", "ratio_text", "step_text", "time_text"]


def time_text(seconds: float) -> str:
    """Return a duration of a collective as readable text.

    >>> time_text(0.0), time_text(3.14e-5), time_text(0.0042)
    ('0 us', '31.4 us', '4.2 ms')
    """
    if not seconds:
        return "0 us"
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:,.1f} ms"


def ratio_text(ratio: float) -> str:
    """Return how many times the optimum a path costs.

    >>> ratio_text(1.0), ratio_text(2.5), ratio_text(float("inf"))
    ('1x', '2.5x', 'all of it')
    """
    return "all of it" if ratio == float("inf") else f"{ratio:.3g}x"


def brief(path: Path, model: Seconds | None = None) -> str:
    """Return a path on one line, with the kind of each step over its arrow.

    Local steps have a bare arrow.
    """
    text = str(path.source)
    for step in path.steps:
        dims = ",".join(map(str, step.mesh_dims))
        text += f" -{step.kind}({dims})-> {step.target}" if dims else f" -> {step.target}"
    seconds = f", {time_text(path.seconds(model))}" if model else ""
    return f"{text}   {bytes_text(path.bytes)}{seconds}"


def step_text(step: Step) -> str:
    """Return a step on one line: what it does, where it leads, and the bytes that ranks receive."""
    dims = ", ".join(map(str, step.mesh_dims))
    how = f"{step.kind} over mesh dim{'s' * (len(step.mesh_dims) > 1)} {dims}" if dims else f"local {step.kind}"
    return f"{how} to {step.target}, {bytes_text(step.bytes)}"
