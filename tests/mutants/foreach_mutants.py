"""What goes wrong with lists of tensors: a rule that is wrong for each pair, and calls that go wrong for one of them.

A rank imports this file by the dotted path of a function: one that registers rules, or one in the place of a call.
"""

from __future__ import annotations

import torch
from rule_strategies import SUM, Rule, per_mesh_dim, pointwise
from torch.distributed.tensor import DTensor

Tensors = list[torch.Tensor]
MULTIPLY, SCALE = torch.ops.aten._foreach_mul.List, torch.ops.aten._foreach_mul.Tensor


def parts_multiplied() -> None:
    """Products of parts are called parts of the product."""

    def rules(left: torch.Tensor, right: torch.Tensor) -> list[Rule]:
        return [*pointwise(left, right), [SUM, SUM, SUM]]

    per_mesh_dim(MULTIPLY, rules)


def first_factor_for_all(left: Tensors, right: Tensors) -> Tensors:
    """Every DTensor is multiplied by what the first one is, as far as it fits."""
    if isinstance(left[0], DTensor):
        right = [factor if factor.shape != right[0].shape else right[0] for factor in right]
    return MULTIPLY(left, right)


def in_another_order(left: Tensors, right: Tensors) -> Tensors:
    made = MULTIPLY(left, right)
    return made[::-1] if isinstance(left[0], DTensor) else made


def leaves_the_last_out(tensors: Tensors, others: Tensors) -> None:
    """The last DTensor of the list is not written to."""
    count = len(tensors) - isinstance(tensors[0], DTensor)
    torch.ops.aten._foreach_add_.List(tensors[:count], others[:count])


def part_of_the_factor(tensors: Tensors, factor: torch.Tensor) -> Tensors:
    """The last DTensor is multiplied by the rank's part of a factor that all share."""
    made, last = SCALE(tensors, factor), tensors[-1]
    if isinstance(factor, DTensor) and isinstance(last, DTensor):
        made[-1] = DTensor.from_local(last.to_local() * factor.to_local(), factor.device_mesh, last.placements)
    return made
