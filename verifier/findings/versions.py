"""Runs the script of a finding under interpreters with other versions of torch, and says since when it fails or not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from verifier.core.wording import version_key
from verifier.findings.script.render import run_script
from verifier.records.schema import FAILS, GONE

__all__ = ["Interpreter", "Outcome", "ask", "make", "run_under", "told"]

_ASK_LIMIT = 120.0
"""Seconds that an interpreter gets to load torch."""


_UNDECIDED = "UNDECIDED: "
"""How the line of a script begins that says why it cannot tell."""


@dataclass(frozen=True)
class Interpreter:
    """A Python that can import torch.

    Parameters
    ----------
    python
        Path of the executable; None for that of this process.
    torch
        Version of its torch, without a local suffix such as ``+cpu``.
    """

    python: str | None
    torch: str


@dataclass(frozen=True)
class Outcome:
    """What a script did under one version of torch.

    Parameters
    ----------
    status
        ``fails as described``, ``did not fail``, or what went wrong.
    said
        The end of the script's output.
    """

    torch: str
    status: str
    said: str = ""

    @property
    def why(self) -> str:
        """Why the script did not tell: its own word for that, or else the last line of its output."""
        lines = self.said.strip().splitlines() or [""]
        return next((line.removeprefix(_UNDECIDED) for line in lines if line.startswith(_UNDECIDED)), lines[-1])

    @property
    def fails(self) -> bool | None:
        """Whether the finding is there; None if the script did not tell."""
        return {FAILS: True, GONE: False}.get(self.status)


def ask(python: str) -> Interpreter:
    """Return the interpreter at a path, once it has said which torch it has.

    Raises
    ------
    ValueError
        If there is no such program, or it cannot import torch.
    """
    if not shutil.which(python):
        raise ValueError(f"--python {python}: there is no such program")
    program = [python, "-c", "import torch; print('torch', torch.__version__)"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            program, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ASK_LIMIT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"--python {python}: cannot be run: {error}") from error
    versions = re.findall(r"^torch (\S+)$", done.stdout, re.MULTILINE)
    if done.returncode or not versions:
        last = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise ValueError(f"--python {python}: it cannot import torch: {last}")
    return Interpreter(python, versions[-1].partition("+")[0])


def make(version: str, folder: Path) -> Interpreter:
    """Return an interpreter with one version of torch, in an environment that is made by pip unless it is there.

    Parameters
    ----------
    folder
        Where environments are kept, one folder for each version.

    Raises
    ------
    ValueError
        If ``version`` is no version, or the environment cannot be made.
    """
    if not re.fullmatch(r"\d+(\.\d+)+\w*", version):
        raise ValueError(f"--make {version}: a version of torch is written as 2.14.1")
    made = folder / f"torch-{version}"
    python = made / "bin" / "python"
    if not python.exists():
        partial = folder / f"torch-{version}.partial"  # a broken installation is never taken for an environment
        shutil.rmtree(partial, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        inside = str(partial / "bin" / "python")
        for command in (
            [sys.executable, "-m", "venv", str(partial)],
            [inside, "-m", "pip", "install", "-q", "--disable-pip-version-check", f"torch=={version}", "numpy"],
        ):
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
            if done.returncode:
                shutil.rmtree(partial, ignore_errors=True)
                lines = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
                said = next((line for line in lines if line.startswith("ERROR")), lines[-1])
                raise ValueError(f"--make {version}: `{' '.join(command)}` failed: {said}")
        partial.rename(made)
    return ask(str(python))


def run_under(interpreter: Interpreter, source: str) -> Outcome:
    """Run a script under one interpreter."""
    return Outcome(interpreter.torch, *run_script(source, interpreter.python))


def told(outcomes: Sequence[Outcome]) -> str:
    """Return in one line since when a finding fails and does not fail, from outcomes in any order.

    >>> told([Outcome("2.14.1", GONE), Outcome("2.13.0", FAILS), Outcome("2.15.0", GONE)])
    'fails under 2.13.0; does not fail under 2.14.1 to 2.15.0'
    >>> told([Outcome("2.13.0", FAILS), Outcome("2.14.1", "broke with exit status 2"), Outcome("2.15.0", GONE)])
    'fails under 2.13.0; not told under 2.14.1; does not fail under 2.15.0'
    """
    names = {True: "fails", False: "does not fail", None: "not told"}
    in_order = sorted(outcomes, key=lambda one: version_key(one.torch))
    parts = []
    for fails, group in groupby(in_order, key=lambda one: one.fails):
        versions = list(dict.fromkeys(one.torch for one in group))
        span = versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
        parts.append(f"{names[fails]} under {span}")
    return "; ".join(parts)
