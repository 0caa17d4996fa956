"""The trials of a case: its combinations, and the placements of the cotangents."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from verifier.core.arguments import tensor_arguments
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.oracle.reference import Reference
from verifier.placements.alphabet import Alphabet
from verifier.placements.combinations import CombinationSpace
from verifier.torch_internals.placements import Combination, Placements

__all__ = [
    "CasePlan",
    "cotangent_placements",
    "plan_case",
    "simpler_placements",
]


@dataclass(frozen=True)
class CasePlan:
    """The trials of one case on one mesh: ``total`` combinations exist, ``len(trials)`` of them are tried."""

    trials: tuple[Trial, ...]
    total: int


def cotangent_placements(reference: Reference, mesh: MeshSpec, seed: int) -> tuple[tuple[Placements, ...], ...]:
    """Return placements for three backward passes: all Replicate, one that shards, one that is Partial.

    On several mesh dims the second and third are random mixtures. A 0-d output cannot be sharded. If torch has no
    gradient, there are no backward passes.
    """
    rng = random.Random(f"cotangents/{seed}")
    outputs = [reference.outputs[i] for i in reference.differentiable]
    if not outputs or not reference.wanted or reference.no_gradient:
        return ()

    def mixture(ndim: int, lead: Placement) -> Placements:
        letters = [Replicate(), lead, *(Shard(d) for d in range(ndim)), Partial("sum")]
        places: list[Placement] = [rng.choice(letters) for _ in range(mesh.ndim)]
        places[rng.randrange(mesh.ndim)] = lead
        return tuple(places)

    everywhere: Placements = (Replicate(),) * mesh.ndim
    passes = [tuple(everywhere for _ in outputs)]
    if any(output.ndim for output in outputs):
        passes.append(tuple(mixture(o.ndim, Shard(rng.randrange(o.ndim)) if o.ndim else Replicate()) for o in outputs))
    passes.append(tuple(mixture(output.ndim, Partial("sum")) for output in outputs))
    return tuple(passes)


def plan_case(
    case: OpCase,
    reference: Reference,
    mesh: MeshSpec,
    cap: int | None,
    seed: int,
    wanted: Sequence[Combination] = (),
    alphabet: Alphabet | None = None,
    backward_every: int = 0,
) -> CasePlan:
    """Return the trials of ``case`` on ``mesh``: all combinations, or at most ``cap``.

    If there are more than ``cap``, the trials are a pairwise cover, then ``wanted`` combinations, then random ones; see
    :class:`~verifier.placements.combinations.CombinationSpace`.

    Parameters
    ----------
    backward_every
        One of so many trials has one backward pass, those of :func:`cotangent_placements` in turn, and the others have
        none; 0 if each trial has all of them.
    """
    tensors = tensor_arguments(case.args, case.kwargs)
    space = CombinationSpace(tensors, mesh.ndim, alphabet or Alphabet(), cap, seed, wanted)
    trials = []
    for number, combination in enumerate(space):
        passes = cotangent_placements(reference, mesh, seed + number)
        if backward_every and passes:
            turn, left = divmod(number, backward_every)
            passes = () if left else (passes[turn % len(passes)],)
        trials.append(Trial(case, mesh, combination, passes, seed + number))
    return CasePlan(tuple(trials), space.total)


def simpler_placements(placements: Placements) -> Iterator[Placements]:
    """Yield placements that are simpler, simplest first: all replicated, one mesh dim replicated, S(0) for S(k) and for
    a Partial, P(sum) for another Partial.

    >>> list(simpler_placements((Shard(1), Replicate())))
    [(Replicate(), Replicate()), (Shard(dim=0), Replicate())]
    """
    simpler: list[Placements] = [(Replicate(),) * len(placements)]
    for mesh_dim, placement in enumerate(placements):
        options: list[Placement] = []
        if not isinstance(placement, Replicate):
            options.append(Replicate())
            if placement != Shard(0):
                options.append(Shard(0))
        if isinstance(placement, Partial) and placement.reduce_op != "sum":
            options.append(Partial("sum"))
        simpler += [(*placements[:mesh_dim], option, *placements[mesh_dim + 1 :]) for option in options]
    yield from (option for option in dict.fromkeys(simpler) if option != placements)
