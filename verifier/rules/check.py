"""Level 1: checks one sample, that is one way of calling one op, on all meshes, at all sizes, with many values.

For each choice of input placements the op runs once on each rank's local tensors, and what comes out is compared with
what every output placement promises. A claim of DTensor's that a draw refutes is a wrong rule; a rule that no draw
refutes, and in whose place DTensor communicates, is a missing one.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice, permutations

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from verifier.core.call_text import describe_call, kind_of_call
from verifier.core.case import MeshSpec
from verifier.core.ops import resolve
from verifier.records.schema import MissingRuleRecord, TransferRecord
from verifier.rules.explore import Exploration
from verifier.rules.ledger import Ledger
from verifier.rules.options import DRAWS_FOR_MISSING, SIZES_FOR_MISSING, CheckOptions, Position
from verifier.rules.products import Products
from verifier.rules.results import Rule, SampleReport
from verifier.rules.sample_on_mesh import CALL_ERRORS, SampleOnMesh
from verifier.rules.samples import Sample
from verifier.rules.stale import stale_decisions
from verifier.torch_internals.amending.propagation import is_torchs
from verifier.torch_internals.names import OpOverload
from verifier.torch_internals.placements import Combination, masked_extent, placement_text
from verifier.torch_internals.registries import has_own_handler, installed_sharded_op, sees_mesh
from verifier.torch_internals.rule_code.constants import (
    asks_for_inference_mode,
    asks_for_world,
    codes_of_rule,
    constants_of_rule,
    names_of_mesh_dims,
)
from verifier.torch_internals.rule_code.reach import watch_of

__all__ = ["DRAWS_FOR_MISSING", "CheckOptions", "Position", "check_sample", "places_of"]


def check_sample(
    sample: Sample,
    options: CheckOptions,
    number: int = 0,
    enter: Callable[[Position], None] = lambda position: None,
    skip: frozenset[Position] = frozenset(),
) -> SampleReport:
    """Return what comes of checking ``sample``, which has ``number`` among the samples of its op.

    ``enter`` is told of each combination before it is run. Those in ``skip`` have ended the process before and are not
    run, at this size and any other. No gradients are recorded. Every other sample is checked in inference mode if the
    rule is the user's and asks for it.
    """
    started = time.perf_counter()
    report = SampleReport(sample.op, sample.origin)
    if sample.not_testable:
        report.not_testable = sample.not_testable
        report.untested[sample.not_testable] += 1
        return report
    rule = _users_op(sample)
    inferring = number % 2 == 1 and rule is not None and asks_for_inference_mode(rule)
    with torch.inference_mode() if inferring else torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watch = None if rule is None else watch_of(codes_of_rule(rule))
        _check(Ledger(sample, _with_meshes_of_rule(sample, options), number, enter, skip, report, watch))
    if watch is not None:
        report.reached, report.unreached = frozenset(watch.reached), watch.left
    report.seconds = time.perf_counter() - started
    return report


def _check(ledger: Ledger) -> None:
    """Check the sample of ``ledger`` on all meshes and at all sizes."""
    options, report = ledger.options, ledger.report
    largest: tuple[int, Exploration] | None = None
    short: list[bool] = []
    for mesh_number, mesh in enumerate(options.meshes):
        for size in range(options.sizes if mesh.ndim == 1 else 1):
            case = ledger.draw(size, 0)
            if case is None:
                continue
            kind = Exploration if mesh.ndim == 1 else Products
            try:
                place = kind(ledger, case, mesh, mesh_number, size)
            except CALL_ERRORS:
                report.untested["the local call raises"] += 1
                continue
            report.call = report.call or describe_call(case, None)
            if mesh.ndim == 1:
                short.append(any(extent < mesh.world_size for tensor in place.call.tensors for extent in tensor.shape))
                report.short = all(short)
            with closing(place):
                place.run()
            if isinstance(place, Exploration) and options.samples_called_again and mesh_number == size == 0:
                place.take(case, 0)
                report.stale = list(stale_decisions(place))
            if isinstance(place, Products):
                report.missing |= missing_products(ledger, place)
            elements = sum(tensor.numel() for tensor in place.call.tensors)
            if isinstance(place, Exploration) and (largest is None or elements >= largest[0]):
                largest = elements, place
    for number, mesh in enumerate(options.beyond, len(options.meshes)):
        for size in [0] if mesh.names else sorted({0, options.sizes - 1}):
            _check_beyond(ledger, mesh, number, size)
    ledger.settle()
    if largest is not None and not options.claims_only:
        report.missing |= missing_rules(ledger, largest[1])


def _check_beyond(ledger: Ledger, mesh: MeshSpec, number: int, size: int) -> None:
    case = ledger.draw(size, 0)
    if case is None:
        return
    try:
        place = (Exploration if mesh.ndim == 1 else Products)(ledger, case, mesh, number, size)
    except CALL_ERRORS:
        return
    with closing(place):
        if isinstance(place, Exploration):
            place.run_unjudged()
        else:
            place.try_claims()


def _users_op(sample: Sample) -> OpOverload | None:
    """Return the op of a sample if its rule is the user's."""
    op = resolve(f"torch.ops.{sample.op}")
    return op if isinstance(op, OpOverload) and not is_torchs(op) else None


