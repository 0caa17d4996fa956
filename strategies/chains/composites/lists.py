"""Functions of lists of tensors."""

from __future__ import annotations

from strategies.chains.building import Building
from strategies.chains.composites.table import composite


def _list(b: Building, count: int = 3) -> list[str]:
    """Add tensors of different shapes, as the parameters of a model."""
    shapes = [b.size(), (b.columns,), (b.rows, 2), ()]
    names = [b.floats(*shape) for shape in shapes[:count]]
    for name in names:
        b.tensors[name].requires_grad_(False)
    return names


@composite
def _foreach(b: Building) -> None:
    """Functions of lists, whose tensors have placements of their own."""
    count = b.pick((2, 3))
    values = _list(b, count)
    others = [b.like(name) for name in values]
    for name in others:
        b.tensors[name].requires_grad_(False)
    name, *rest = b.way(
        ("_foreach_add", others),
        ("_foreach_add", 2),
        ("_foreach_mul", others),
        ("_foreach_mul", 3),
        ("_foreach_sub", others),
        ("_foreach_div", 2.0),
        ("_foreach_neg",),
        ("_foreach_abs",),
        ("_foreach_norm", b.pick((2, 1, float("inf")))),
        ("_foreach_lerp", others, 0.25),
        ("_foreach_addcmul", others, others, 2),
        ("_foreach_maximum", others),
        ("_foreach_pow", 2),
        ("_foreach_clamp_min", 1),
        ("_foreach_max",),
        ("_foreach_sign",),
    )
    made = b.call(f"torch.{name}", values, *rest)
    if name == "_foreach_norm":
        count = len(values)
        b.call("torch.linalg.vector_norm", b.call("torch.stack", [f"{made}.{number}" for number in range(count)]), 2.0)


@composite
def _foreach_in_place(b: Building) -> None:
    values = _list(b, b.pick((2, 3)))
    others = [b.like(name) for name in values]
    for name in others:
        b.tensors[name].requires_grad_(False)
    copies = [b.call("torch.clone", name) for name in values]
    name, *rest = b.way(
        ("_foreach_add_", others),
        ("_foreach_add_", 2),
        ("_foreach_mul_", 3),
        ("_foreach_mul_", others),
        ("_foreach_div_", 2.0),
        ("_foreach_lerp_", others, 0.25),
        ("_foreach_addcdiv_", others, others, 2),
        ("_foreach_addcmul_", others, others, 2),
        ("_foreach_zero_",),
        ("_foreach_copy_", others),
        ("_foreach_neg_",),
    )
    b.call(f"torch.{name}", copies, *rest)
