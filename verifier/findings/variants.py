"""Simpler forms of a failing trial, as candidates for the minimiser."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations

import torch

from verifier.core.arguments import tensor_arguments
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Observation
from verifier.findings.failures import Failure, first_report
from verifier.findings.grouping import case_flags
from verifier.oracle.reference import make_reference
from verifier.placements.alphabet import Alphabet
from verifier.placements.parsing import parse_placements
from verifier.planning.trials import cotangent_placements, simpler_placements
from verifier.programs import SimplerCall, is_composed, keep_mesh_dims, simpler_calls
from verifier.torch_internals.names import pytree
from verifier.torch_internals.placements import Placements

__all__ = [
    "call_by_itself",
    "on_kept_mesh_dims",
    "placements_of_results",
    "plain_trials",
    "plainer_cases",
    "same_metadata",
    "simpler_combinations",
    "simpler_cotangents",
    "smaller_meshes",
]


def placements_of_results(observation: Observation) -> dict[int, Placements]:
    """Return the known placements of a call's results by number, without those that no tensor can be given."""
    report = first_report(observation)
    placed: dict[int, Placements] = {}
    for subject, text in report.placements if report is not None else ():
        if subject == "output" or re.fullmatch(r"output \d+", subject):
            try:
                placed[int(subject[7:] or 0)] = parse_placements(text)
            except ValueError:  # for example a masked partial, which no tensor can be given
                continue
    return placed


def call_by_itself(simpler: SimplerCall, failure: Failure) -> Trial:
    """Return a trial of one call that the program of ``failure`` makes."""
    trial = replace(failure.trial, case=simpler.case, combination=simpler.combination, cotangents=())
    if (backward := failure.verdict.backward) is not None:
        reference = make_reference(simpler.case)
        positions = make_reference(failure.trial.case).differentiable
        given = dict(zip(positions, failure.trial.cotangents[backward], strict=True))
        own = tuple(given[number] for number in simpler.outputs if number in given)
        passes = cotangent_placements(reference, trial.mesh, trial.seed)
        if own and len(own) == len(reference.differentiable):
            passes = (own, *passes)
        trial = replace(trial, cotangents=passes)
    return trial


def plain_trials(trial: Trial, placed: dict[int, Placements]) -> list[Trial]:
    """Return trials of the single calls of ``trial``: itself, or one for each call that its program makes."""
    if not is_composed(trial.case):
        return [trial]
    calls = simpler_calls(trial, placed)
    return [replace(trial, case=call.case, combination=call.combination, cotangents=()) for call in calls]


def same_metadata(first: OpCase, second: OpCase) -> bool:
    """Return whether the tensors of both have the same shapes and dtypes, by which DTensor distinguishes calls."""
    both = [[(t.shape, t.dtype) for t in tensor_arguments(case.args, case.kwargs)] for case in (first, second)]
    return both[0] == both[1]


def smaller_meshes(trial: Trial) -> list[tuple[MeshSpec, tuple[int, ...]]]:
    """Return simpler meshes to try, simplest first, each with the mesh dims that it keeps."""
    mesh = trial.mesh
    options: list[tuple[MeshSpec, tuple[int, ...]]] = []
    for mesh_dim in range(mesh.ndim):
        extents = {2, mesh.shape[mesh_dim]} - {1}
        names = mesh.names[mesh_dim : mesh_dim + 1]
        options += [(replace(mesh, shape=(extent,), flat=False, names=names), (mesh_dim,)) for extent in extents]
    options += [
        (replace(mesh, shape=(2, 2), flat=flat, names=tuple(mesh.names[d] for d in kept if mesh.names)), kept)
        for kept in combinations(range(mesh.ndim), 2)
        for flat in {False, mesh.flat}
    ]
    options = [option for option in options if option[0].world_size < mesh.world_size or option[0].ndim < mesh.ndim]
    if mesh.flat:
        options.append((replace(mesh, flat=False), tuple(range(mesh.ndim))))
    if mesh.names:
        options.append((replace(mesh, names=()), tuple(range(mesh.ndim))))
    return sorted(options, key=lambda option: (option[0].world_size, option[0].ndim, option[0].flat, option[1]))


def on_kept_mesh_dims(trial: Trial, mesh: MeshSpec, kept: tuple[int, ...]) -> Trial:
    combination = tuple(tuple(placements[d] for d in kept) for placements in trial.combination)
    cotangents = tuple(tuple(tuple(p[d] for d in kept) for p in one) for one in trial.cotangents)
    case = keep_mesh_dims(trial.case, kept)
    return replace(trial, case=case, mesh=mesh, combination=combination, cotangents=cotangents)


def plainer_cases(trial: Trial) -> list[Trial]:
    """Return variants with one option fewer, and one with float64 for every other floating dtype."""
    case = trial.case
    plainer = []
    for name in sorted(case_flags(case) & set(case.kwargs)):
        kwargs = {key: value for key, value in case.kwargs.items() if key != name}
        # a text names a mode; the default mode may not be exact, such as the mean of an embedding bag
        exact = case.exact and not isinstance(case.kwargs[name], str)
        plainer.append(replace(case, kwargs=kwargs, exact=exact))
    if any(tensor.dtype in _NARROW for tensor in tensor_arguments(case.args, case.kwargs)):
        args, kwargs = pytree.tree_map(_widened, (case.args, dict(case.kwargs)))
        plainer.append(replace(case, args=args, kwargs=kwargs))
    return [replace(trial, case=variant) for variant in plainer]


_NARROW = (torch.float32, torch.bfloat16, torch.float16)


def _widened(leaf: object) -> object:
    if not isinstance(leaf, torch.Tensor) or leaf.dtype not in _NARROW:
        return leaf
    return leaf.detach().to(torch.float64).requires_grad_(leaf.requires_grad)


def simpler_combinations(trial: Trial) -> list[Trial]:
    """Return variants in which one argument's placements are simpler, if its shape and dtype allow them."""
    variants = []
    tensors = tensor_arguments(trial.case.args, trial.case.kwargs)
    for position, (tensor, placements) in enumerate(zip(tensors, trial.combination, strict=True)):
        for changed in simpler_placements(placements):
            if Alphabet.legal(changed) and all(Alphabet.admits(p, tensor.ndim, tensor.dtype) for p in changed):
                combination = (*trial.combination[:position], changed, *trial.combination[position + 1 :])
                variants.append(replace(trial, combination=combination))
    return variants


def simpler_cotangents(trial: Trial) -> list[Trial]:
    """Return variants in which one cotangent is replicated, or sharded along an earlier tensor dim."""
    variants = []
    for number, one in enumerate(trial.cotangents):
        for position, placements in enumerate(one):
            for changed in simpler_placements(placements):
                cotangent = (*one[:position], changed, *one[position + 1 :])
                cotangents = (*trial.cotangents[:number], cotangent, *trial.cotangents[number + 1 :])
                variants.append(replace(trial, cotangents=cotangents))
    return variants
