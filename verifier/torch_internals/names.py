"""Torch's classes and modules without a public name that the verifier uses unchanged."""

from __future__ import annotations

from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.utils import _pytree as pytree

__all__ = ["CustomOpDef", "DTensorSpec", "LocalShardsWrapper", "OpOverload", "OpOverloadPacket", "pytree"]
