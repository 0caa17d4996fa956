"""Runs in every rank of a pool that is measured: splits DTensor's time, and times the whole of a trial.

Given to a pool among its imports. The reports of the ranks then have four more shares: ``propagation`` (sharding
propagation where DTensor's cache has no entry), ``collectives`` (from the call of a functional collective to the end of
the wait for it, so waiting for slower ranks is in it), ``waiting`` (what of an agreement between the ranks takes no CPU
time of this one: the other ranks are not there yet) and ``cycle``, from the end of one trial to the end of the next.
With ``RANK_CLOCK=cpu`` in the environment all shares are CPU time of the rank's main thread, in which waiting does not
count: on a busy machine that is the steadier measure of who does how much work.
"""

from __future__ import annotations

import functools
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch.distributed._functional_collectives as collectives
from torch.distributed.tensor import DTensor

from verifier.core.observation import ProcessReport
from verifier.execution import runner as runtime
from verifier.execution import trial_log
from verifier.meshes import agreement


@functools.cache
def _chosen() -> Callable[[], float]:
    return time.thread_time if os.environ.get("RANK_CLOCK") == "cpu" else time.perf_counter


def CLOCK() -> float:  # noqa: N802 - as a constant
    """Return the seconds of the clock that this rank's environment names.

    The clock is chosen at the first call: a fork server may import this module before it forks ranks of either clock.
    """
    return _chosen()()


_spent: Counter[str] = Counter()
_inside = False
_last = 0.0


def _timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with its time on the account of ``name``, unless it is called by another one so wrapped."""

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        global _inside
        if _inside:
            return function(*args, **kwargs)
        _inside, started = True, CLOCK()
        try:
            return function(*args, **kwargs)
        finally:
            _inside = False
            _spent[name] += CLOCK() - started

    return timed


def _waits(agree: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``agree`` with the time that it waits on the account of ``waiting``."""

    @functools.wraps(agree)
    def agree_and_note(*args: Any, **kwargs: Any) -> Any:
        started, busy = CLOCK(), time.thread_time()
        try:
            return agree(*args, **kwargs)
        finally:
            _spent["waiting"] += max(0.0, CLOCK() - started - (time.thread_time() - busy))

    return agree_and_note


def _install() -> None:
    runtime.time = trial_log.time = SimpleNamespace(perf_counter=CLOCK)
    propagator = DTensor._op_dispatcher.sharding_propagator
    missed = _timed("propagation", propagator.propagate_op_sharding_non_cached)
    propagator.propagate_op_sharding_non_cached = missed
    propagator.propagate_op_sharding = type(propagator.propagate_op_sharding)(missed)  # the cache, around the new one
    for name in (
        "wait_tensor", "all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single", "all_gather_tensor",
        "reduce_scatter_tensor", "all_to_all_single",
    ):  # fmt: skip
        setattr(collectives, name, _timed("collectives", getattr(collectives, name)))
    for way in (agreement.AllReduces, agreement.Datagrams):
        way.agree = _waits(way.agree)  # type: ignore[method-assign]
    original = runtime.TrialRunner.run

    def run(self: Any, *args: Any) -> ProcessReport:
        global _last
        _spent.clear()
        report = original(self, *args)
        now = CLOCK()
        accounts = ("propagation", "collectives", "waiting")
        more = {**{name: _spent[name] for name in accounts}, "cycle": now - _last}
        _last = now
        return replace(report, seconds=(*report.seconds, *more.items()))

    runtime.TrialRunner.run = run


_install()
