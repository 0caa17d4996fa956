"""How messages put things: a count with its noun, a signal, the nearest valid name for one that does not exist."""

from __future__ import annotations

import difflib
import shlex
import signal
from collections.abc import Iterable, Sequence

__all__ = ["did_you_mean", "nearest", "plural", "replay_text", "signal_name"]


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return which of ``known`` has ``name`` among its parts, or else is most like it; None if none is like it at all.

    Parameters
    ----------
    cutoff
        How alike they must be, from 0 (whatever is nearest will do) to 1 (equal), as ``difflib.get_close_matches`` has
        it.

    >>> nearest("embeding", ["mul", "embedding"]), nearest("xyz", ["mul", "embedding"])
    ('embedding', None)
    >>> nearest("relu", ["real", "nn.functional.relu"])
    'nn.functional.relu'
    """
    names = list(known)
    parts = (one for one in names if name in one.split("."))
    return next(parts, None) or next(iter(difflib.get_close_matches(name, names, 1, cutoff)), None)


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return the end of a message that refuses ``name``; empty if nothing is like it. See :func:`nearest`.

    >>> did_you_mean("nightli", ["dev", "ci", "nightly"])
    "; did you mean 'nightly'?"
    >>> did_you_mean("xyz", ["dev", "ci", "nightly"])
    ''
    """
    found = nearest(name, known, cutoff)
    return "" if found is None else f"; did you mean {found!r}?"


def plural(count: int, noun: str, many: str = "") -> str:
    """Return the count with its noun.

    >>> plural(1, "finding"), plural(1200, "finding"), plural(2, "class", "classes")
    ('1 finding', '1,200 findings', '2 classes')
    """
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def replay_text(fingerprint: str, imports: Sequence[str] = ()) -> str:
    """Return the command that runs a finding again: with the imports of its run, without which it is another's.

    >>> replay_text("0b4a15ec4750", ["my rules.py"])
    "python -m verifier replay 0b4a15ec4750 --import 'my rules.py'"
    """
    return f"python -m verifier replay {fingerprint}" + "".join(f" --import {shlex.quote(name)}" for name in imports)


def signal_name(number: int) -> str:
    """Return the name of a signal; those for real-time use are counted from the first, as ``kill -l`` does.

    >>> signal_name(9), signal_name(signal.SIGRTMIN + 3)
    ('SIGKILL', 'SIGRTMIN+3')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN{number - signal.SIGRTMIN:+}"
