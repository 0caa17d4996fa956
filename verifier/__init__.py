"""Proves or refutes the sharding strategies of PyTorch's DTensor."""

__version__ = "0.1.0"
