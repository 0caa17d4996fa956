"""Marks for tests of what only some versions of torch do, each with the reason."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from verifier.gate.baseline import load_baseline

__all__ = ["HERE", "mended_here", "needs_torch", "torch_is"]

HERE = torch.__version__.partition("+")[0]
"""The version of torch, without a local suffix."""


def torch_is(versions: str) -> bool:
    """Return whether the installed torch is among ``versions``, as ``<2.14``."""
    return Version(Version(torch.__version__).base_version) in SpecifierSet(versions)


def needs_torch(versions: str, reason: str) -> pytest.MarkDecorator:
    """Skip a test under all other versions of torch, for a ``reason``: what these do instead."""
    return pytest.mark.skipif(not torch_is(versions), reason=f"only torch {versions}: {reason}")


@cache
def mended_here() -> frozenset[str]:
    """Return the remedies of the causes that torch itself has mended in the installed version."""
    baseline = load_baseline(Path(__file__).parents[2] / "reports" / "baseline.toml")
    return frozenset(cause.remedy for cause in baseline.causes if HERE in cause.mended)
