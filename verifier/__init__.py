"""Proves or refutes the sharding strategies of PyTorch's DTensor on real meshes.

What is listed here is what users may build on; docs/reference/public.md describes it. Everything else may change.
A name is loaded when it is first asked for, so that ``import verifier`` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_PUBLIC = {
    "Command": "verifier.cli.options",
    "DTensorConverter": "verifier.execution.converter",
    "DrawContext": "verifier.planning.families",
    "Family": "verifier.planning.families",
    "MeshSpec": "verifier.core.case",
    "ModuleError": "verifier.modules.outcomes",
    "ModuleVerification": "verifier.modules.outcomes",
    "NarrowFamily": "verifier.planning.families",
    "OpCase": "verifier.core.case",
    "ReplicatedFamily": "verifier.planning.families",
    "Sample": "verifier.rules.samples",
    "SampleOptions": "verifier.rules.samples",
    "SampleSource": "verifier.rules.samples",
    "Target": "verifier.rules.samples",
    "Trial": "verifier.core.case",
    "Verdict": "verifier.core.verdict",
    "VerdictKind": "verifier.core.verdict",
    "Verification": "verifier.calls.result",
    "VerificationError": "verifier.calls.result",
    "asks": "verifier.programs",
    "declares": "verifier.planning.boundary",
    "mean_square": "verifier.modules.verify",
    "moves": "verifier.programs",
    "samples": "verifier.planning.own_samples",
    "simplifies": "verifier.programs",
    "sum_of_squares": "verifier.modules.verify",
    "tell_apart_by": "verifier.programs",
    "verify": "verifier.calls.plain",
    "verify_module": "verifier.modules.verify",
}
"""Each public name, and the module that defines it."""

if TYPE_CHECKING:
    from verifier.calls.plain import verify
    from verifier.calls.result import Verification, VerificationError
    from verifier.cli.options import Command
    from verifier.core.case import MeshSpec, OpCase, Trial
    from verifier.core.verdict import Verdict, VerdictKind
    from verifier.execution.converter import DTensorConverter
    from verifier.modules.outcomes import ModuleError, ModuleVerification
    from verifier.modules.verify import mean_square, sum_of_squares, verify_module
    from verifier.planning.boundary import declares
    from verifier.planning.families import DrawContext, Family, NarrowFamily, ReplicatedFamily
    from verifier.planning.own_samples import samples
    from verifier.programs import asks, moves, simplifies, tell_apart_by
    from verifier.rules.samples import Sample, SampleOptions, SampleSource, Target

__all__ = [
    "Command",
    "DTensorConverter",
    "DrawContext",
    "Family",
    "MeshSpec",
    "ModuleError",
    "ModuleVerification",
    "NarrowFamily",
    "OpCase",
    "ReplicatedFamily",
    "Sample",
    "SampleOptions",
    "SampleSource",
    "Target",
    "Trial",
    "Verdict",
    "VerdictKind",
    "Verification",
    "VerificationError",
    "__version__",
    "asks",
    "declares",
    "mean_square",
    "moves",
    "samples",
    "simplifies",
    "sum_of_squares",
    "tell_apart_by",
    "verify",
    "verify_module",
]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'verifier' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_PUBLIC[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
