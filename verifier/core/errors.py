"""Errors that end a command with one line and exit status 2."""

from __future__ import annotations

__all__ = ["ReportedError"]


class ReportedError(RuntimeError):
    """Something outside the verifier went wrong, such as a full disk; the message says what."""
