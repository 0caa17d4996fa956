"""Steps of programs, as data: what a step is, and how it runs.

These functions import only torch, so that their source can stand in a reproduction.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["left_over", "meant", "run_steps", "taken_by"]


def meant(given: Any, values: dict[str, Any]) -> Any:
    """Return an argument of a step: a text that names a value stands for it, ``["slice", 0, 2]`` for ``0:2``."""
    if isinstance(given, str):
        return values.get(given, given)
    if isinstance(given, list) and given[:1] == ["slice"]:
        return slice(*given[1:])
    if isinstance(given, (list, tuple)):
        return type(given)(meant(item, values) for item in given)
    return given


def run_steps(steps: list[list[Any]], values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` with the value of each step, a list ``[name, function, arguments, keywords]``, in order.

    If the function returns several values, they are called ``name.0``, ``name.1`` …
    """
    for name, path, given, options in steps:
        function: Any = torch
        for part in path.split(".")[1:]:
            function = getattr(function, part)
        result = function(*meant(given, values), **{key: meant(value, values) for key, value in options.items()})
        values = {**values, name: result}
        if isinstance(result, (list, tuple)):
            values |= {f"{name}.{number}": item for number, item in enumerate(result)}
    return values


def taken_by(steps: list[list[Any]]) -> set[str]:
    """Return the names of the values that some step takes."""
    waiting: list[Any] = [part for _, _, given, options in steps for part in (*given, *options.values())]
    names: set[str] = set()
    while waiting:
        part = waiting.pop()
        if isinstance(part, (list, tuple)):
            waiting += part
        elif isinstance(part, str):
            names.add(part)
    return names


def left_over(steps: list[list[Any]], values: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors among ``values`` that no step takes, each once."""
    taken, found = taken_by(steps), dict[str, torch.Tensor]()
    for name, value in values.items():
        tensor = isinstance(value, torch.Tensor) and name not in taken
        if tensor and not any(value is other for other in found.values()):
            found[name] = value
    return found
