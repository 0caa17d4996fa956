"""What one process has seen of a trial so far, and its report of that."""

from __future__ import annotations

import time
import traceback
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from verifier.core.observation import Contribution, Difference, Executed, ProcessReport, Raised, Redistribution
from verifier.core.verdict import Phase
from verifier.processes.limits import memory_note
from verifier.torch_internals import recording, watching
from verifier.torch_internals.refusals import is_refusal, raised_in
from verifier.torch_internals.watching import EndlessRuleError, SlowRulesError

__all__ = ["TrialLog"]


class _Timed:
    """A class, since a trial enters a dozen of these, and a generator takes three times as long."""

    __slots__ = ("seconds", "share", "started")

    def __init__(self, seconds: defaultdict[str, float], share: str) -> None:
        self.seconds = seconds
        self.share = share

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.share] += time.perf_counter() - self.started


@dataclass
class TrialLog:
    """What this process has seen of the trial so far."""

    memory_limit: int | None = None
    reached: Phase = Phase.SETUP
    raised: Raised | None = None
    backward: int | None = None
    placements: list[tuple[str, str]] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    contributions: list[Contribution] = field(default_factory=list)
    redistributions: list[Redistribution] = field(default_factory=list)
    executed: list[Executed] = field(default_factory=list)
    collectives: Counter[tuple[str, str]] = field(default_factory=Counter)
    unchecked: list[str] = field(default_factory=list)
    other_kernel: str = ""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def timed(self, share: str) -> _Timed:
        """Return a context whose time is added to ``share``."""
        return _Timed(self.seconds, share)

    def report(self, ranks: tuple[int, ...], misses: int = 0, issued: tuple[int, ...] = ()) -> ProcessReport:
        """Return what has been seen so far, as data."""
        return ProcessReport(
            ranks=ranks,
            reached=self.reached,
            raised=self.raised,
            placements=tuple(self.placements),
            differences=tuple(self.differences),
            contributions=tuple(self.contributions),
            redistributions=tuple(self.redistributions),
            executed=tuple(self.executed),
            collectives=tuple((phase, name, n) for (phase, name), n in sorted(self.collectives.items())),
            unchecked=tuple(self.unchecked),
            other_kernel=self.other_kernel,
            seconds=tuple(self.seconds.items()),
            cache_misses=misses,
            issued=issued,
        )

    def fail(self, error: Exception, *, ours: bool = False) -> None:
        text = "".join(traceback.format_exception(error)[-12:])
        origin: BaseException = error
        while origin.__cause__ is not None:  # DTensor wraps what a strategy raises in an exception of its own
            origin = origin.__cause__
        code = raised_in(origin)
        # what watches a call may fail as well, which says nothing of the call
        watcher = code is not None and code.co_filename in (recording.__file__, watching.__file__)
        ours |= watcher and not isinstance(error, EndlessRuleError | SlowRulesError)
        file = "" if code is None else Path(code.co_filename).name
        where = "nowhere" if code is None else f"{code.co_name} ({file})"
        kind, message = type(error).__name__, str(error)
        note = memory_note(f"{kind}: {message}", self.memory_limit)
        limited = bool(note) and self.memory_limit is not None
        refused = is_refusal(error)
        self.raised = Raised(
            self.reached, kind, note + message, where, text, refused, ours, self.backward, limited, file,
            isinstance(error, EndlessRuleError),
        )  # fmt: skip
