"""The command-line options that several commands share, and their values."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from verifier.core.case import DEFAULT_MESHES, MeshSpec
from verifier.core.logs import LogLevel
from verifier.core.wording import shown_path, unknown_name
from verifier.records.files import DEFAULT_REPORTS

__all__ = [
    "COMMANDS",
    "DEFAULT_BASELINE",
    "AskedImports",
    "AskedMeshes",
    "AskedPatterns",
    "BackendOption",
    "BaselineOption",
    "BisectFormat",
    "By",
    "Command",
    "DeriveFormat",
    "DeriveTarget",
    "Detail",
    "Device",
    "DryRun",
    "Dtypes",
    "FailOn",
    "Format",
    "FormatOption",
    "GraphFormat",
    "Imports",
    "Jobs",
    "LogLevelOption",
    "MaxExamples",
    "Meshes",
    "Out",
    "Patterns",
    "Profile",
    "Quiet",
    "RankMemory",
    "Seed",
    "TimeLimit",
    "TorchPlanner",
    "Verbose",
    "check_imports",
    "checked_meshes",
    "typed",
]

DEFAULT_BASELINE = DEFAULT_REPORTS / "baseline.toml"
DRAWN_UNASKED = ("chains", "embedding", "redistribution")
"""The families that a run without a pattern draws. They are listed here, because loading all families takes seconds."""


class Detail(StrEnum):
    """How much a command prints: what is new and the last line, a screen, or everything."""

    QUIET = "quiet"
    SCREEN = "screen"
    FULL = "full"

    @classmethod
    def of(cls, quiet: bool, verbose: bool) -> Detail:
        if quiet and verbose:
            raise ValueError("-q prints the least and -v the most; give one of them")
        return cls.QUIET if quiet else cls.FULL if verbose else cls.SCREEN


def typed(context: typer.Context, name: str) -> bool:
    """Return whether the parameter ``name`` stands in the command line, and not in a file or the environment."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


class FailOn(StrEnum):
    WRONG = "wrong"
    MISSING = "missing"
    LOST = "lost"
    REGRET = "regret"

    @staticmethod
    def parse(text: str, *known: FailOn, typed: bool = True) -> set[FailOn]:
        """Return what ``--fail-on`` names, of what is ``known`` to the command.

        Unless it was ``typed``, it is a setting for several commands, and kinds of other commands are left out.
        """
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in known and (typed or name not in [*FailOn]):
                raise ValueError(f"--fail-on {text}: {unknown_name('kind', name, [str(one) for one in known])}")
        return {FailOn(name) for name in names if name in known} or {FailOn.WRONG}


class BisectFormat(StrEnum):
    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"


class GraphFormat(StrEnum):
    TEXT = "text"
    JSON = "json"
    GRAPHML = "graphml"
    DOT = "dot"
    MERMAID = "mermaid"
    SVG = "svg"


class By(StrEnum):
    OP = "op"
    PAIR = "pair"
    EDGE = "edge"


class DeriveFormat(StrEnum):
    """What ``derive`` prints on stdout."""

    TEXT = "text"
    JSON = "json"


class DeriveTarget(StrEnum):
    """In which of DTensor's ways ``derive`` registers a strategy."""

    SINGLE_DIM = "single-dim"
    REGISTER_SHARDING = "register-sharding"
    LOCAL_MAP = "local-map"


COMMANDS = "dtensor_verifier.commands"
"""The entry-point group of commands of other packages."""


@dataclass(frozen=True)
class Command:
    """A command by its ``name``; ``function`` takes its options and arguments as Typer reads them."""

    name: str
    function: Callable[..., None]


class TorchPlanner(StrEnum):
    DEFAULT = "default"
    GREEDY = "greedy"
    GRAPH = "graph"


class Format(StrEnum):
    TEXT = "text"
    JSON = "json"
    GITHUB = "github"
    JUNIT = "junit"
    SARIF = "sarif"
    MARKDOWN = "markdown"


def _folder(text: str | Path) -> Path | None:
    return Path(text) if str(text) else None  # Path("") would be this folder


def _refuse_no_folder(folder: Path | None) -> Path:
    if folder is None:
        raise ValueError("--out '' names no folder; give a path, as . for this one")
    return folder


