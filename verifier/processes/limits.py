"""Ends a process with its controller, and limits its memory."""

from __future__ import annotations

import fcntl
import os
import re
import resource
import signal
from multiprocessing.connection import wait

from verifier.core.wording import nearest

__all__ = [
    "available_memory", "die_with", "format_size", "is_out_of_memory", "limit_memory", "memory_note",
    "parse_rank_memory", "parse_size",
]  # fmt: skip

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
LEAST_RANK_MEMORY = 256 << 20
_UNDER_LIMIT = "out of memory under the limit of"
_OUT_OF_MEMORY = re.compile(r"bad_alloc|can't allocate memory|Cannot allocate memory|MemoryError|not enough memory")


def die_with(lifeline_fd: int) -> None:
    """Have the kernel kill this process when the controller has ended, even during a native call.

    A thread that reads the pipe would need the interpreter lock, and PR_SET_PDEATHSIG acts when the starting thread
    ends. Nothing may ever be written to the pipe, because a write kills the process too.
    """
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline_fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)
    if wait([lifeline_fd], 0):  # the controller ended before
        os._exit(1)


def mapped_memory() -> int:
    """Return the bytes of address space that this process has mapped."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def available_memory() -> int:
    """Return the bytes of memory that new processes can have on this machine."""
    with open("/proc/meminfo", encoding="ascii") as file:
        kibibytes = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in file)}
    return kibibytes["MemAvailable"] << 10


def limit_memory(above: int) -> None:
    """Let allocations fail that map more than ``above`` bytes in addition to those mapped now."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = mapped_memory() + above
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def memory_note(text: str, limit: int | None) -> str:
    """Return a prefix for ``text`` if it reports a failed allocation; an empty string otherwise.

    >>> memory_note("terminate called after throwing an instance of 'std::bad_alloc'", 512 << 20)
    'out of memory under the limit of 512 MiB a rank: '
    >>> memory_note("index out of range", 512 << 20)
    ''
    """
    if not is_out_of_memory(text):
        return ""
    return "out of memory: " if limit is None else f"{_UNDER_LIMIT} {format_size(limit)} a rank: "


def is_out_of_memory(text: str) -> bool:
    """Return whether a process's last output reports a failed allocation.

    >>> is_out_of_memory("terminate called after throwing an instance of 'std::bad_alloc'")
    True
    """
    return _OUT_OF_MEMORY.search(text) is not None


def parse_size(text: str) -> int:
    """Return the number of bytes that ``text`` names.

    Raises
    ------
    ValueError
        If it is no size.

    >>> parse_size("4GiB"), parse_size("1.5 MiB"), parse_size("512")
    (4294967296, 1572864, 512)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        near = nearest(match[2].lower(), units, 0.5) if match is not None else None
        unit = next((unit for unit in _UNITS if unit.lower() == near), "")
        hint = f"; did you mean {match[1]}{unit}?" if match is not None and unit else ""
        raise ValueError(
            f"size {text!r} is not a number of bytes such as 4GiB or 512MiB; units are KiB, MiB, GiB, TiB{hint}"
        )
    return int(float(match[1]) * units[match[2].lower()])


def parse_rank_memory(text: str | None) -> int | None:
    """Return the bytes that ``--rank-memory`` names; None if the option was not given.

    Raises
    ------
    ValueError
        If it is no size, or too little for a rank.
    """
    if text is None:
        return None
    try:
        size = parse_size(text)
    except ValueError as error:
        raise ValueError(f"--rank-memory: {error}") from error
    if size < LEAST_RANK_MEMORY:
        raise ValueError(
            f"--rank-memory {text}: {format_size(size)} are too few for process groups and their threads; "
            f"at least {format_size(LEAST_RANK_MEMORY)} are needed"
        )
    return size


def format_size(size: int) -> str:
    """Return a number of bytes with a unit.

    >>> format_size(4 << 30), format_size(1536 << 10), format_size(100)
    ('4 GiB', '1.5 MiB', '100 B')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _UNITS[unit]:
            return f"{round(size / _UNITS[unit], 2):g} {unit}"
    return f"{size} B"