def _with_meshes_of_rule(sample: Sample, options: CheckOptions) -> CheckOptions:
    """Return ``options`` with the meshes beyond the usual ones on which the rule of the sample's op is tried.

    A strategy that is not told the mesh lists its rules for one mesh dim, and cannot depend on the number of ranks. One
    of the user's that is told the mesh, or asks which ranks there are, is also tried on the meshes that its code names.
    """
    op = resolve(f"torch.ops.{sample.op}")
    if not options.beyond or not isinstance(op, OpOverload):
        return options
    told = not is_torchs(op) and (sees_mesh(op) or asks_for_world(op))
    may_depend = told or is_torchs(op) or has_own_handler(op) or installed_sharded_op(op) is not None
    meshes = [mesh for mesh in options.beyond if (may_depend if mesh.ndim == 1 else told)]
    named = _meshes_of_rule(op, {mesh.shape for mesh in (*options.meshes, *meshes)}) if told else ()
    return replace(options, beyond=(*meshes, *named))


def _meshes_of_rule(op: OpOverload, known: Collection[tuple[int, ...]]) -> Iterator[MeshSpec]:
    """Yield meshes that the code of the rule of ``op`` names: by the number of ranks, and by the names of mesh dims."""
    sizes = sorted(one for one in constants_of_rule(op) if type(one) is int and 1 < one <= _MOST_RANKS)
    sizes = [one for one in sizes if (one,) not in known]
    yield from (MeshSpec((size,)) for size in sizes[:_MOST_NAMES])
    names = names_of_mesh_dims(op)
    if names is None:
        return
    names = names[:_MOST_NAMES] or ["one"]
    yield from (MeshSpec((2,), names=(name,)) for name in names)
    pairs = islice(permutations((*names, "other"), 2), _MOST_PAIRS)
    yield from (MeshSpec((2, 2), names=pair) for pair in pairs)


_MOST_RANKS = 16
_MOST_NAMES, _MOST_PAIRS = 3, 8


def places_of(ledger: Ledger, most: int) -> Iterator[SampleOnMesh]:
    """Yield the sample of ``ledger`` on its meshes and at its sizes, at most so many; the first size comes first.

    What DTensor claims on the first mesh is noted, for products on meshes of several dims.
    """
    options = ledger.options
    where = [
        (size, mesh_number)
        for size in range(options.sizes)
        for mesh_number, mesh in enumerate(options.meshes)
        if size == 0 or mesh.ndim == 1
    ]
    for size, mesh_number in where[:most]:
        mesh = options.meshes[mesh_number]
        case = ledger.draw(size, 0)
        if case is None:
            continue
        try:
            place = (Exploration if mesh.ndim == 1 else Products)(ledger, case, mesh, mesh_number, size)
        except CALL_ERRORS:
            continue
        if isinstance(place, Exploration) and not ledger.products:
            place.read()
            place.note_products()
        yield place


