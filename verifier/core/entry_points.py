"""What installed packages declare for the verifier, found through entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Protocol, TypeVar

__all__ = ["load_entry_points"]


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_NamedT = TypeVar("_NamedT", bound=_Named)


def load_entry_points(group: str, interface: type[_NamedT]) -> dict[str, _NamedT]:
    """Return everything that installed packages declare under ``group``, keyed by the object's ``name``.

    Parameters
    ----------
    interface
        The class, or the runtime-checkable protocol, that each object must be an instance of.

    Raises
    ------
    TypeError
        If an entry point loads something that does not follow ``interface``.
    """
    loaded: dict[str, _NamedT] = {}
    for entry_point in sorted(entry_points(group=group), key=lambda e: e.name):
        found = entry_point.load()
        if not isinstance(found, interface):
            declared = f"entry point {entry_point.name} = {entry_point.value}"
            raise TypeError(f"{declared} is a {type(found)}, not a {interface.__name__}")
        loaded[found.name] = found
    return loaded
