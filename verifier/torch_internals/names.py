"""Torch's classes and modules without a public name that the verifier uses unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

__all__ = ["CustomOpDef", "DTensorSpec", "LocalShardsWrapper", "OpOverload", "OpOverloadPacket", "pytree"]


def __getattr__(name: str) -> object:
    if name == "LocalShardsWrapper":  # loads torch.distributed.checkpoint, which every process would pay for
        from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

        return LocalShardsWrapper
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
