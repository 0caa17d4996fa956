"""What ``fully_shard`` does with weights and their gradients, wrong in one way each; every function puts one in."""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


def divisors_forgotten() -> None:
    """``set_gradient_divide_factor`` does nothing."""
    FSDPModule.set_gradient_divide_factor = lambda self, factor: None  # type: ignore[method-assign]


def shared_gradients_not_reduced() -> None:
    """The gradient of a weight that ranks share is that of each rank."""
    FSDPParam._get_grad_inner_tensor = lambda self, gradient: getattr(gradient, "_local_tensor", gradient)  # type: ignore[method-assign]
