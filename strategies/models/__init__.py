"""Small models of the kind that DTensor shards, and their plans; see ``verifier.modules.verify.verify_module``.

Each plan is a function ``plan(model, mesh)``. On a mesh of one dim all ranks are tensor parallel. The mesh of a
``data_parallel`` plan has the mesh dims ``dp`` and ``tp``.
"""

from strategies.models.layers import MLP, RMSNorm, StackedMLP
from strategies.models.losses import next_token_loss, squared_error
from strategies.models.plans import (
    data_parallel,
    embedding_parallel,
    sequence_parallel,
    sequence_parallel_mlp,
    sequence_parallel_norm,
    sequence_plan,
    tensor_parallel,
    tensor_parallel_mlp,
)
from strategies.models.transformer import Attention, Block, FeedForward, Transformer, TransformerSize

__all__ = [
    "MLP",
    "Attention",
    "Block",
    "FeedForward",
    "RMSNorm",
    "StackedMLP",
    "Transformer",
    "TransformerSize",
    "data_parallel",
    "embedding_parallel",
    "next_token_loss",
    "sequence_parallel",
    "sequence_parallel_mlp",
    "sequence_parallel_norm",
    "sequence_plan",
    "squared_error",
    "tensor_parallel",
    "tensor_parallel_mlp",
]
