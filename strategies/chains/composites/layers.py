"""Normalisations, layers and products."""

from __future__ import annotations

from typing import Any

import torch

from strategies.chains.building import Building
from strategies.chains.composites.table import composite

_F = "torch.nn.functional."


_STATISTICS = {"batch_norm": "training", "instance_norm": "use_input_stats"}
"""How a norm calls whether it takes the statistics of its input, and keeps those that it is given."""


def _constant(b: Building, size: int) -> str:
    """Add a tensor of fractions that wants no gradient."""
    name = b.positive(size)
    b.tensors[name].requires_grad_(False)
    return name


@composite
def _normalised(b: Building) -> None:
    """Layer, group, instance and batch norms of one, two and three spatial dims, and scaling to a norm of 1."""
    batch, channels = b.pick((2, 3, b.rows)), b.pick((2, 4))
    value = b.floats(batch, channels, *b.pick(((), (), (2,), (3,), (2, 2))), b.columns)
    kind = b.pick(
        ("layer_norm", "rms_norm", "group_norm", "instance_norm", "batch_norm", "normalize", "local_response_norm")
    )
    if kind in ("layer_norm", "rms_norm"):
        shape = b.pick(((b.columns,), tuple(b.of(value).shape[1:])))
        weight = {"weight": b.floats(*shape)} if b.chance(0.6) else {}
        bias = {"bias": b.floats(*shape)} if b.chance(0.5) and kind == "layer_norm" else {}
        b.call(f"{_F}{kind}", value, shape, **weight, **bias)
    elif kind == "group_norm":
        options = {"weight": b.floats(channels), "bias": b.floats(channels)} if b.chance(0.6) else {}
        b.call(f"{_F}{kind}", value, b.pick((1, 2)), **options)
    elif kind in ("instance_norm", "batch_norm"):
        own = b.chance(0.3) and kind == "instance_norm"  # keeps no statistics
        kept = [] if own else [b.call("torch.clone", _constant(b, channels)) for _ in range(2)]
        scaled = {"weight": b.floats(channels), "bias": b.floats(channels)} if b.chance(0.4) else {}
        trained = {_STATISTICS[kind]: own or b.chance(0.5)}
        b.call(f"{_F}{kind}", value, *kept, **scaled, **trained, momentum=b.pick((0.1, 0.5)))
    elif kind == "normalize":
        b.call(f"{_F}{kind}", value, b.pick((2.0, 1.0)), b.pick((0, 1, -1)))
    else:
        b.call(f"{_F}{kind}", value, 2)


@composite
def _weight_normalised(b: Building) -> None:
    """Weights of two and three dims that are split in norms and directions, along the first dim, the last or none."""
    shape = b.pick((b.size(), b.size(), (*b.size(), 2)))
    dim = b.pick((0, 0, len(shape) - 1))
    sizes = [size if at == dim else 1 for at, size in enumerate(shape)]
    if b.chance(0.3):
        b.call("torch.norm_except_dim", b.positive(*shape), 2, b.pick((dim, -1)))
    else:
        b.call("torch._weight_norm", b.positive(*shape), b.floats(*sizes), dim)
    b.rounds()


@composite
def _softmax(b: Building) -> None:
    path = b.pick(("softmax", "log_softmax", "softmin"))
    value = b.floats(2, *b.size())
    b.call(f"{_F}{path}", value, dim=b.pick((0, 1, -1)), dtype=b.pick((None, None, torch.float64)))


@composite
def _similarity(b: Building) -> None:
    rows, columns = b.size()
    path, options = b.way(
        (f"{_F}cosine_similarity", {"dim": b.pick((0, 1, -1))}),
        (f"{_F}pairwise_distance", {"p": b.pick((2.0, 1.0))}),
        ("torch.cdist", {"p": b.pick((2.0, 1.0))}),
        ("torch.dist", {}),
    )
    b.call(path, b.floats(rows, columns), b.floats(rows, columns), **options)


@composite
def _attention(b: Building) -> None:
    """The attention that the CPU computes by products of matrices."""
    queries, keys = b.size()
    shape = 2, b.pick((1, 2, b.mesh.world_size))
    value = [b.floats(*shape, size, 4) for size in (queries, keys, keys)]
    options: dict[str, object] = {}
    if b.chance(0.4):
        options["is_causal"] = True
    elif b.chance(0.5):
        options["attn_mask"] = b.floats(*b.pick(((queries, keys), (2, 1, queries, keys))))
    if b.chance(0.3):
        options["scale"] = 0.25
    b.call(f"{_F}scaled_dot_product_attention", *value, **options)


