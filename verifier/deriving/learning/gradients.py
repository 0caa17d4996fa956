"""Which placements the gradients of the arguments have where each rank differentiates an op on its local tensors.

A rule says where the results of the local op are. A region such as ``local_map`` also has to say where the gradients of
its inputs are, after the local backward pass, for cotangents that DTensor hands to it: placed as the results are, and
replicated where a result is partial.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from verifier.core.case import MeshSpec, OpCase
from verifier.placements.partials import largest_part
from verifier.rules.classify import Expected
from verifier.rules.execute import Cuts, LocalCall
from verifier.rules.options import CheckOptions
from verifier.rules.samples import Sample
from verifier.torch_internals.names import OpOverload
from verifier.torch_internals.opinfo import capture_calls
from verifier.torch_internals.ops import cache_by_rules, has_decomposition, is_composite, registered_overloads
from verifier.torch_internals.placements import Placements

__all__ = ["Placed", "gradient_rules", "has_gradients", "ops_without_strategy"]

Placed = tuple[Placement, ...]
_DRAWS = 3
"""Draws at each size and mesh; each has other values, and other cotangents."""
_LARGEST = 1 << 16
"""Calls with a tensor of more elements are not looked at."""
_ERRORS = (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError)


def gradient_rules(
    sample: Sample,
    options: CheckOptions,
    slots: Sequence[str],
    names: Sequence[str],
    rules: Mapping[Placed, tuple[frozenset[Placement], ...]],
    cotangent: Placement = Replicate(),  # noqa: B008 - it has no state
) -> tuple[tuple[int, ...], dict[Placed, tuple[frozenset[Placement], ...]]]:
    """Return which slots are differentiable, and for each rule the placements of its results and of their gradients.

    Of the placements that a result may have, the one is kept that is used most: replicated, then the first shard, then
    a partial one. A rule is left out if the local gradients of some slot represent the gradient under no placement.

    Parameters
    ----------
    slots
        The parameters that are tensors or lists of them.
    names
        The parameter of each tensor.
    rules
        By the placements of the slots those that each result may have.
    cotangent
        The placement of the cotangents of results that are not sharded. If it is not replicated, rules are left out
        that have no such result.
    """
    found: dict[Placed, list[int]] = {}
    chosen = {inputs: tuple(map(_best, allowed)) for inputs, allowed in rules.items() if all(allowed)}
    if not cotangent.is_replicate():
        chosen = {inputs: outputs for inputs, outputs in chosen.items() if not all(p.is_shard() for p in outputs)}
    letters: list[tuple[Placement, ...]] = []
    places: list[int] = []
    for mesh, size, draw in itertools.product(options.flat, range(options.sizes), range(_DRAWS)):
        case = sample.draw(size, draw)
        if case is None:
            continue
        call = _Differentiated(case, mesh, options.seed + 31 * draw + size)
        if not call.differentiable:
            return (), {inputs: tuple(frozenset({one}) for one in outputs) for inputs, outputs in chosen.items()}
        if call.results and any(len(outputs) != call.results for outputs in chosen.values()):
            continue  # there may be more parts of a larger tensor
        places = call.differentiable
        letters = [expected.letters for expected in call.expected]
        for inputs, outputs in chosen.items():
            known = found.get(inputs, [-1] * len(places))
            if all(known):
                tensors = [inputs[slots.index(name)] for name in names]
                found[inputs] = call.represented(tensors, outputs, known, cotangent)
    made = {}
    for inputs, masks in found.items():
        if all(masks):
            allowed = [
                {p for n, p in enumerate(some) if mask >> n & 1} for some, mask in zip(letters, masks, strict=True)
            ]
            of_slot: dict[str, set[Placement]] = {}
            for number, some in zip(places, allowed, strict=True):
                of_slot[names[number]] = of_slot.get(names[number], some) & some  # the tensors of a list are alike
            if all(of_slot.values()):
                results = tuple(frozenset({one}) for one in chosen[inputs])
                made[inputs] = (*results, *map(frozenset, of_slot.values()))
    return tuple(dict.fromkeys(slots.index(names[number]) for number in places)), made


def has_gradients(case: OpCase) -> bool:
    """Return whether autograd finds a gradient of some tensor of a call on plain tensors."""
    call = LocalCall(case)
    inputs = [t.detach().requires_grad_(t.is_floating_point() or t.is_complex()) for t in call.tensors]
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")  # torch warns of ops without a formula
        try:
            made = call(inputs)
            of_copies = {number for number in made.written if _is_copy(made.tensors[number])}
            results = [t for n, t in enumerate(made.tensors) if t.requires_grad and n not in of_copies]
            wanted = [t for t in inputs if t.requires_grad]
            found = torch.autograd.grad(results, wanted, [torch.ones_like(t) for t in results], allow_unused=True)
        except _ERRORS:
            return False
    return any(gradient is not None for gradient in found)


def _is_copy(tensor: torch.Tensor) -> bool:
    """Return whether all that autograd knows of a tensor that an op was given to write to is how it was copied."""
    return tensor.grad_fn is not None and tensor.grad_fn.name() == "CloneBackward0"


def ops_without_strategy(cases: Iterable[OpCase], or_decomposed: bool = False) -> tuple[str, ...]:
    """Return the ops that the gradients of calls run on plain tensors and for which DTensor has nothing to go by.

    With ``or_decomposed`` also those whose strategy DTensor makes from a decomposition.
    """
    found: dict[str, None] = {}
    for case in cases:
        with capture_calls(_has_no_rules if or_decomposed else _lacks_strategy, _LARGEST) as calls:
            has_gradients(case)
        found |= dict.fromkeys(str(op) for op, _, _ in calls if str(op) != case.op)
    return tuple(found)


@cache_by_rules
def _lacks_strategy(op: OpOverload) -> bool:
    return _has_no_rules(op) and not has_decomposition(op)


@cache_by_rules
def _has_no_rules(op: OpOverload) -> bool:
    return op not in registered_overloads() and not is_composite(op)


def _best(allowed: frozenset[Placement]) -> Placement:
    return min(allowed, key=lambda p: (not p.is_replicate(), not isinstance(p, Shard), str(p)))


class _Differentiated:
    """A call and its backward pass, on whole tensors and on the local ones of each rank of a mesh of one dim.

    Attributes
    ----------
    differentiable
        Numbers of the tensors that have a gradient; empty if no result depends on one.
    expected
        Their gradients.
    results
        How many tensors it returns; 0 if it raised.
    """

    def __init__(self, case: OpCase, mesh: MeshSpec, seed: int) -> None:
        self._call, self._mesh = LocalCall(case), mesh
        tensors = self._call.tensors
        self._wanted = [n for n, t in enumerate(tensors) if t.is_floating_point() or t.is_complex()]
        self.differentiable: list[int] = []
        self.expected: list[Expected] = []
        self.results = 0
        with torch.enable_grad():
            try:
                whole = self._run(tensors)
            except _ERRORS:
                return
        self.results = len(whole[1])
        self._results = [n for n, result in enumerate(whole[1]) if result.requires_grad]
        if not self._results or self._call.written:
            return
        generator = torch.Generator().manual_seed(seed)
        cotangents = [
            torch.randint(-4, 5, whole[1][n].shape, generator=generator).to(whole[1][n].dtype) for n in self._results
        ]
        try:
            gradients = self._gradients(whole, cotangents)
        except _ERRORS:
            return
        self.differentiable = self._wanted
        terms = sum(t.numel() for t in tensors)
        noise = max([largest_part(t.dtype) for t in tensors], default=1.0)
        self.expected = [Expected(g, mesh.world_size, False, terms, noise) for g in gradients]
        self._cuts = Cuts(tensors, mesh.shape, seed)
        self._cotangents = Cuts(cotangents, mesh.shape, seed + 7)

    def _run(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        inputs = [t.detach().requires_grad_(n in self._wanted) for n, t in enumerate(tensors)]
        return inputs, list(self._call(inputs).tensors)

    def _gradients(
        self, made: tuple[list[torch.Tensor], list[torch.Tensor]], cotangents: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        inputs = [made[0][n] for n in self._wanted]
        results = [made[1][n] for n in self._results]
        gradients = torch.autograd.grad(results, inputs, cotangents, allow_unused=True)
        return [torch.zeros_like(t) if g is None else g.to_dense() for t, g in zip(inputs, gradients, strict=True)]

    def represented(
        self, inputs: Sequence[Placement], outputs: Sequence[Placement], within: Sequence[int], cotangent: Placement
    ) -> list[int]:
        """Return the placements under which the ranks' gradients represent each gradient, as bits."""
        cut = [self._cuts.of(n, (p,)) for n, p in enumerate(inputs)]
        handed: list[Placements] = [(outputs[n] if outputs[n].is_shard() else cotangent,) for n in self._results]
        cotangents = [self._cotangents.of(n, placements) for n, placements in enumerate(handed)]
        by_rank = []
        try:
            with torch.enable_grad():
                for rank in range(self._mesh.world_size):
                    made = self._run([tensors[rank] for tensors in cut])
                    by_rank.append(self._gradients(made, [tensors[rank] for tensors in cotangents]))
        except _ERRORS:
            return [0] * len(within)
        partial = any(p.is_partial() for p in (*inputs, *outputs, cotangent))
        for expected in self.expected:
            expected.expect_parts(partial)
        return [
            expected.represented([gradients[n] for gradients in by_rank], mask)
            for n, (expected, mask) in enumerate(zip(self.expected, within, strict=True))
        ]
