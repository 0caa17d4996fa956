"""Words in messages: bytes, a count with its noun, the name of a signal, the nearest valid name for an unknown one."""

from __future__ import annotations

import difflib
import json
import re
import shlex
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = [
    "CORRECT_MAKER",
    "CORRECT_SAMPLES",
    "NO_SAMPLES",
    "bytes_text",
    "did_you_mean",
    "import_options",
    "nearest",
    "one_line",
    "places_text",
    "plain_json",
    "plain_text",
    "plural",
    "shown_path",
    "signal_name",
    "unknown_name",
    "version_key",
]

NO_SAMPLES = (
    "has no samples, so nothing was tried; verify calls of it in a test (docs/guides/pytest.md) or give samples of it "
    "(docs/guides/samples.md)"
)
"""What is said of an op, after its name, that no family and no source of samples draws."""

CORRECT_SAMPLES = "correct the samples; the other ops were verified"
CORRECT_MAKER = "what makes them or what they call ends the process; correct that, or leave them out"
"""What a user has to do before an op counts as verified."""


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    names = list(known)
    return f"{what} {name!r} is none of {', '.join(names)}{did_you_mean(name, names)}"


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the known name that has ``name`` as a dotted part, or else the most similar one; None if none is similar.

    Parameters
    ----------
    cutoff
        How similar they must be, from 0 (any name will do) to 1 (equal): the cutoff of ``difflib.get_close_matches``.

    >>> nearest("embeding", ["mul", "embedding"]), nearest("xyz", ["mul", "embedding"])
    ('embedding', None)
    >>> nearest("relu", ["real", "nn.functional.relu"])
    'nn.functional.relu'
    """
    names = list(known)
    parts = (one for one in names if name in one.split("."))
    return next(parts, None) or next(iter(difflib.get_close_matches(name, names, 1, cutoff)), None)


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return the end of a message that refuses ``name``; empty if no name is similar. See :func:`nearest`.

    >>> did_you_mean("nightli", ["dev", "ci", "nightly"])
    "; did you mean 'nightly'?"
    >>> did_you_mean("xyz", ["dev", "ci", "nightly"])
    ''
    """
    found = nearest(name, known, cutoff)
    return "" if found is None else f"; did you mean {found!r}?"


def bytes_text(count: int) -> str:
    """Return a number of bytes as readable text.

    >>> bytes_text(0), bytes_text(1023), bytes_text(1536), bytes_text(5 << 30)
    ('0 B', '1023 B', '1.5 KiB', '5.0 GiB')
    """
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1023.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:,.1f} TiB"


def plural(count: int, noun: str, many: str = "") -> str:
    """Return the count with its noun.

    >>> plural(1, "finding"), plural(1200, "finding"), plural(2, "class", "classes")
    ('1 finding', '1,200 findings', '2 classes')
    """
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def places_text(places: Sequence[str]) -> str:
    """Return lines of files as text, in which each file is named once.

    >>> places_text(["a.py:3", "a.py:14", "b.py:2"])
    'a.py:3, 14, b.py:2'
    """
    text, before = [], ""
    for place in places:
        file, _, line = place.rpartition(":")
        text.append(line if file == before else place)
        before = file
    return ", ".join(text)


def shown_path(file: str | Path) -> str:
    """Return the path of ``file`` as a user reads it: from the working folder, if it lies in there."""
    path = Path(file).absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def import_options(imports: Sequence[str]) -> str:
    """Return the command-line options that import ``imports``.

    >>> import_options(["my_rules.py", "mine.ops"])
    '--import my_rules.py --import mine.ops'
    """
    return " ".join(f"--import {shlex.quote(name)}" for name in imports)


_CODES = (
    *(set(range(0x20)) - {0x09, 0x0A}),  # controls of a terminal: ESC, BEL, CR and the like, and their 8-bit forms
    *range(0x7F, 0xA0),
    0x61C, *range(0x200B, 0x2010), *range(0x2028, 0x202F), *range(0x2060, 0x2070), 0xFEFF,  # order and width of text
    *range(0xD800, 0xE000),  # surrogates: no characters, and no stream takes them
    *range(0xE0000, 0xE0080),
)  # fmt: skip
_ESCAPES = {code: repr(chr(code))[1:-1] if not chr(code).isprintable() else f"\\u{code:04x}" for code in _CODES}
_JSON_ESCAPES = {code: json.dumps(chr(code))[1:-1] if code != 0x7F else "\\u007f" for code in _CODES}


def version_key(version: str) -> list[tuple[int, str]]:
    """Return a key that sorts versions; a local suffix such as ``+cpu`` does not count.

    >>> sorted(["2.15.0", "2.9.1", "2.13.0rc1", "2.13.0"], key=version_key)
    ['2.9.1', '2.13.0rc1', '2.13.0', '2.15.0']
    """
    parts = re.findall(r"\d+|[a-z]+", version.partition("+")[0].lower())
    numbers = [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
    return [*numbers, (0, "")]  # 2.13.0 comes after 2.13.0rc1


def plain_text(text: str) -> str:
    r"""Return ``text`` with control characters of a terminal or a browser replaced by Python's escapes.

    Text from a file passes through here before a terminal or a page shows it. Escape sequences, the carriage return
    that hides a line and controls of the order of text are replaced. Tabs and line feeds stay.

    >>> print(plain_text("\x1b]0;title\x07 \u202egnp.exe"))
    \x1b]0;title\x07 \u202egnp.exe
    """
    return text if text.isascii() and text.isprintable() else text.translate(_ESCAPES)


def plain_json(text: str) -> str:
    r"""Return JSON of the same meaning without the control characters that :func:`plain_text` replaces.

    JSON itself escapes some of them.

    >>> print(plain_json('["\x9b31m"]'))
    ["\\u009b31m"]
    """
    return text if text.isascii() and "\x7f" not in text else text.translate(_JSON_ESCAPES)


def one_line(text: str, longest: int = 600) -> str:
    r"""Return ``text`` as one line of :func:`plain_text`, made of at most ``longest`` of its characters.

    >>> one_line("first\nsecond")
    'first\\nsecond'
    """
    text = text if len(text) <= longest else f"{text[: longest // 2]} … {text[-longest // 2 :]}"
    return plain_text(text).replace("\n", "\\n").replace("\t", " ")


def signal_name(number: int) -> str:
    """Return the name of a signal; real-time signals are counted from the first one, as in ``kill -l``.

    >>> signal_name(9), signal_name(signal.SIGRTMIN + 3)
    ('SIGKILL', 'SIGRTMIN+3')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN{number - signal.SIGRTMIN:+}"
