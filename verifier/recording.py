"""Makes a recorded run: plans it, runs the campaign, and puts everything that came of it into the run store."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import msgspec
import torch

from verifier import __version__
from verifier.baseline import Baseline
from verifier.campaign import Campaign
from verifier.cases import BACKENDS, MOST_RANKS, Backend, MeshSpec
from verifier.events import Event, Listener
from verifier.families import Family, installed_families, select_ops
from verifier.graph import RedistributionGraph
from verifier.imports import imports_beside, modules_of_rules, own_rules, run_imports_with_warnings
from verifier.interrupts import ReportInterrupted, RunInterrupted, one_interrupt_at_a_time
from verifier.journal import RunWriter
from verifier.journal_events import journal_listener
from verifier.meshes import Cluster, Place, gpu_problem, gpus_shared, local_places
from verifier.past import Past
from verifier.plan import Plan
from verifier.process_limits import format_size, parse_size
from verifier.profiles import CAMPAIGN_PROFILES
from verifier.record_files import out_option
from verifier.records import RunHeader, RunRecord
from verifier.report import write_html, write_json
from verifier.revision import BASELINE, revision
from verifier.runs import RunStore, new_run_id
from verifier.shards import Shard
from verifier.summary import Summary
from verifier.wording import did_you_mean

__all__ = ["DEFAULT_MESHES", "Request", "make_plan", "parse_rank_memory", "record", "write_report"]

LEAST_RANK_MEMORY = 256 << 20
DEFAULT_MESHES = ("2", "3", "4", "2x2", "8", "2x3")


@dataclass(frozen=True)
class Request:
    """What a user asked for, as text; :func:`make_plan` checks it."""

    patterns: Sequence[str] = ()
    meshes: Sequence[str] = ()
    backend: str | None = None
    device: str = "cpu"
    dtypes: Sequence[str] = ()
    profile: str = "dev"
    seed: int = 0
    max_examples: int | None = None
    time_limit: float | None = None
    imports: Sequence[str] = ()
    command: str = ""
    shard: str | None = None
    baseline: str = ""
    """Where the baseline was read from."""
    rank_memory: str | None = None


def make_plan(request: Request, baseline: Baseline, cluster: Cluster | None = None) -> Plan:
    """Return the plan for ``request``.

    Parameters
    ----------
    cluster
        Where the ranks are, if torchrun started them.

    Raises
    ------
    ValueError
        If anything in it does not exist or does not fit, with the nearest valid name.
    """
    run_imports_with_warnings(request.imports)
    with imports_beside(request.imports) as imports:
        families = installed_families()
    if not families:
        raise ValueError("no family is installed; install the distribution (pip install -e .), not the folder alone")
    selected = select_ops(request.patterns, families)
    if request.profile not in CAMPAIGN_PROFILES:
        raise ValueError(_unknown("profile", request.profile, CAMPAIGN_PROFILES))
    if request.device not in ("cpu", "cuda"):
        raise ValueError(_unknown("device", request.device, ("cpu", "cuda")))
    profile = CAMPAIGN_PROFILES[request.profile]
    shard = Shard.parse(request.shard) if request.shard is not None else None
    if cluster is not None and not request.meshes:  # stored with the run: elsewhere the default would be another one
        request = replace(request, meshes=_meshes_within(cluster.world_size))
    meshes = _meshes(request, cluster)
    if request.max_examples is not None and request.max_examples < 1:
        raise ValueError(f"--max-examples {request.max_examples}: at least one example is needed")
    if request.time_limit is not None and not 0 < request.time_limit < math.inf:
        raise ValueError(f"--time-limit {request.time_limit:g}: the limit must be a positive, finite number of seconds")
    rank_memory = parse_rank_memory(request.rank_memory)
    if rank_memory is not None and any(mesh.device == "cuda" for mesh in meshes):
        raise ValueError("--rank-memory: CUDA maps far more memory than it uses, so it cannot be limited so")
    dtypes = _dtypes(request.dtypes, [families[name] for name in selected])
    max_examples = request.max_examples or profile.max_examples
    time_limit = request.time_limit or profile.time_limit
    own = own_rules()
    header = RunHeader(
        id=new_run_id(),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        seed=request.seed,
        profile=profile.name,
        families=list(selected),
        meshes=[str(mesh) for mesh in meshes],
        dtypes=[str(dtype).removeprefix("torch.") for dtype in dtypes],
        device=request.device,
        max_examples=max_examples,
        time_limit=time_limit,
        imports=imports,
        versions=versions(),
        command=request.command,
        shard=str(shard or ""),
        request=msgspec.to_builtins(replace(request, command="")),
        digests={BASELINE: baseline.digest, **revision(imports, modules_of_rules())},
        places=_describe_places(meshes, cluster),
        own_rules=own,
    )
    return Plan(
        header=header,
        families=families,
        selected=selected,
        meshes=meshes,
        dtypes=dtypes,
        seed=request.seed,
        max_examples=max_examples,
        combinations=profile.combinations_per_case,
        time_limit=time_limit,
        imports=tuple(imports),
        baseline=baseline.about(imports, own),
        shard=shard,
        rank_memory=rank_memory,
        cluster=cluster,
    )


def parse_rank_memory(text: str | None) -> int | None:
    """Return the bytes that ``--rank-memory`` names, None if it was not given.

    Raises
    ------
    ValueError
        If it is no size, or one under which a rank could do nothing.
    """
    if text is None:
        return None
    try:
        size = parse_size(text)
    except ValueError as error:
        raise ValueError(f"--rank-memory: {error}") from error
    if size < LEAST_RANK_MEMORY:
        raise ValueError(
            f"--rank-memory {text}: {format_size(size)} are too few for process groups and their threads; "
            f"at least {format_size(LEAST_RANK_MEMORY)} are needed"
        )
    return size


def versions() -> dict[str, str]:
    """Return the versions of everything that a result depends on."""
    return {
        "dtensor-verifier": __version__,
        "torch": str(torch.__version__),
        "hypothesis": version("hypothesis"),
        "python": platform.python_version(),
    }


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    names = list(known)
    return f"{what} {name!r} is none of {', '.join(names)}{did_you_mean(name, names)}"


def _meshes_within(world_size: int) -> tuple[str, ...]:
    """Return the default meshes that fit ``world_size`` ranks, and one of all ranks if none of these is as large."""
    fitting = [text for text in DEFAULT_MESHES if MeshSpec.parse(text).world_size <= world_size]
    largest = max((MeshSpec.parse(text).world_size for text in fitting), default=0)
    return (*fitting, *([] if largest == world_size else [str(world_size)]))


def _meshes(request: Request, cluster: Cluster | None) -> tuple[MeshSpec, ...]:
    backend: Backend = "nccl" if request.device == "cuda" else "gloo"
    if request.backend is not None:
        if request.backend not in BACKENDS:
            raise ValueError(_unknown("backend", request.backend, BACKENDS))
        backend = request.backend
    texts = request.meshes or DEFAULT_MESHES
    if request.device == "cuda" and not torch.cuda.device_count():
        raise ValueError("--device cuda: torch sees no GPU here")
    if request.device == "cuda" and backend == "nccl" and not request.meshes:
        texts = [str(torch.cuda.device_count())]
    meshes = tuple(dict.fromkeys(MeshSpec.parse(text, backend, request.device) for text in texts))
    for mesh in meshes:
        size, most = mesh.world_size, MOST_RANKS if cluster is None else cluster.world_size
        if size > most:
            room = f"at most {most} run on one machine" if cluster is None else f"torchrun started {most}"
            raise ValueError(f"mesh {mesh} has {size} ranks; {room}")
        if mesh.backend == "nccl" and mesh.device != "cuda":
            raise ValueError(f"mesh {mesh}: nccl moves CUDA tensors only; add --device cuda")
        if mesh.backend == "simulated" and mesh.device == "cuda":
            raise ValueError(
                f"mesh {mesh}: simulated ranks have CPU tensors only; --backend gloo lets ranks share GPUs"
            )
        if mesh.device == "cuda" and (problem := gpu_problem(_places(mesh, cluster), mesh.backend)):
            raise ValueError(f"mesh {mesh}: {problem}")
    return meshes


def _places(mesh: MeshSpec, cluster: Cluster | None) -> tuple[Place, ...]:
    return local_places(mesh.world_size) if cluster is None else cluster.places[: mesh.world_size]


def _describe_places(meshes: Sequence[MeshSpec], cluster: Cluster | None) -> str:
    """Return what to say of where the ranks are; empty if each is a process of this machine with its own device."""
    shared = [mesh for mesh in meshes if mesh.device == "cuda" and gpus_shared(_places(mesh, cluster))]
    parts = [] if cluster is None else [cluster.describe()]
    if shared:
        parts.append(f"ranks share GPUs on {'meshes' if len(shared) > 1 else 'mesh'} {' '.join(map(str, shared))}")
    return "; ".join(parts)


def _dtypes(names: Sequence[str], families: Sequence[Family]) -> tuple[torch.dtype, ...]:
    known = {str(dtype).removeprefix("torch."): dtype for family in families for dtype in family.dtypes}
    wanted = [name for text in names for name in text.split(",")]
    for name in wanted:
        if name not in known:
            raise ValueError(_unknown("dtype", name, list(known)))
    return tuple(known[name] for name in wanted) or tuple(known.values())


def record(
    plan: Plan,
    store: RunStore,
    listeners: Sequence[Listener] = (),
    past: Past | None = None,
    writer: RunWriter | None = None,
) -> RunRecord:
    """Run ``plan`` and store what came of it; the journal is written as it goes.

    Parameters
    ----------
    past
        What has been done of the plan already.
    writer
        Of a run that goes on: its journal has the past. A new run is opened if it is not given.

    Raises
    ------
    RunStoreError
        If the file system refuses. The journal up to then is kept.
    RunInterrupted
        If a second interrupt comes while the first one ends the run; the journal is kept.
    ReportInterrupted
        If it comes when the record is written already.
    """
    graph = RedistributionGraph()
    summary = Summary(graph)
    with writer or store.open_run(plan.header) as opened, one_interrupt_at_a_time():
        journal = journal_listener(opened, before=past.seconds if past and writer else 0.0)

        everyone: list[Listener] = [*listeners, summary]

        def recall(event: Event) -> None:
            for listener in everyone:
                listener(event)

        def emit(event: Event) -> None:
            recall(event)  # before the journal, so that a display learns of the end even if the disk is full
            journal(event)

        campaign = Campaign(plan, emit, past, recall if writer is not None else emit)
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


def write_report(run: RunRecord, store: RunStore) -> Path:
    """Write ``latest/index.html`` and ``latest/run.json`` of ``run`` and return the path of the page.

    Raises
    ------
    RunStoreError
        If the file system refuses. Each of the files is then as it was, or new.
    """
    folder = store.root / "latest"
    page = folder / "index.html"
    command = f"python -m verifier report{out_option(store.root)}"
    kept = f"the records in {store.directory} are whole; once it can be written: {command}"
    write_html(run, page, store.root, kept)
    write_json(run, folder / "run.json", kept)
    graph = RedistributionGraph.from_record(run.graph)
    graph.write_json(folder / "graph.json", kept)
    graph.write_graphml(folder / "graph.graphml", kept)
    return page
