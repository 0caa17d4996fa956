"""Makes a plan from the user's request."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import msgspec
import torch

from verifier.campaign.plan import Plan
from verifier.core.case import BACKENDS, DEFAULT_MESHES, MOST_RANKS, Backend, MeshSpec
from verifier.core.ops import resolve
from verifier.core.parts import RunPart
from verifier.core.versions import versions
from verifier.core.wording import unknown_name
from verifier.execution.imports import (
    imports_beside,
    modules_of_rules,
    own_rules,
    patterns_of_imports,
    run_imports_with_warnings,
)
from verifier.gate.baseline import Baseline
from verifier.meshes.hosts import Place, gpu_problem, gpus_shared, local_places
from verifier.meshes.torchrun.controller import Cluster
from verifier.planning.budgets import CAMPAIGN_PROFILES, DEFAULT_PROFILE, OWN_RULES, CampaignProfile
from verifier.planning.families import Family, installed_families, select_ops, select_registered
from verifier.processes.limits import available_memory, parse_rank_memory
from verifier.records.files import new_run_id
from verifier.records.schema import RunHeader
from verifier.runs.revision import BASELINE, revision
from verifier.torch_internals.names import OpOverload
from verifier.torch_internals.rule_code.constants import may_follow_hashes

__all__ = [
    "Request",
    "make_plan",
]

MOST_JOBS = 64
MOST_BY_DEFAULT = 8
"""More jobs than these do not pay: this one process judges all trials, at about a millisecond each."""
BYTES_OF_RANK = 250 << 20
"""Memory that a rank may take by default: one that DTensor has planned much for takes 100 MiB."""


@dataclass(frozen=True)
class Request:
    """A user's request as text; :func:`make_plan` checks it."""

    patterns: Sequence[str] = ()
    meshes: Sequence[str] = ()
    backend: str | None = None
    device: str = "cpu"
    dtypes: Sequence[str] = ()
    profile: str | None = None
    """If None: :data:`OWN_RULES` for all that the imports register, and :data:`DEFAULT_PROFILE` for patterns."""
    seed: int = 0
    max_examples: int | None = None
    time_limit: float | None = None
    imports: Sequence[str] = ()
    command: str = ""
    shard: str | None = None
    baseline: str = ""
    """Where the baseline was read from."""
    rank_memory: str | None = None
    only: Sequence[str] = ()
    """The ops to verify of those that the imports register; all if none is given."""
    jobs: int | None = None
    """How many trials run at a time; never stored, because nothing that is recorded depends on it."""


def make_plan(request: Request, baseline: Baseline, cluster: Cluster | None = None) -> Plan:
    """Return the plan for ``request``.

    Parameters
    ----------
    cluster
        Where the ranks are, if torchrun started them.

    Raises
    ------
    ValueError
        If anything in the request does not exist or does not fit; the message has the nearest valid name.
    """
    run_imports_with_warnings(request.imports)
    with imports_beside(request.imports) as imports:
        families = installed_families()
    if not families:
        raise ValueError("no family is installed; install the distribution (pip install -e .), not the folder alone")
    asked = patterns_of_imports(request.patterns, request.imports, request.only)
    without_samples: tuple[str, ...] = ()
    wrong_samples: Mapping[str, str] = {}
    if asked and not request.patterns:
        selected, without_samples, wrong_samples = select_registered(asked, families)
    else:
        selected = select_ops(asked, families)
    profile = _profile(request)
    if request.device not in ("cpu", "cuda"):
        raise ValueError(unknown_name("device", request.device, ("cpu", "cuda")))
    shard = RunPart.parse(request.shard) if request.shard is not None else None
    if cluster is not None and not request.meshes:  # stored with the run, because the default differs on other machines
        request = replace(request, meshes=_meshes_within(cluster.world_size))
    meshes = _meshes(request, profile, cluster)
    if request.max_examples is not None and request.max_examples < 1:
        raise ValueError(f"--max-examples {request.max_examples}: at least one example is needed")
    if request.time_limit is not None and not 0 < request.time_limit < math.inf:
        raise ValueError(f"--time-limit {request.time_limit:g}: the limit must be a positive, finite number of seconds")
    jobs = _jobs(request.jobs, meshes, cluster)
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
        request=msgspec.to_builtins(replace(request, command="", jobs=None)),
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
        without_samples=without_samples,
        wrong_samples=wrong_samples,
        meshes_named=bool(request.meshes or profile.meshes),
        jobs=jobs,
        trial_limit=profile.trial_limit,
        minimising=profile.minimising,
        hash_seeds=profile.hash_seeds if _may_follow_hashes(own) or profile.name != OWN_RULES else 1,
        backward_every=profile.backward_every,
    )


def _may_follow_hashes(ops: Sequence[str]) -> bool:
    """Return whether rules of ``ops`` may depend on the hash seed of a rank: else one seed shows what several do."""
    return any(isinstance(op := resolve(f"torch.ops.{name}"), OpOverload) and may_follow_hashes(op) for name in ops)


def _profile(request: Request) -> CampaignProfile:
    name = request.profile or (OWN_RULES if request.imports and not request.patterns else DEFAULT_PROFILE)
    if name not in CAMPAIGN_PROFILES:
        raise ValueError(unknown_name("profile", name, CAMPAIGN_PROFILES))
    return CAMPAIGN_PROFILES[name]


def _meshes_within(world_size: int) -> tuple[str, ...]:
    """Return the default meshes that fit ``world_size`` ranks, and a mesh of all ranks if none of them has all."""
    fitting = [text for text in DEFAULT_MESHES if MeshSpec.parse(text).world_size <= world_size]
    largest = max((MeshSpec.parse(text).world_size for text in fitting), default=0)
    return (*fitting, *([] if largest == world_size else [str(world_size)]))


def _meshes(request: Request, profile: CampaignProfile, cluster: Cluster | None) -> tuple[MeshSpec, ...]:
    backend: Backend = "nccl" if request.device == "cuda" else "gloo"
    if request.backend is not None:
        if request.backend not in BACKENDS:
            raise ValueError(unknown_name("backend", request.backend, BACKENDS))
        backend = request.backend
    texts = request.meshes or profile.meshes or DEFAULT_MESHES
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


def _jobs(asked: int | None, meshes: Sequence[MeshSpec], cluster: Cluster | None) -> int:
    """Return how many trials run at a time: as many as asked for; else one for each core, if memory allows."""
    if asked is not None and not 1 <= asked <= MOST_JOBS:
        raise ValueError(f"--jobs {asked}: must be from 1 to {MOST_JOBS}")
    if cluster is not None and (asked or 1) > 1:
        raise ValueError(f"--jobs {asked}: ranks that torchrun started run one trial at a time")
    if asked is not None:
        return asked
    if cluster is not None or any(mesh.device == "cuda" for mesh in meshes):  # GPUs have room for one set of ranks
        return 1
    room = available_memory() // (BYTES_OF_RANK * max(mesh.world_size for mesh in meshes))
    return max(1, min(len(os.sched_getaffinity(0)), room, MOST_BY_DEFAULT))


def _places(mesh: MeshSpec, cluster: Cluster | None) -> tuple[Place, ...]:
    return local_places(mesh.world_size) if cluster is None else cluster.places[: mesh.world_size]


def _describe_places(meshes: Sequence[MeshSpec], cluster: Cluster | None) -> str:
    """Return the text on where the ranks are; empty if each is a process of this machine with its own device."""
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
            raise ValueError(unknown_name("dtype", name, list(known)))
    return tuple(known[name] for name in wanted) or tuple(known.values())
