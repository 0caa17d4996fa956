"""A small causal Transformer with pre-norm blocks, whose linear layers can be sharded by heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from strategies.models.layers import RMSNorm

__all__ = ["Attention", "Block", "FeedForward", "Transformer", "TransformerSize"]


@dataclass(frozen=True)
class TransformerSize:
    """Sizes and options of a :class:`Transformer`.

    Attributes
    ----------
    width
        Features of each position, shared by ``heads`` heads.
    dropout
        Probability that a feature is dropped after attention, after feed-forward and in the embeddings.
    tied
        Whether the table of the tokens is also the weight of the output layer.
    checkpointed
        Whether the backward pass computes each block's activations again.
    rms_norm
        Whether norms are :class:`~strategies.models.layers.RMSNorm` instead of ``LayerNorm``.
    """

    vocabulary: int = 12
    positions: int = 8
    width: int = 16
    heads: int = 4
    layers: int = 2
    dropout: float = 0.0
    tied: bool = True
    checkpointed: bool = False
    rms_norm: bool = False

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} cannot be shared by {self.heads} heads")


class Attention(nn.Module):
    """Causal self-attention. The linear layers may return any number of heads, as they do if sharded."""

    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        self.features = size.width // size.heads
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key = nn.Linear(size.width, size.width, bias=False)
        self.value = nn.Linear(size.width, size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` [batch, positions, width] after attention, of the same shape."""
        query, key, value = (self._heads(layer(values)) for layer in (self.query, self.key, self.value))
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        result: torch.Tensor = self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return result

    def _heads(self, values: torch.Tensor) -> torch.Tensor:
        """Return [batch, heads, positions, features]; under a plan, the heads of this rank."""
        return values.view(*values.shape[:2], -1, self.features).transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        self.up = nn.Linear(size.width, 4 * size.width)
        self.gelu = nn.GELU()
        self.down = nn.Linear(4 * size.width, size.width)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the result for ``values``, of the same shape [batch, positions, width]."""
        result: torch.Tensor = self.dropout(self.down(self.gelu(self.up(values))))
        return result


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and with a residual connection."""

    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        norm = RMSNorm if size.rms_norm else nn.LayerNorm
        self.attention_norm = norm(size.width)
        self.attention = Attention(size)
        self.feed_forward_norm = norm(size.width)
        self.feed_forward = FeedForward(size)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` [batch, positions, width] plus the results of attention and feed-forward."""
        values = values + self.attention(self.attention_norm(values))
        result: torch.Tensor = values + self.feed_forward(self.feed_forward_norm(values))
        return result


class Transformer(nn.Module):
    """Embeddings of tokens and positions, blocks, a norm and an output layer.

    >>> Transformer(TransformerSize(vocabulary=5))(torch.tensor([[0, 4, 2]])).shape
    torch.Size([1, 3, 5])
    """

    def __init__(self, size: TransformerSize | None = None) -> None:
        super().__init__()
        self.size = size = size or TransformerSize()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.positions, size.width)
        self.dropout = nn.Dropout(size.dropout)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = RMSNorm(size.width) if size.rms_norm else nn.LayerNorm(size.width)
        self.output = nn.Linear(size.width, size.vocabulary, bias=False)
        if size.tied:
            self.output.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, positions, vocabulary] for the token after each of ``tokens`` [batch, positions]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        values = self.dropout(self.tokens(tokens) + self.positions(places))
        for layer in self.layers:
            values = checkpoint(layer, values, use_reentrant=False) if self.size.checkpointed else layer(values)
        result: torch.Tensor = self.output(self.norm(values))
        return result
