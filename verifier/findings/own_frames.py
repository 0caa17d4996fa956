"""The part of a traceback that a user can mend: the lines of their own files."""

from __future__ import annotations

import os
import re

import torch

import verifier
from verifier.execution.registrations import is_installed, is_of_python

__all__ = ["own_frames", "refuses"]

_FRAME = re.compile(
    r'^  File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<name>.+)\n(?P<code>    .*)?', re.MULTILINE
)
_RAISE = re.compile(r"(^|: )raise\b")
_NOT_OWN = tuple(os.path.dirname(os.path.abspath(module.__file__ or "")) + os.sep for module in (torch, verifier))
_MOST = 6


def own_frames(traceback: str) -> list[str]:
    """Return the frames in files of the user's, outermost first, as ``file:line in function: code``; the last few.

    >>> own_frames('  File "/home/me/rules.py", line 3, in rule\\n    return x[9]\\nIndexError: 9')
    ['/home/me/rules.py:3 in rule: return x[9]']
    """
    frames = []
    for found in _FRAME.finditer(traceback):
        file = os.path.abspath(found["file"])
        if found["file"].startswith("<") or file.startswith(_NOT_OWN) or is_installed(file) or is_of_python(file):
            continue
        code = f": {found['code'].strip()}" if found["code"] else ""
        frames.append(f"{found['file']}:{found['line']} in {found['name']}{code}")
    return list(dict.fromkeys(frames))[-_MOST:]


def refuses(traceback: str) -> bool:
    """Return whether the user's strategy itself raises, and what DTensor takes for a failure.

    >>> said = "\\nRuntimeError: no scalars\\n\\nSharding propagation failed for Op(op=aten.cumsum.default)"
    >>> refuses('  File "/home/me/rules.py", line 3, in rule\\n    raise ValueError("no scalars")' + said)
    True
    """
    frames = own_frames(traceback)
    code = frames[-1].partition(": ")[2] if frames else ""
    return _RAISE.search(code) is not None and "\n\nSharding propagation failed for " in traceback
