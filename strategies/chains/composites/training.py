"""Optimisers, clipping and scaling of gradients, and DTensor's own entry points."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.chains import entry_points, procedures
from strategies.chains.building import Building
from strategies.chains.composites.table import composite

_PROGRAMS = f"{procedures.__name__}."


def _parameters(b: Building, count: int) -> None:
    """Add parameters of different shapes, and their gradients."""
    for number, shape in enumerate([b.size(), (b.columns,), ()][:count]):
        for letter in "pg":
            tensor = b.tensors.pop(b.floats(*shape)).detach()
            b.tensors[f"{letter}{number}"] = tensor


@composite
def _optimiser(b: Building) -> None:
    """Steps of each optimiser in each implementation, and with the options that change what it computes."""
    _parameters(b, b.pick((1, 2, 2)))
    kind, options = b.way(
        ("SGD", {"lr": 0.5}),
        ("SGD", {"lr": 0.5, "momentum": 0.5, "dampening": 0.25, "weight_decay": 0.1}),
        ("SGD", {"lr": 0.5, "momentum": 0.5, "nesterov": True}),
        ("Adam", {"lr": 0.5}),
        ("Adam", {"lr": 0.5, "amsgrad": True, "weight_decay": 0.1}),
        ("AdamW", {"lr": 0.5, "maximize": True}),
        ("RMSprop", {"lr": 0.1, "centered": True}),
        ("Adagrad", {"lr": 0.5}),
        ("Adadelta", {"lr": 0.5}),
        ("NAdam", {"lr": 0.1}),
        ("Adamax", {"lr": 0.1}),
        ("Rprop", {"lr": 0.1}),
        ("ASGD", {"lr": 0.1}),
        ("RAdam", {"lr": 0.1}),
        ("Adafactor", {"lr": 0.1, "weight_decay": 0.1}),
    )
    fused = ("SGD", "Adam", "AdamW", "Adagrad")
    implementation = b.pick(("foreach", "foreach", "plain", *(["fused"] if kind in fused else [])))
    chosen = {"fused": True} if implementation == "fused" else {"foreach": implementation == "foreach"}
    b.program(f"{_PROGRAMS}optimised", kind, {**options, **chosen}, b.pick((1, 2)))


@composite
def _accumulated_gradients(b: Building) -> None:
    """Gradients of several backward passes, as those of micro-batches and of terms of a loss that are added up."""
    b.floats(*b.size())
    other = b.floats(b.pick((1, 2, b.mesh.world_size)), b.columns)
    b.tensors[other].requires_grad_(False)
    ways: tuple[tuple[Any, ...], ...] = (
        ("torch.mul", 2), ("torch.sum", 0), ("torch.mean", 1), ("torch.narrow", 0, 1, 1), ("torch.softmax", -1),
        ("torch.inner", other), ("torch.nn.functional.linear", other), ("torch.square",), ("torch.norm",),
    )  # fmt: skip
    b.program(f"{_PROGRAMS}accumulated", [list(b.way(*ways)) for _ in range(b.pick((2, 2, 3)))])


@composite
def _clipped_gradients(b: Building) -> None:
    _parameters(b, b.pick((1, 2, 3)))
    b.program(f"{_PROGRAMS}clipped", b.pick((1.0, 3.0)), b.pick((2.0, 2.0, 1.0, float("inf"))), b.chance(0.5))


@composite
def _two_meshes(b: Building) -> None:
    """Optimisers and clipping, with a parameter on a submesh among others."""
    _parameters(b, 2)
    kind, options = b.way(
        ("clip_grad_norm_", {"max_norm": 3.0, "norm_type": b.pick((2.0, 1.0, float("inf")))}),
        ("SGD", {"lr": 0.5, "momentum": 0.5}),
        ("AdamW", {"lr": 0.5}),
        ("RMSprop", {"lr": 0.1}),
    )
    fused = [{"fused": True}] if kind in ("SGD", "AdamW") else []
    chosen = b.pick(({"foreach": False}, {"foreach": True}, *fused))
    b.program(f"{entry_points.__name__}.over_two_meshes", kind, {**options, **chosen})


@composite
def _scaled_gradients(b: Building) -> None:
    """Gradients of which one element may be infinite, so that one rank and one gradient decide about a step."""
    _parameters(b, b.pick((1, 2)))
    if b.chance(0.6):
        b.tensors[b.pick([name for name in b.tensors if name.startswith("g")])].flatten()[-1] = float("inf")
    b.program(f"{_PROGRAMS}scaled", 1)


@composite
def _parallel_loss(b: Building) -> None:
    """Losses of scores with any number of dims, with weights and ignored targets, also where a class is on no rank."""
    more = [b.pick((2, 3)) for _ in range(b.pick((0, 0, 0, 1, 2)))]
    alone = b.chance(0.1)
    b.floats(*([] if alone else [b.rows]), b.columns, *([] if alone else more))
    y = b.ids(*([] if alone else [b.rows, *more]), below=b.columns)
    options: dict[str, object] = {"reduction": b.pick(("mean", "sum", "none"))}
    if b.chance(0.3):
        z = b.positive(b.columns)
        b.tensors[z] = b.tensors[z].detach()
    if b.chance(0.4) and not alone:
        options["ignore_index"] = ignored = b.pick((-100, 0))
        b.tensors[y].flatten()[::2] = ignored
    classes = 0 if alone else 1
    others: list[Placement] = [b.pick((Replicate(), *([] if alone else [Shard(0)]))) for _ in range(b.mesh.ndim - 1)]
    where = b.pick(range(b.mesh.ndim))
    placements = [*others[:where], Shard(classes), *others[where:]]
    before = b.pick(("", "", "", "", "nested", "raised"))
    if b.chance(0.15):
        options["alone"] = True
    b.program(f"{_PROGRAMS}parallel_loss", placements, {} if b.chance(0.1) else options, before)


@composite
def _gradient_penalty(b: Building) -> None:
    """Gradients of gradients, of tensors of every placement that reach a product with others of every placement."""
    x, y = b.floats(*b.size()), b.floats(b.columns, b.pick((1, 3)))
    for name in (x, y):
        b.tensors[name].requires_grad_(False)
    placements = [b.pick((Replicate(), Shard(0), Shard(1))) for _ in range(b.mesh.ndim)]
    b.program(f"{_PROGRAMS}penalised", b.pick(("from_local", "from_local", "redistribute", "as it is")), placements)


@composite
def _local_function(b: Building) -> None:
    b.floats(*b.size())
    placements = [b.pick((Replicate(), Shard(0), Shard(1))) for _ in range(b.mesh.ndim)]
    b.program(f"{_PROGRAMS}locally", placements)


@composite
def _rewrapped(b: Building) -> None:
    b.floats(*b.size())
    b.program(f"{_PROGRAMS}rewrapped", b.chance(0.5))


@composite
def _placed_gradients(b: Building) -> None:
    """Gradients whose placements the caller says where local tensors are taken and given, with any dims and pending."""
    b.tensors[b.floats(*b.size())].requires_grad_(False)
    way = b.pick(("to_local", "full_tensor", "from_local"))
    kinds = ("", "sum", "avg", "from the end", "from the end")
    b.program(f"{_PROGRAMS}placed_gradients", way, [b.pick(kinds) for _ in range(b.mesh.ndim)])


@composite
def _flattened_mesh(b: Building) -> None:
    b.floats(*b.size())
    letters = (Replicate(), Replicate(), Shard(0), Shard(1))
    targets = [[b.pick(letters) for _ in range(b.mesh.ndim)] for _ in range(b.pick((1, 2)))]
    b.program(f"{_PROGRAMS}on_flattened_mesh", targets)
