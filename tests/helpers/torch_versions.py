"""Marks for tests of what only some versions of torch do, each with the reason."""

from __future__ import annotations

import pytest
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

__all__ = ["needs_torch", "torch_is"]


def torch_is(versions: str) -> bool:
    """Return whether the installed torch is among ``versions``, as ``<2.14``."""
    return Version(Version(torch.__version__).base_version) in SpecifierSet(versions)


def needs_torch(versions: str, reason: str) -> pytest.MarkDecorator:
    """Skip a test under all other versions of torch, for a ``reason``: what these do instead."""
    return pytest.mark.skipif(not torch_is(versions), reason=f"only torch {versions}: {reason}")