# ------------------------------------------------------------------------------------------------------------- missing
def missing_rules(ledger: Ledger, place: Exploration) -> dict[Rule, MissingRuleRecord]:
    """Return the rules that every draw bore out, where DTensor communicates or refuses."""
    found = {}
    for combination, candidate in ledger.candidates.items():
        if candidate.claimed or not candidate.masks or not all(candidate.masks):
            continue
        outputs = place.best_outputs(combination, candidate.masks)
        if outputs is None:
            continue
        combination = place.with_buffers(combination, outputs)
        rule = Rule(
            ledger.sample.op,
            tuple(placement_text(placements) for placements in combination),
            tuple(str(placement) for placement in outputs),
        )
        everywhere = candidate.world_sizes == {mesh.world_size for mesh in ledger.options.flat}
        if candidate.draws < DRAWS_FOR_MISSING or len(candidate.shapes) < SIZES_FOR_MISSING or not everywhere:
            ledger.report.untested["that hold, but in too few draws or sizes to be called missing"] += 1
            continue
        decided = place.reader.at(combination, place.mesh.shape)
        saves = [] if decided is None else list(transfers(combination, decided.inputs, place))
        if decided is not None and not saves:
            continue  # DTensor gets to a rule of its own by cutting locally: nothing is saved
        held = (candidate.draws, len(candidate.shapes), sorted(candidate.world_sizes))
        found[rule] = _missing_rule(rule, ledger, place, saves, held)
    return found


def missing_products(ledger: Ledger, place: Products) -> dict[Rule, MissingRuleRecord]:
    """Return the products of claims that hold on a mesh of several dims, where DTensor communicates or refuses."""
    found = {}
    for rule, (given, wanted, draws) in ledger.missing_products.items():
        saves = [] if wanted is None else list(transfers(given, wanted, place))
        if wanted is not None and not saves:
            continue  # DTensor gets to a rule of its own by cutting locally: nothing is saved
        found[rule] = _missing_rule(rule, ledger, place, saves, (draws, 1, [place.mesh.world_size]))
    return found


def _missing_rule(
    rule: Rule,
    ledger: Ledger,
    place: Exploration | Products,
    saves: list[TransferRecord],
    held: tuple[int, int, list[int]],
) -> MissingRuleRecord:
    """Return the record of a rule that held in so many draws, over so many sizes, on meshes of these world sizes."""
    draws, sizes, world_sizes = held
    return MissingRuleRecord(
        op=rule.op,
        input_placements=list(rule.inputs),
        output_placements=list(rule.outputs),
        shapes=[list(shape) for shape in place.shapes],
        arguments=place.arguments,
        origin=ledger.sample.origin,
        draws=draws,
        sizes=sizes,
        world_sizes=world_sizes,
        saves=saves,
        collectives_saved=len(saves),
        bytes_saved=sum(transfer.bytes for transfer in saves),
        calls=[kind_of_call(place.case)],
    )


def transfers(given: Combination, wanted: Combination, place: SampleOnMesh) -> Iterator[TransferRecord]:
    """Yield the collectives that bring each argument from its ``given`` to its ``wanted`` placements.

    On each mesh dim a collective takes what the rank has before any of them.
    """
    for number, (sources, targets) in enumerate(zip(given, wanted, strict=True)):
        local = max(place.cuts.of(number, sources), key=torch.Tensor.numel)
        size = local.numel() * local.element_size()
        for source, target in zip(sources, targets, strict=True):
            if source != target and source != Replicate() and masked_extent(target) is None:
                yield _transfer(number, source, target, size)


def _transfer(number: int, source: Placement, target: Placement, size: int) -> TransferRecord:
    if source.is_partial():
        collective = "all_reduce" if target == Replicate() or target.is_partial() else "reduce_scatter"
    else:
        collective = "all_gather" if target == Replicate() or target.is_partial() else "all_to_all"
    return TransferRecord(number, str(source), str(target), collective, size)
