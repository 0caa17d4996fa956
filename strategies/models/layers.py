"""A norm and two perceptrons."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["MLP", "RMSNorm", "StackedMLP"]


class RMSNorm(nn.Module):
    """Divide by the root of the mean square over the last dim, and scale (Zhang and Sennrich, 2019, equation 4).

    It calls elementwise ops and a mean, where ``torch.nn.RMSNorm`` calls one op.
    """

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` [..., width], normalised."""
        mean_square = values.pow(2).mean(dim=-1, keepdim=True)
        return values * torch.rsqrt(mean_square + self.eps) * self.weight


class MLP(nn.Module):
    """Two linear layers with a ReLU between them."""

    def __init__(self, width: int = 10, hidden: int = 16, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.relu = nn.ReLU()
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the result for ``values``, of the same shape [..., width]."""
        result: torch.Tensor = self.down(self.relu(self.up(values)))
        return result


class StackedMLP(nn.Module):
    """Several :class:`MLP` in a row."""

    def __init__(self, depth: int = 2, width: int = 10, hidden: int = 16, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP(width, hidden, bias) for _ in range(depth))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the result for ``values``, of the same shape [..., width]."""
        for layer in self.layers:
            values = layer(values)
        return values
