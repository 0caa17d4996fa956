"""The commands that messages tell the user to type."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from verifier.core.wording import import_options
from verifier.records.files import DEFAULT_REPORTS, out_option
from verifier.records.schema import FindingRecord

__all__ = ["command_text", "finding_text", "github_command", "replay_command", "replay_text", "resume_text"]


def command_text(name: str, folder: Path = DEFAULT_REPORTS) -> str:
    """Return a command that reads the runs in ``folder``.

    >>> command_text("gate --update", Path("nights")), command_text("report")
    ('python -m verifier gate --update --out nights', 'python -m verifier report')
    """
    return f"python -m verifier {name}{out_option(folder)}"


def replay_text(
    fingerprint: str, imports: Sequence[str] = (), rank_memory: str = "", folder: Path = DEFAULT_REPORTS
) -> str:
    """Return the command that replays a finding, with the imports and the memory limit that it needs.

    >>> replay_text("0b4a15ec4750", ["my rules.py"], "512MiB")
    "python -m verifier replay 0b4a15ec4750 --import 'my rules.py' --rank-memory 512MiB"
    """
    options = [shlex.quote(fingerprint), import_options(imports), f"--rank-memory {rank_memory}" if rank_memory else ""]
    return command_text(" ".join(filter(None, ["replay", *options])), folder)


def replay_command(finding: FindingRecord, folder: Path = DEFAULT_REPORTS) -> str:
    """Return the command that replays ``finding``, which is recorded in ``folder``."""
    return replay_text(finding.fingerprint, finding.imports, finding.rank_memory, folder)


def finding_text(finding: FindingRecord, folder: Path = DEFAULT_REPORTS) -> str:
    """Return the message of a finding; its last line is the command that reproduces the finding."""
    return f"{finding.message}\n  reproduce: {replay_command(finding, folder)}"


def resume_text(run_id: str, imports: Sequence[str] = (), folder: Path = DEFAULT_REPORTS) -> str:
    """Return the command that resumes a run.

    >>> resume_text("20260105-101500-ab", ["mine.ops"])
    'python -m verifier run --resume 20260105-101500-ab --import mine.ops'
    """
    return command_text(" ".join(filter(None, ["run --resume", run_id, import_options(imports)])), folder)


def github_command(kind: str, title: str, message: str, place: tuple[str, int] | None = None) -> str:
    """Return a workflow command of GitHub Actions, which shows an annotation, at a file and line if there is a place.

    The syntax follows "Workflow commands for GitHub Actions" in GitHub's documentation, and escaping follows the module
    ``command`` of ``actions/toolkit``.

    >>> github_command("error", "wrong: rule", "got 1\\nexpected 2", ("my_rules.py", 3))
    '::error file=my_rules.py,line=3,title=wrong%3A rule::got 1%0Aexpected 2'
    """
    where = "" if place is None else f"file={_github_property(place[0])},line={place[1]},"
    return f"::{kind} {where}title={_github_property(title)}::{_github_text(message)}"


def _github_property(text: str) -> str:
    return _github_text(text).replace(":", "%3A").replace(",", "%2C")


def _github_text(text: str) -> str:
    # Per cent signs first, so that the other escapes are not escaped again.
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
