"""Commands of other packages, in the entry-point group ``dtensor_verifier.commands``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["COMMANDS", "Command"]

COMMANDS = "dtensor_verifier.commands"


@dataclass(frozen=True)
class Command:
    """A command by its ``name``; ``function`` takes its options and arguments as Typer reads them."""

    name: str
    function: Callable[..., None]
