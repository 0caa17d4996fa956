"""Write the generated parts of the documents: ``python docs/generate.py``.

``docs/reference/commands.md`` is made from the program's own help. The map of rooms in ``ARCHITECTURE.md`` is made from
the table of floors in ``tests/unit/test_structure.py`` and the first line of each room's docstring.
``docs/reference/causes.md`` is made from the baseline and the installed remedies. A test compares all three.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ROOT / "docs" / "reference" / "commands.md"
CAUSES = ROOT / "docs" / "reference" / "causes.md"
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- the map of rooms: python docs/generate.py -->\n", "<!-- the end of the map -->\n"

INTRODUCTION = """\
# Commands

<!-- written by python docs/generate.py -->

Every command and option, as `python -m verifier COMMAND --help` prints them. [runs.md](runs.md) explains what patterns,
meshes and profiles select, and the [exit status](runs.md#exit-status).
"""

CAUSES_INTRODUCTION = """\
# Known causes, and what to change in torch

<!-- written by python docs/generate.py -->

The causes in `reports/baseline.toml`, each with its remedy as a patch in words. `python -m verifier replay FINGERPRINT`
runs the smallest finding of a cause. [Causes and remedies](../explanations/causes.md) explains how they are used.
"""

VERSIONS_INTRODUCTION = """\
## Versions of torch

What the script of each cause did under each version, by `python -m verifier bisect --update`. A script that raises
another error than the cause's does not tell: the call may be refused plainly now. Of such causes, other trials told.

| torch | fail | do not fail | not told |
| --- | --- | --- | --- |
"""


def commands_page() -> str:
    """Return the text of ``docs/reference/commands.md``."""
    from verifier.cli.app import app  # loads torch

    group: Any = typer.main.get_command(app)
    root = group.make_context("python -m verifier", [], resilient_parsing=True)
    parts = [INTRODUCTION, f"{group.help}\n\n{group.epilog}\n"]
    for name, command in group.commands.items():
        context = command.make_context(name, [], parent=root, resilient_parsing=True)
        arguments = [one.metavar for one in command.params if one.param_type_name == "argument"]
        usage = " ".join([context.command_path, "[OPTIONS]", *arguments])
        rows = [f"| `{_cell(names)}` | {_cell(text)} |" for names, text in _help(command, context)]
        table = "\n".join(["| argument or option | |", "| --- | --- |", *rows])
        parts.append(f"## {name}\n\n{command.help}\n\n```text\n{usage}\n```\n\n{table}\n")
    return "\n".join(parts)


def _help(command: Any, context: Any) -> Iterator[tuple[str, str]]:
    """Yield each argument and option with its help, as the program prints them on a page of any width."""
    for parameter in command.params:
        if record := parameter.get_help_record(context):
            names, text = record
            if parameter.param_type_name == "argument":
                names = parameter.metavar
            yield re.sub(r"<list\[(\w+)\]>", r"<\1>", names), re.sub(r"\[default: \((.*)\)\]", r"[default: \1]", text)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def causes_page() -> str:
    """Return the text of ``docs/reference/causes.md``."""
    from verifier.execution.remedies import installed_remedies  # loads torch
    from verifier.gate.baseline import load_baseline

    remedies = installed_remedies()
    causes = sorted(load_baseline(ROOT / "reports" / "baseline.toml").causes, key=lambda one: one.remedy)
    parts = [CAUSES_INTRODUCTION, _versions(causes)]
    for cause in causes:
        places = "; ".join(f"`{place}`" for place in cause.where)
        smallest = f"`{cause.fingerprint}`, {cause.verdict} in `{cause.op}` on mesh {cause.mesh}"
        parts.append(
            f"## {cause.remedy}\n\n{cause.title}. {cause.reason}\n\n- Patch: {remedies[cause.remedy].patch}.\n"
            f"- Where: {places}.\n- Smallest finding: {smallest}.\n"
            f"- Fails under torch {', '.join(cause.torch)}{_mended(cause.mended)}.\n"
        )
    return "\n".join(parts)


def _mended(versions: Sequence[str]) -> str:
    return f"; does not fail under {', '.join(versions)}" if versions else ""


def _versions(causes: Sequence[Any]) -> str:
    """Return the table of versions: how many causes fail there, and which do not."""
    from verifier.core.wording import version_key

    rows = []
    for version in sorted({one for cause in causes for one in (*cause.torch, *cause.mended)}, key=version_key):
        fails = sum(version in cause.torch for cause in causes)
        mended = [cause.remedy for cause in causes if version in cause.mended]
        told = {cause.remedy for cause in causes if version in (*cause.torch, *cause.mended)}
        unknown = [cause.remedy for cause in causes if cause.remedy not in told]
        names = [f"{len(each)}: {', '.join(each)}" if each else "0" for each in (mended, unknown)]
        rows.append(f"| {version} | {fails} | {' | '.join(names)} |\n")
    return VERSIONS_INTRODUCTION + "".join(rows)


def map_of_rooms() -> str:
    """Return the rooms of ``verifier`` as a table, from the top floor down."""
    floors: tuple[tuple[str, ...], ...] = _module(ROOT / "tests" / "unit" / "test_structure.py").FLOORS
    rows = [
        f"| {number} | `{room}` | {_cell(_first_line(room))} |"
        for number, rooms in reversed(list(enumerate(floors, 1)))
        for room in rooms
    ]
    return "\n".join(["| floor | room | what it is for |", "| --- | --- | --- |", *rows, ""])


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("floors", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _first_line(room: str) -> str:
    path = ROOT / "verifier" / ("" if room == "verifier" else room.replace(".", "/"))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    assert docstring, f"{file} has no docstring"
    return docstring.splitlines()[0].replace("``", "`")


def with_map(text: str) -> str:
    """Return the text of ``ARCHITECTURE.md`` with the map of rooms as it is now."""
    assert re.search(f"{BEGIN}.*{END}", text, re.DOTALL), f"no place for the map in {ARCHITECTURE}"
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{map_of_rooms()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    COMMANDS.write_text(commands_page(), encoding="utf-8")
    CAUSES.write_text(causes_page(), encoding="utf-8")
    ARCHITECTURE.write_text(with_map(ARCHITECTURE.read_text(encoding="utf-8")), encoding="utf-8")
