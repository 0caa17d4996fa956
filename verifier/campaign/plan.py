"""The complete, checked plan of a campaign."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from verifier.core.case import MeshSpec
from verifier.core.parts import RunPart
from verifier.gate.baseline import Baseline
from verifier.meshes.torchrun.controller import Cluster
from verifier.planning.families import Family
from verifier.records.schema import RunHeader

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """Everything that decides what a campaign does.

    Parameters
    ----------
    selected
        The ops to draw, by family name.
    without_samples
        Ops that were to be verified and that no family draws.
    wrong_samples
        Ops that were to be verified and whose declared samples are wrong, with what is wrong.
    combinations
        The most combinations of a case; if there are more, a pairwise sample is taken.
    jobs
        How many trials run at a time, each on ranks of its own. The outcome does not depend on it.
    hash_seeds
        The number of hash seeds that ranks have; None for one each.
    meshes_named
        Whether the user named the meshes. Entries of the baseline on other meshes are then not tried again.
    time_limit
        Seconds for the whole campaign, or None.
    backward_every
        One of so many trials on several mesh dims has a backward pass; 0 if each has all.
    minimising
        Seconds after which minimising a failure stops, with the smallest failure by then; None for the usual.
    shard
        The part of the cases to try; None for all.
    rank_memory
        Bytes that a rank may map in addition to those at its start, or None.
    cluster
        Where the ranks are, if torchrun started them; None for processes of this machine.
    """

    header: RunHeader
    families: dict[str, Family]
    selected: dict[str, tuple[str, ...]]
    meshes: tuple[MeshSpec, ...]
    dtypes: tuple[torch.dtype, ...]
    seed: int
    max_examples: int
    combinations: int
    time_limit: float | None
    imports: tuple[str, ...] = ()
    baseline: Baseline = field(default_factory=Baseline)
    trial_limit: float = 20.0
    shard: RunPart | None = None
    rank_memory: int | None = None
    cluster: Cluster | None = None
    without_samples: tuple[str, ...] = ()
    wrong_samples: Mapping[str, str] = field(default_factory=dict)
    minimising: float | None = None
    meshes_named: bool = False
    hash_seeds: int | None = None
    backward_every: int = 0
    jobs: int = 1
