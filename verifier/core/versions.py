"""The versions of the packages that a result depends on."""

from __future__ import annotations

import platform
from importlib.metadata import version

import torch

from verifier import __version__

__all__ = [
    "versions",
]


def versions() -> dict[str, str]:
    """Return the versions of everything that a result depends on."""
    return {
        "dtensor-verifier": __version__,
        "torch": str(torch.__version__),
        "hypothesis": version("hypothesis"),
        "python": platform.python_version(),
    }