@composite
def _layer(b: Building) -> None:
    rows, columns = b.size()
    kind = b.pick(
        ("bilinear", "glu", "pad", "embedding_bag", "one_hot", "unfold", "pixel_shuffle", "prelu", "interpolate")
    )
    if kind == "bilinear":
        b.call(f"{_F}bilinear", b.floats(rows, 2), b.floats(rows, 3), b.floats(columns, 2, 3), b.floats(columns))
    elif kind == "glu":
        b.call(f"{_F}glu", b.floats(rows, 2 * columns), b.pick((-1, 1)))
    elif kind == "pad":
        mode = b.pick(("constant", "constant", "reflect", "replicate", "circular"))
        b.call(f"{_F}pad", b.floats(2, rows, columns), b.pick(((1, 1), (0, 1), (1, 0))), mode)
    elif kind == "embedding_bag":
        weight, ids = b.floats(b.mesh.world_size + 1, columns), b.ids(rows, 2, below=b.mesh.world_size + 1)
        options = {"per_sample_weights": b.floats(rows, 2), "mode": "sum"} if b.chance(0.3) else {}
        b.call(f"{_F}embedding_bag", ids, weight, **(options or {"mode": b.pick(("sum", "mean", "max"))}))
    elif kind == "one_hot":
        b.call(f"{_F}one_hot", b.ids(rows, below=3), 4)
    elif kind == "unfold":
        b.call(f"{_F}unfold", b.floats(2, 2, rows + 1, columns + 1), 2)
    elif kind == "pixel_shuffle":
        b.call(f"{_F}pixel_shuffle", b.floats(2, 4, rows, columns), 2)
    elif kind == "prelu":
        b.call(f"{_F}prelu", b.floats(rows, columns, 2), b.floats(columns))
    else:
        mode = b.pick(("nearest", "linear"))
        b.call(f"{_F}interpolate", b.floats(2, rows, columns), scale_factor=2, mode=mode)


@composite
def _product(b: Building) -> None:
    """Products of tensors that are made of views and matmul."""
    rows, columns = b.size()
    kind = b.pick(("tensordot", "einsum", "kron", "outer", "chain", "cross", "inner", "vecdot", "block_diag", "addbmm"))
    left, right = b.floats(rows, columns), b.floats(rows, columns)
    if kind == "tensordot":
        b.call("torch.tensordot", left, right, b.pick((([0], [0]), ([1], [1]), ([0, 1], [0, 1]))))
    elif kind == "einsum":
        equation = b.pick(("ij,ij->", "ij,ij->j", "ij,kj->ki", "ij,ik->kj", "ij,ij->ij", "ij,kl->il"))
        b.call("torch.einsum", equation, left, right)
    elif kind == "outer":
        b.call("torch.outer", b.floats(rows), b.floats(columns))
    elif kind == "chain":
        b.call("torch.linalg.multi_dot", [left, b.floats(columns, 2), b.floats(2, rows)])
    elif kind == "cross":
        b.call("torch.linalg.cross", b.floats(rows, 3), b.floats(rows, 3))
    elif kind == "addbmm":
        b.call("torch.addbmm", b.floats(rows, 2), b.floats(2, rows, columns), b.floats(2, columns, 2), beta=2, alpha=3)
    else:
        path = {"kron": "torch.kron", "inner": "torch.inner", "vecdot": "torch.linalg.vecdot"}.get(
            kind, "torch.block_diag"
        )
        b.call(path, left, right)


@composite
def _partly_frozen(b: Building) -> None:
    """Layers of which some of the input, the weight and the bias want no gradient."""
    rows, columns = b.size()
    call: tuple[Any, ...]
    kind = b.pick(("conv1d", "conv2d", "conv_transpose1d", "linear", "layer_norm", "group_norm", "batch_norm"))
    if kind.startswith("conv"):
        spatial = 2 if kind == "conv2d" else 1
        kernel = (2,) * spatial
        tensors = [
            b.floats(rows, 4, *(columns + 2,) * spatial),
            b.floats(*((4, 2) if "transpose" in kind else (2, 4)), *kernel),
        ]
        call = (f"{_F}{kind}", *tensors, bias := b.floats(2))
    elif kind == "linear":
        tensors = [b.floats(rows, columns), b.floats(3, columns)]
        call = (f"{_F}{kind}", *tensors, bias := b.floats(3))
    elif kind == "layer_norm":
        tensors = [b.floats(rows, columns), b.floats(columns)]
        call = (f"{_F}{kind}", tensors[0], (columns,), tensors[1], bias := b.floats(columns))
    elif kind == "group_norm":
        tensors = [b.floats(rows, 4, columns), b.floats(4)]
        call = (f"{_F}{kind}", tensors[0], 2, tensors[1], bias := b.floats(4))
    else:
        tensors = [b.floats(rows + 1, columns), b.floats(columns)]
        call = (f"{_F}{kind}", tensors[0], None, None, tensors[1], bias := b.floats(columns), True)
    trained = b.pick(((0,), (1,), (2,), (0, 1), (0, 2), (1, 2)))
    for number, name in enumerate((*tensors, bias)):
        b.tensors[name].requires_grad_(number in trained)
    b.call(*call)
