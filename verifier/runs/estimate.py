"""About how long a run will take, by what earlier runs in the same folder took."""

from __future__ import annotations

from collections.abc import Sequence

from verifier.core.wording import plural
from verifier.records.schema import RunRecord
from verifier.runs.store import RunStore

__all__ = ["estimate_of_rules", "estimate_of_trials"]

TRIALS_A_SECOND = 15.0
SECONDS_OF_AN_OP = 6.0
START = 8.0
"""Where no run was recorded: trials a second on two cores, seconds of a worker for an op, and seconds to start."""


def estimate_of_trials(
    store: RunStore, cases: int, combinations: int, meshes: Sequence[str], ops: int, limit: float | None
) -> str:
    """Return what a run on meshes would try, and about how long.

    Parameters
    ----------
    cases
        Of all ops on one mesh, at most.
    combinations
        Of a case, at most.
    limit
        Seconds after which it ends, if any.
    """
    on_meshes, _ = store.newest_of_each_level()
    most = cases * combinations * len(meshes)
    rate, basis = TRIALS_A_SECOND, "as nothing was recorded yet"
    if on_meshes is not None and on_meshes.trials and on_meshes.seconds:
        rate, basis = on_meshes.trials / on_meshes.seconds, f"as in run {on_meshes.header.id}"
    seconds = START + most / rate
    ends = f"; it ends after {_time(limit)}" if limit is not None and limit < seconds else ""
    return (
        f"level 2 would try {plural(ops, 'op')} on {plural(len(meshes), 'mesh', 'meshes')} {' '.join(meshes)}: at most "
        f"{plural(cases, 'case')} on each and {plural(most, 'trial')}, in at most about {_time(seconds)}, {basis}{ends}"
    )


def estimate_of_rules(store: RunStore, targets: Sequence[str], meshes: Sequence[str], jobs: int) -> str:
    """Return what a rule check would check, and about how long."""
    _, rules = store.newest_of_each_level()
    known = _seconds_of_ops(rules)
    usual = sum(known.values()) / len(known) if known else SECONDS_OF_AN_OP
    recorded = [name for name in targets if name in known]
    seconds = START + sum(known.get(name, usual) for name in targets) / max(1, jobs)
    basis = f"as in run {rules.header.id}" if rules is not None and recorded else "as nothing was recorded yet"
    return (
        f"level 1 would check {plural(len(targets), 'op')} on meshes {' '.join(meshes)}, in about {_time(seconds)} "
        f"with {plural(jobs, 'job')} and without confirming, {basis}"
    )


def _seconds_of_ops(run: RunRecord | None) -> dict[str, float]:
    return {} if run is None or run.rules is None else {name: op.seconds for name, op in run.rules.ops.items()}


def _time(seconds: float) -> str:
    """
    >>> _time(8.2), _time(400), _time(7300)
    ('8 s', '7 min', '2.0 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
