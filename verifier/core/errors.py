"""Errors that end a command with one line and exit status 2."""

from __future__ import annotations

__all__ = ["ReportedError", "SamplesError"]


class ReportedError(RuntimeError):
    """Something outside the verifier went wrong, such as a full disk; the message says what."""


class SamplesError(ValueError):
    """Samples that a user declared are no calls of their op; the message says which, and why."""
