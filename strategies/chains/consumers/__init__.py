"""What takes a pending or masked result: every kind of op, by name."""

from __future__ import annotations

from strategies.chains.consumers import pointwise, products, reductions, selections, shapes, writes
from strategies.chains.consumers.table import CONSUMERS, Consumer

__all__ = ["CONSUMERS", "Consumer", "pointwise", "products", "reductions", "selections", "shapes", "writes"]
