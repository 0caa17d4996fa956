"""Losses that ranks can import."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

__all__ = ["next_token_loss", "squared_error"]


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of ``logits`` [batch, positions, vocabulary] against ``tokens`` [batch, positions].

    ``tokens`` has the next token of each position.
    """
    return cross_entropy(logits.flatten(0, 1), tokens.flatten())


def squared_error(output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the mean of the squared differences."""
    return (output - wanted).square().mean()
