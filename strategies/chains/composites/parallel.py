"""Tensor parallelism: inputs that are kept in shards, weights of each rank, and replicas that are checked."""

from __future__ import annotations

from typing import Any

import torch

from strategies.chains import parallel
from strategies.chains.building import Building
from strategies.chains.composites.table import composite
from strategies.chains.sharding import weights

_PROGRAMS = f"{parallel.__name__}."


@composite
def _resharded_input(b: Building) -> None:
    """Layers that keep a shard of what they save, also of few or of odd rows, and with activations computed again."""
    ranks = b.mesh.shape[-1]
    model, recomputed = b.way(("split", False), ("split", True), ("replicated", False), ("replicated", True))
    rows, columns = b.pick((ranks, 2 * ranks, 2 * ranks, 2 * ranks - 1)), b.pick((ranks, 2 * ranks, b.columns))
    b.tensors[b.floats(rows, columns)].requires_grad_(False)
    b.program(f"{_PROGRAMS}resharded", model, b.pick((0, 0, -1)) if recomputed else 0, recomputed, 2 * ranks)


@composite
def _own_weights(b: Building) -> None:
    """Layers whose parameters are each rank's own, or those of some rank, by every kind of key of a plan."""
    b.tensors[b.floats(*b.size())].requires_grad_(False)
    key = b.pick(("", "", "no plan", "inner", "outer.inner", "outer.*"))
    b.program(f"{_PROGRAMS}with_own_weights", key, b.pick(("ColwiseParallel", "RowwiseParallel")), b.pick((None, 0, 1)))


@composite
def _checked_submesh(b: Building) -> None:
    """Replicas that ``from_local`` checks on the rows of a mesh, which have others or none."""
    b.tensors[b.floats(*b.size())].requires_grad_(False)
    b.program(f"{_PROGRAMS}checked_on_submeshes", b.pick(("", "shape", "shape", "dtype", "alone")))


@composite
def _beside_the_mesh(b: Building) -> None:
    """Functions that all ranks call on a tensor of which one rank has nothing."""
    b.tensors[b.floats(*b.size())].requires_grad_(False)
    ways: tuple[tuple[Any, ...], ...] = (
        ("torch.argmax",), ("torch.argmin", 0), ("torch.sum",), ("torch.max",), ("torch.exp",), ("torch.cumsum", 0),
        ("torch.linalg.vector_norm",),
    )  # fmt: skip
    path, *given = b.way(*ways)
    b.program(f"{_PROGRAMS}beside_the_mesh", path, given)


@composite
def _miscounted(b: Building) -> None:
    """More or fewer placements than the mesh has dims."""
    b.tensors[b.floats(*b.size())].requires_grad_(False)
    b.program(f"{_PROGRAMS}miscounted", b.pick(("redistribute", "from_local", "distribute_tensor")), b.pick((1, -1)))


@composite
def _fully_sharded(b: Building) -> None:
    """Weights under ``fully_shard``, in mixed precision too, of which some inputs take one alone."""
    for name in (b.floats(*b.size()), b.floats(*b.size())):
        b.tensors[name] = b.tensors[name].detach().clamp(-2, 2)
    low = torch.bfloat16
    precision = list(b.pick(((), (), (low, torch.float32), (low, torch.float32), (low, low), (None, torch.float32))))
    options = {"reshard_after_forward": b.chance(0.5)}
    used = list(b.pick(((True,), (False,), (True, True), (False, True), (False, True), (True, False), (False, False))))
    b.rounds()
    b.program(f"{_PROGRAMS}fully_sharded", precision, options, used)


@composite
def _sharded_in_turns(b: Building) -> None:
    """Weights under ``fully_shard``, also with replicas, that inputs take in turns, frozen or in inference mode."""
    rows, columns = b.rows, b.pick((1, 2)) * b.mesh.shape[-1]
    for name in (b.floats(rows, columns), b.floats(rows + b.pick((0, 0, 1)), columns)):
        b.tensors[name] = b.tensors[name].detach().clamp(-2, 2)
    low, dim, deferred, precision = (
        torch.bfloat16,
        b.pick((0, 0, 1)),
        b.pick(("all_reduce", "gradient_sync", "", "")),
        [],
    )
    turns = list(b.pick((("a", "b"), ("a", "ab"), ("ab", "b"), ("ab", "a", "b"), ("ab", "ab"), ("a", "a"))))
    if b.chance(0.3):
        precision = list(b.pick(((low,), (low, torch.float32))))
    if not deferred:
        ways = (
            ("ab", "frozen", "ab"),
            ("ab", "frozen", "ab", "a"),
            ("AB", "ab", "AB"),
            ("ab", "AB", "ab"),
            ("AB", "A"),
        )
        turns, precision = list(b.pick(ways)), list(b.pick(((), (), (low,), (low, torch.float32))))
    b.rounds()
    hybrid = deferred == "all_reduce" or b.chance(0.5)
    apart, unused = b.chance(0.5), b.chance(0.3)
    b.program(f"{_PROGRAMS}sharded_in_turns", hybrid, apart, dim, deferred, precision, turns, unused)


@composite
def _changed_weights(b: Building) -> None:
    """Weights under ``fully_shard`` that are converted, hooked or written to, or whose gradients are taken back."""
    rows, columns, dim = b.rows, b.pick((1, 2)) * b.mesh.world_size, b.pick((0, 0, 1))
    second = b.pick((rows, rows, rows, rows + 1, rows + 1, rows if dim else 0))
    for name in (b.floats(rows, columns), b.floats(second, columns)):
        b.tensors[name] = b.tensors[name].detach().clamp(-2, 2)
    ways: tuple[tuple[str, ...], ...] = (
        ("wait", "zero", "train"), ("train", "zero", "train"), ("wait", "train"), ("hook", "train"),
        ("train", "hook", "train"), ("hook", "wait", "train"), ("halve", "train"), ("train", "halve", "train"),
        ("float", "train"), ("train", "float", "train"), ("train", "zero", "float", "double", "train"),
        ("shown", "train"), ("train", "shown"), ("train", "shown", "train"), ("train", "shown", "step", "shown"),
        ("train", "step", "float", "train", "step"),
    )  # fmt: skip
    options: dict[str, object] = {name: True for name in ("hybrid", "apart", "fewer") if b.chance(0.5)}
    if dim:
        options["dim"] = dim
    kind = b.pick(("", "", "", "written", "precise"))
    if kind == "precise":
        for name in b.tensors:
            b.tensors[name] = b.tensors[name].float()
        ways = tuple(events for events in ways if not {"float", "double"} & set(events))
    if kind:
        options[kind] = True
    b.rounds()
    b.program(f"{weights.__name__}.changed", options, list(b.pick(ways)))


@composite
def _shared_and_sharded(b: Building) -> None:
    """A weight that some ranks share and others shard, with gradients that cancel if they are reduced precisely."""
    b.tensors[b.floats(*b.size())].requires_grad_(False)
    low = torch.bfloat16
    precision = list(b.pick(((), (low, torch.float32), (low, torch.float32))))
    passes = list(b.pick(([[256.0, 1.0], [-256.0]], [[-512.0, 3.0], [512.0]], [[1.0, 2.0]])))
    b.program(f"{weights.__name__}.across", precision, passes)
