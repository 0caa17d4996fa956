"""Configuration: ``[tool.dtensor-verifier]`` in this folder's pyproject.toml, and environment variables.

The command line wins over the environment, the environment over the file, and the file over the defaults. A key is an
option without its dashes; ``ops`` stands for the arguments. A table with the name of a command is for that one alone.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typer.core import TyperArgument, TyperGroup, TyperOption

from verifier.core.wording import did_you_mean, one_line

__all__ = ["Configuration", "Setting", "configured", "settings"]

FILE = Path("pyproject.toml")
TABLE = "dtensor-verifier"
PREFIX = "DTENSOR_VERIFIER"
Parameter = TyperArgument | TyperOption
_BY_HAND = ("help", "resume", "update", "fresh", "script", "shard", "version", "changed-since", "dry-run")
"""Options that say what one command is to do now."""


@dataclass(frozen=True)
class Configuration:
    """The values of the file, by command and name of the parameter, and the line of each."""

    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lines: Mapping[tuple[str, str], int] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """A value that holds for an option of a command, and its source."""

    command: str
    name: str
    value: object
    source: str


def configured(group: TyperGroup) -> Configuration:
    """Return the configuration of this folder for the commands of ``group``, which then read the environment, too.

    Raises
    ------
    ValueError
        If the file is no TOML, has an unknown key, or has a value of another type than the option; with file and line.
    """
    for name, command in group.commands.items():
        for key, parameter in _keys(command).items():
            if isinstance(parameter, TyperOption):
                parameter.envvar = list(_variables(name, key))
                parameter.show_envvar = False
    return _read(group)


def settings(group: TyperGroup, configuration: Configuration) -> Iterator[Setting]:
    """Yield what holds for each option of each command, and from where."""
    for name, command in sorted(group.commands.items()):
        for key, parameter in _keys(command).items():
            variable = next((one for one in _variables(name, key) if os.environ.get(one)), "")
            line = configuration.lines.get((name, str(parameter.name)))
            if variable and isinstance(parameter, TyperOption):
                yield Setting(name, key, os.environ[variable], f"environment {variable}")
            elif line is not None:
                yield Setting(name, key, configuration.values[name][str(parameter.name)], f"{FILE}:{line}")
            else:
                shown = getattr(parameter, "show_default", None)
                value = shown if isinstance(shown, str) else parameter.default
                yield Setting(name, key, "" if value is None or callable(value) else value, "default")


def _variables(command: str, key: str) -> tuple[str, str]:
    """Return the environment variables of an option: that of the command first, then that of all commands."""
    option = key.upper().replace("-", "_")
    return f"{PREFIX}_{command.upper()}_{option}", f"{PREFIX}_{option}"


def _keys(command: object) -> dict[str, Parameter]:
    """Return the parameters of a command that can be configured, by key."""
    keys = {}
    for parameter in getattr(command, "params", ()):
        key = "ops" if isinstance(parameter, TyperArgument) else max(parameter.opts, key=len).lstrip("-")
        if key not in _BY_HAND and (key != "ops" or parameter.name == "patterns"):
            keys[key] = parameter
    return keys


# ---------------------------------------------------------------------------------------------------------------- file
def _read(group: TyperGroup) -> Configuration:
    try:
        text = FILE.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return Configuration()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(one_line(f"{FILE}: cannot be read: {error}")) from error
    if TABLE not in text:  # other tools' files are theirs to judge
        return Configuration()
    try:
        content = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(one_line(f"{FILE}: not TOML: {error}")) from error
    tools = content.get("tool")
    table = tools.get(TABLE) if isinstance(tools, dict) else None
    if table is None:
        return Configuration()
    if not isinstance(table, dict):
        raise ValueError(f"{FILE}:{_line(text, TABLE)}: tool.{TABLE} is {one_line(repr(table))}, not a table")
    return _checked(group, table, text)


def _checked(group: TyperGroup, table: dict[str, Any], text: str) -> Configuration:
    values: dict[str, dict[str, Any]] = {name: {} for name in group.commands}
    lines: dict[tuple[str, str], int] = {}
    of_command = {name: _keys(command) for name, command in group.commands.items()}
    own = [item for item in table.items() if item[0] in of_command and isinstance(item[1], dict)]
    shared = [item for item in table.items() if item not in own]
    everything = dict.fromkeys(key for keys in of_command.values() for key in keys)
    places = [(tuple(of_command), f"tool.{TABLE}", shared, [*everything, *of_command])]
    places += [((name,), f"tool.{TABLE}.{name}", [*held.items()], [*of_command[name]]) for name, held in own]
    for commands, where, items, known in places:
        for key, value in items:
            line = _line(text, key, where)
            if key not in known or key not in everything:
                hint = did_you_mean(key, known) or f"; keys are {', '.join(known)}"
                raise ValueError(one_line(f"{FILE}:{line}: unknown key {key!r} in [{where}]{hint}"))
            taken = [name for name in commands if key in of_command[name]]
            if isinstance(value, list) and len(commands) > 1:  # of the commands, some may take one such value only
                taken = [name for name in taken if _takes_several(of_command[name][key])] or taken
            for name in taken:
                parameter = of_command[name][key]
                values[name][str(parameter.name)] = _value(parameter, value, f"{FILE}:{line}: {key}")
                lines[name, str(parameter.name)] = line
    return Configuration({name: held for name, held in values.items() if held}, lines)


def _takes_several(parameter: Parameter) -> bool:
    return parameter.nargs != 1 or bool(parameter.multiple)


def _value(parameter: Parameter, value: object, where: str) -> object:
    """Return a value as click takes it from a command line, or refuse it."""
    if getattr(parameter, "is_flag", False):
        if isinstance(value, bool):
            return value
        raise ValueError(one_line(f"{where} is {value!r}; it must be true or false"))
    several = _takes_several(parameter)
    items = value if several and isinstance(value, list) else [value]
    if not all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in items):
        wanted = "a text or a list of texts" if several else "a text or a number"
        raise ValueError(one_line(f"{where} is {value!r}; it must be {wanted}"))
    texts = [str(item) for item in items]
    return texts if several else texts[0]


def _line(text: str, key: str, table: str = "") -> int:
    """Return the number of the line on which ``key`` of a table is set; that of the table, or 1, if it is not found."""
    found, current = 1, ""
    for number, line in enumerate(text.splitlines(), 1):
        if head := re.match(r"\s*\[+\s*([^\]]+?)\s*\]", line):
            current = head[1].replace('"', "").replace("'", "").replace(" ", "")
            found = number if table and current == table else found
        elif (
            key in line
            if not table
            else current == table and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]", line)
        ):
            return number
    return found
