"""Runs in every rank of a pool that is measured: times the code that records redistributions.

Given to a pool among its imports. The reports of the ranks then have four more shares, in CPU time of the main thread
and in wall time: ``recording`` and ``recording wall``, and those of the whole trial from the end of the one before,
``cpu`` and ``cycle``. The time of recording is that of DTensor's hooked functions without the functions themselves, of
the watch of collectives, and of what it takes to turn the steps into the report and the report into bytes. Planning is
not in it: torch keeps the plan that the recording asks for, and takes it up.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.distributed.tensor import _dispatch as dispatch_module
from torch.distributed.tensor import _redistribute as redistribute_module

from verifier.core.observation import ProcessReport, Redistribution
from verifier.execution import runner
from verifier.meshes.messages import pack_report
from verifier.torch_internals import recording
from verifier.torch_internals.watching import RedistributionWatch

HOOKED = (
    (redistribute_module, "redistribute_local_tensor"),
    (dispatch_module, "redistribute_local_tensor"),
    (dispatch_module.OpDispatcher, "redistribute_local_args"),
    (dispatch_module.OpDispatcher, "_dispatch_get_local_results_slow_path"),
)


class _Accounts:
    """Time by account: at each moment it goes to the account that was entered last and not left."""

    def __init__(self) -> None:
        self.cpu, self.wall = defaultdict[str, float](float), defaultdict[str, float](float)
        self.current, self.last = "other", (time.thread_time(), time.perf_counter())

    def switch(self, account: str) -> str:
        """Enter an account; return the one that is left."""
        now = (time.thread_time(), time.perf_counter())
        self.cpu[self.current] += now[0] - self.last[0]
        self.wall[self.current] += now[1] - self.last[1]
        left, self.current, self.last = self.current, account, now
        return left

    def take(self) -> list[tuple[str, float]]:
        """Return the shares since the last call."""
        self.switch(self.current)
        found: list[tuple[str, float]] = [
            ("recording", self.cpu["recording"]), ("recording wall", self.wall["recording"]),
            ("cpu", sum(self.cpu.values())), ("cycle", sum(self.wall.values())),
        ]  # fmt: skip
        self.cpu.clear()
        self.wall.clear()
        return found


_accounts = _Accounts()


class _Timed:
    """A function whose time goes to an account; it keeps the attributes of the function."""

    def __init__(self, function: Callable[..., Any], account: str) -> None:
        self._function, self._account = function, account

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        left = _accounts.switch(self._account)
        try:
            return self._function(*args, **kwargs)
        finally:
            _accounts.switch(left)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def _timed(function: Callable[..., Any], account: str) -> Callable[..., Any]:
    """Return a function whose time goes to an account, which a class can have as a method."""
    timed = _Timed(function, account)
    return lambda *args, **kwargs: timed(*args, **kwargs)


def _wrap(account: str) -> None:
    for holder, name in HOOKED:
        function = _timed(getattr(holder, name), account)
        static = isinstance(vars(holder).get(name), staticmethod)
        setattr(holder, name, staticmethod(function) if static else function)


def _install() -> None:
    _wrap("torch")
    recording._install_hooks()
    _wrap("recording")
    redistribute_module._gen_transform_infos = _Timed(redistribute_module._gen_transform_infos, "torch")  # type: ignore[assignment]
    RedistributionWatch.saw = _timed(RedistributionWatch.saw, "recording")  # type: ignore[method-assign]
    runner.Redistribution = _timed(Redistribution, "recording")  # type: ignore[attr-defined,assignment]
    original = runner.TrialRunner.run

    def run(self: Any, *args: Any) -> ProcessReport:
        report = original(self, *args)
        _accounts.switch("packing")
        pack_report("report", 0, report)
        _accounts.switch("packing without")
        pack_report("report", 0, replace(report, redistributions=()))
        _accounts.switch("other")
        for clock in (_accounts.cpu, _accounts.wall):  # both are not part of a trial, but their difference is
            clock["recording"] += clock["packing"] - clock["packing without"]
            del clock["packing"], clock["packing without"]
        return replace(report, seconds=(*report.seconds, *_accounts.take()))

    runner.TrialRunner.run = run  # type: ignore[assignment]


_install()
