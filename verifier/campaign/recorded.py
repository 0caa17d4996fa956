"""A run: a campaign on ranks, and its record on disk."""

from __future__ import annotations

from collections.abc import Sequence

from verifier.campaign.campaign import Campaign
from verifier.campaign.history import Past
from verifier.campaign.plan import Plan
from verifier.core.interrupts import ReportInterrupted, RunInterrupted, one_interrupt_at_a_time, raise_lost_interrupt
from verifier.events import Event, Listener, PoolRestarted
from verifier.meshes.crew import PoolKey
from verifier.meshes.flight import Hangs
from verifier.meshes.pool import Pool, PoolSet
from verifier.meshes.processes import Starter
from verifier.planning.families import LoadedLate
from verifier.records.schema import RunRecord
from verifier.runs.graph import RedistributionGraph
from verifier.runs.journal import RunWriter
from verifier.runs.journal_lines import journal_listener
from verifier.runs.store import RunStore
from verifier.runs.summary import Summary

__all__ = ["campaign_on_ranks", "load_ahead", "record"]


def load_ahead(plan: Plan) -> None:
    """Load what a run of ``plan`` needs first, and start what its ranks are forked from, which load meanwhile."""
    for name in plan.selected:
        if isinstance(family := plan.families[name], LoadedLate):
            family.load()  # first, because it may add to sys.path, where the ranks look for what they import
    if plan.cluster is None:
        _starter(plan).load_ahead()


def campaign_on_ranks(plan: Plan, emit: Listener, past: Past | None = None) -> Campaign:
    """Return a campaign that runs ``plan`` on ranks, which start when it needs them."""
    imports, memory = plan.imports, plan.rank_memory
    if plan.cluster is not None:  # ranks that torchrun has started have the hash seeds that it gave them
        return Campaign(plan, _pools(plan, emit, plan.cluster.starter(imports, memory)), emit, past)
    starter = _starter(plan)
    hangs = Hangs() if imports else None  # rules of an import may hang at every combination
    alike = _pools(plan, emit, Starter(imports, memory, hash_seeds=1), 1, hangs)
    beside = [_pools(plan, emit, starter, 1, hangs) for _ in range(plan.jobs - 1)]
    return Campaign(plan, _pools(plan, emit, starter, hangs=hangs), emit, past, alike, beside=beside)


def _starter(plan: Plan) -> Starter:
    return Starter(plan.imports, plan.rank_memory, plan.hash_seeds)


def _pools(plan: Plan, emit: Listener, starter: Starter, keep: int = 2, hangs: Hangs | None = None) -> PoolSet:
    def make(key: PoolKey) -> Pool:
        return Pool(key, plan.imports, plan.trial_limit, memory_limit=plan.rank_memory, starter=starter, hangs=hangs)

    return PoolSet(make, keep, lambda mesh, reason, seconds: emit(PoolRestarted(mesh, reason, seconds)))


def record(
    plan: Plan,
    store: RunStore,
    listeners: Sequence[Listener] = (),
    past: Past | None = None,
    writer: RunWriter | None = None,
) -> RunRecord:
    """Run ``plan`` and store its record; the journal is written during the run.

    Parameters
    ----------
    past
        The part of the plan that was already run.
    writer
        The writer of a resumed run, whose journal has the past. Without it, a new run is opened.

    Raises
    ------
    RunStoreError
        If the file system refuses. The journal up to then is kept.
    RunInterrupted
        If a second interrupt comes before the record was written; the journal is kept.
    ReportInterrupted
        If the second interrupt comes after the record was written.
    """
    graph = RedistributionGraph()
    summary = Summary(graph)
    with writer or store.open_run(plan.header) as opened, one_interrupt_at_a_time():
        journal = journal_listener(opened, before=past.seconds if past and writer else 0.0)

        everyone: list[Listener] = [*listeners, summary, journal]  # journal last: displays end if the disk is full

        def emit(event: Event) -> None:
            for listener in everyone:
                listener(event)
            raise_lost_interrupt()

        campaign = campaign_on_ranks(plan, emit, past)
        recorded = False
        try:
            campaign.run()
            run = summary.record(campaign.known)
            opened.finish(run)
            recorded = True
            kept = store.where_kept(plan.header.id)
            graph.write_json(store.path(plan.header.id, "graph.json"), kept)
            graph.write_graphml(store.path(plan.header.id, "graph.graphml"), kept)
        except KeyboardInterrupt:
            if recorded:
                raise ReportInterrupted(f"interrupted; {store.where_kept(plan.header.id)}") from None
            kept = f"what was tried is kept in {opened.journal_path}"
            rest = f"; to go on: {opened.resume_command}" if plan.header.request else ""
            raise RunInterrupted(f"interrupted before the record was written; {kept}{rest}") from None
    return run