Patterns = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FAMILY_OR_OP_GLOB]...",
        help=f"What to verify; if none is given, the families {', '.join(DRAWN_UNASKED)}.",
        show_default=False,
    ),
]


def checked_meshes(texts: list[str] | None) -> list[str] | None:
    """Check meshes before torch is loaded, which takes seconds; raises a ValueError for one that is malformed."""
    for text in texts or ():
        MeshSpec.parse(text)
    return texts


def _named_imports(names: list[str] | None) -> list[str] | None:
    """Refuse an option that was taken for the name of an import; name each file as records and baselines do."""
    for name in names or ():
        if not name or name.startswith("-"):
            raise ValueError(f"--import {name or repr(name)}: name a module or a file")
    return names and [*dict.fromkeys(map(_one_spelling, names))]


def check_imports(names: Iterable[str] | None) -> None:
    """Refuse a file that is not there before torch is loaded, which takes seconds; raises a ValueError."""
    for name in names or ():
        if name.endswith(".py") and not Path(name).is_file():
            raise ValueError(f"--import {name}: there is no file {Path(name).absolute()}")


def _one_spelling(name: str) -> str:
    """Return one path for all spellings of a file's path, from this folder on if the file is in there."""
    if not name.endswith(".py") and not Path(name).is_file():
        return name
    path = os.path.normpath(name)
    return shown_path(path) if os.path.isabs(path) else path


Meshes = Annotated[
    list[str] | None,
    typer.Option(
        "--mesh",
        help="Mesh as 4, 2x2, 2x2+flat or simulated:8; repeatable.",
        callback=checked_meshes,
        show_default=" ".join(DEFAULT_MESHES),
    ),
]
BackendOption = Annotated[
    str | None, typer.Option("--backend", help="simulated, gloo or nccl, for each --mesh without one.")
]
AskedPatterns = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FAMILY_OR_OP_GLOB]...", help="What to judge; everything that was recorded if none is given.",
        show_default=False,
    ),
]  # fmt: skip
AskedMeshes = Annotated[
    list[str] | None,
    typer.Option(
        "--mesh",
        help="Mesh that has to have evidence, as 2x2; repeatable.",
        callback=checked_meshes,
        show_default="all recorded",
    ),
]
AskedImports = Annotated[
    list[str] | None,
    typer.Option(
        "--import", help="What the runs to judge imported; repeatable. A run that is made imports it.",
        callback=_named_imports, show_default="all recorded",
    ),
]  # fmt: skip
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
Dtypes = Annotated[list[str] | None, typer.Option("--dtype", help="Floating dtypes, as float32,bfloat16.")]
Profile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        help="How much to try: own, dev, ci, nightly or gpu.",
        show_default="dev, or own with --import alone",
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Fixes everything that is drawn.")]
MaxExamples = Annotated[int | None, typer.Option("--max-examples", help="Cases per mesh; overrides the profile's.")]
TimeLimit = Annotated[
    float | None,
    typer.Option("--time-limit", help="Seconds for the whole run, shared by the meshes; overrides the profile's."),
]
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import", callback=_named_imports, help="Module or file to run first, here and in every rank; repeatable."
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs", help="Trials at a time, each on ranks of its own.", show_default="one for each core, at most 8"
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        "--out", metavar="PATH", parser=_folder, callback=_refuse_no_folder, help="Folder of the recorded runs."
    ),
]
FormatOption = Annotated[Format, typer.Option("--format", help="What to print on stdout.")]
RankMemory = Annotated[
    str | None,
    typer.Option(
        "--rank-memory",
        metavar="SIZE",
        help="What a rank may allocate, as 4GiB; beyond it, its trial fails as out of memory.",
        show_default="no limit",
    ),
]
LogLevelOption = Annotated[
    LogLevel,
    typer.Option("--log-level", help="Log lines on stderr from this level on; those of a rank begin with its number."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print what is new and the last line, and no progress.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print every op, finding and reason.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be tried and about how long it takes; try nothing.")
]
BaselineOption = Annotated[Path, typer.Option("--baseline", help="File of the known findings.")]
