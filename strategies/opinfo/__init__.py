"""The source of calls "opinfo": what torch's own test database of ops dispatches to."""

from __future__ import annotations

from strategies.opinfo.source import OpInfoSource

__all__ = ["SOURCE", "OpInfoSource"]

SOURCE = OpInfoSource()
