"""Commands in their own processes: their environment, time limit, and records."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from verifier.records.files import read_record

WRONG_GRADIENT_RULE = Path(__file__).with_name("wrong_gradient_rule.py")
"""A file for ``--import`` with a wrong rule of ``embedding_dense_backward``."""
LIMIT = 300.0
"""Seconds that a busy machine may take for anything here."""


def environment(**variables: object) -> dict[str, str]:
    path = os.pathsep.join(path for path in sys.path if path)
    return dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1", **{n: str(v) for n, v in variables.items()})


def wait_until(happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not happened():
        assert time.monotonic() < deadline, f"{what} did not happen within {LIMIT:g} s"
        time.sleep(0.05)


def comparable(path: Path) -> dict[str, Any]:
    """Return a record without ids and times, so that equal runs have equal records."""
    fields: dict[str, Any] = msgspec.to_builtins(read_record(path))
    for name in ("seconds", "seconds_by", "pool_restarts"):
        del fields[name]
    for name in ("id", "started", "command", "request"):
        del fields["header"][name]
    for moved in fields["graph"]["paths"]:
        del moved["seconds"], moved["fastest"]
    return fields
