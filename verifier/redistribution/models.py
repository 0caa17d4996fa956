"""The alpha-beta model: seconds of a step, from a latency and a bandwidth for each mesh dim. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from verifier.redistribution.steps import Step

__all__ = ["DEFAULT_LINK", "AlphaBeta", "Link", "links_for", "parse_link"]

LAUNCH = 6.6e-6
"""Seconds before a collective sends its first message, as in torch's model."""


@dataclass(frozen=True)
class Link:
    """What connects the ranks along a mesh dim: seconds of a message without bytes, and bytes a second."""

    latency: float
    bandwidth: float


DEFAULT_LINK = Link(2.7e-6, 0.22 * 87.7 * 2**30)
"""What torch's model assumes between hosts."""


@dataclass(frozen=True)
class AlphaBeta:
    """A cost model with a link for each mesh dim.

    A step takes its launch, the latency of its messages one after another, and the time in which its busiest rank
    receives its bytes, at the slowest link of its mesh dims. A local step takes no time.
    """

    links: tuple[Link, ...]
    launch: float = LAUNCH

    def seconds(self, step: Step) -> float:
        if step.is_local:
            return 0.0
        used = [self.links[d] for d in step.mesh_dims]
        latency = max(link.latency for link in used)
        return self.launch + step.hops * latency + step.busiest / min(link.bandwidth for link in used)

    def at_least(self, busiest: int) -> float:
        """Return the seconds that any redistribution takes in which a rank must receive ``busiest`` bytes."""
        if not busiest:
            return 0.0
        fastest = max(link.bandwidth for link in self.links)
        return self.launch + min(link.latency for link in self.links) + busiest / fastest


_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}
_LINK = re.compile(r"([\d.]+)(us|ms|s),([\d.]+)(KB/s|MB/s|GB/s)")


def parse_link(text: str) -> Link:
    """Return the link that ``text`` describes by its latency and its bandwidth.

    Raises
    ------
    ValueError
        If the text is something else.

    >>> parse_link("2us,50GB/s")
    Link(latency=2e-06, bandwidth=50000000000.0)
    """
    match = _LINK.fullmatch(text.replace(" ", ""))
    try:
        assert match
        latency, bandwidth = float(match[1]) * _UNITS[match[2]], float(match[3]) * _UNITS[match[4]]
        assert bandwidth
    except (AssertionError, ValueError):
        raise ValueError(f"link {text!r} is no latency and bandwidth, as 2us,50GB/s") from None
    return Link(latency, bandwidth)


def links_for(given: Sequence[str], mesh_ndim: int) -> tuple[Link, ...]:
    """Return the link of each mesh dim; one text holds for all mesh dims.

    Raises
    ------
    ValueError
        If there is neither one text nor one for each mesh dim.
    """
    if len(given) not in (1, mesh_ndim):
        raise ValueError(
            f"{len(given)} links are given for {mesh_ndim} mesh dims; give --link once, or for each of them"
        )
    links = tuple(map(parse_link, given))
    return links * mesh_ndim if len(links) == 1 else links
