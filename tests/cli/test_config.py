"""``[tool.dtensor-verifier]`` in pyproject.toml and the environment: what holds, from where, and what is refused."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from verifier.cli import main as entry
from verifier.cli.options import FailOn

Verifier = Callable[..., tuple[int, str, str]]

FILE = """\
[project]
name = "mine"

[tool.dtensor-verifier]
mesh = ["2", "2x2"]
dtype = "of-file"
baseline = "known.toml"

[tool.dtensor-verifier.run]
max-examples = 3
mesh = "4"
"""
DTYPE = "[tool.dtensor-verifier.rules]\ndtype = 'of-file'\n"


@pytest.fixture
def verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verifier:
    monkeypatch.chdir(tmp_path)

    def call(text: str | bytes, *arguments: str) -> tuple[int, str, str]:
        file = tmp_path / "pyproject.toml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        monkeypatch.setattr(sys, "argv", ["verifier", *arguments])
        with pytest.raises(SystemExit) as ended:
            entry.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return call


def held(said: str, name: str, command: str) -> str:
    """Return what holds for an option of a command, with its source."""
    (line,) = (
        one for one in said.splitlines() if one.split()[0] == name and command in one.partition(", of ")[2].split()
    )
    return " ".join(line.partition(", of ")[0].split()[1:])


def test_config_says_what_holds_and_from_where(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTENSOR_VERIFIER_SEED", "7")
    monkeypatch.setenv("DTENSOR_VERIFIER_RULES_SEED", "8")
    status, said, errors = verifier(FILE, "config")
    assert (status, errors) == (0, "")
    assert held(said, "mesh", "gate") == '["2", "2x2"] pyproject.toml:5'
    assert held(said, "mesh", "run") == '["4"] pyproject.toml:11'
    assert held(said, "max-examples", "run") == "3 pyproject.toml:10"
    assert held(said, "baseline", "report") == "known.toml pyproject.toml:7"
    assert held(said, "seed", "run") == "7 environment DTENSOR_VERIFIER_SEED"
    assert held(said, "seed", "rules") == "8 environment DTENSOR_VERIFIER_RULES_SEED"
    assert held(said, "profile", "run") == "dev, or own with --import alone default"


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "dtype 'of-file' is none of" in verifier(DTYPE, "rules", "add")[2]
    monkeypatch.setenv("DTENSOR_VERIFIER_DTYPE", "of-environment")
    assert "dtype 'of-environment' is none of" in verifier(DTYPE, "rules", "add")[2]
    assert "dtype 'of-line' is none of" in verifier(DTYPE, "rules", "add", "--dtype", "of-line")[2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tool.dtensor-verifier]\nmesch = '2'\n", ":2: unknown key 'mesch' in [tool.dtensor-verifier]; did you mean"),
        ("[tool.dtensor-verifier.gaet]\nmesh = '2'\n", ": unknown key 'gaet' in [tool.dtensor-verifier]; did you"),
        ("[tool.dtensor-verifier.run]\n\nsizes = 2\n", ":3: unknown key 'sizes' in [tool.dtensor-verifier.run]"),
        ("[tool.dtensor-verifier]\nclaims-only = 1\n", ":2: claims-only is 1; it must be true or false"),
        ("[tool.dtensor-verifier]\nseed = [1]\n", ":2: seed is [1]; it must be a text or a number"),
        ("[tool.dtensor-verifier]\nmesh = [[2]]\n", ":2: mesh is [[2]]; it must be a text or a list of texts"),
        ("[tool.dtensor-verifier]\nfresh = true\n", ":2: unknown key 'fresh'"),
        ("[tool]\ndtensor-verifier = 3\n", ":2: tool.dtensor-verifier is 3, not a table"),
        ("[tool.dtensor-verifier]\nmesh = \n", ": not TOML: "),
        (b"[tool.dtensor-verifier]\nmesh = '\xff'\n", ": cannot be read: "),
    ],
)  # fmt: skip
def test_a_mistake_in_the_file_is_one_line_with_its_place(verifier: Verifier, text: str | bytes, said: str) -> None:
    status, out, errors = verifier(text, "config")
    assert (status, out) == (2, "")
    (line,) = errors.splitlines()
    assert line.startswith("error: pyproject.toml")
    assert said in line


def test_what_a_file_says_to_fail_on_is_for_the_commands_that_know_it(verifier: Verifier) -> None:
    """``missing`` is for ``rules`` and ``lost`` for ``gate``; who types a kind means the command that is typed."""
    for text, known, told in (
        ("missing", FailOn.LOST, {FailOn.WRONG}),
        ("wrong,lost", FailOn.LOST, {FailOn.WRONG, FailOn.LOST}),
    ):
        assert FailOn.parse(text, FailOn.WRONG, known, typed=False) == told
    with pytest.raises(ValueError, match="kind 'missing' is none of wrong, lost"):
        FailOn.parse("missing", FailOn.WRONG, FailOn.LOST)
    status, _, errors = verifier("[tool.dtensor-verifier]\nfail-on = 'wrung'\n", "gate")
    assert (status, "kind 'wrung' is none of wrong, lost, regret; did you mean 'wrong'?" in errors) == (2, True)
    status, _, errors = verifier("[tool.dtensor-verifier]\nfail-on = 'lost'\n", "gate", "--rank-memory", "much")
    assert (status, "'much'" in errors, "--fail-on" in errors) == (2, True, False)


def test_the_file_of_other_tools_is_not_judged(verifier: Verifier) -> None:
    assert verifier("[tool.other]\nmesh = \n", "config")[0] == 0


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2, 3, 4))])
def test_a_damaged_file_gives_a_line_and_status_2_or_is_as_good(verifier: Verifier, seed: int) -> None:
    source = random.Random(seed)
    statuses = set()
    for _ in range(60):
        content = bytearray(FILE.encode())
        for _ in range(source.randrange(1, 6)):
            place = source.randrange(len(content))
            content[place : place + source.randrange(4)] = source.randbytes(source.randrange(4))
        status, out, errors = verifier(bytes(content), "config")
        statuses.add(status)
        assert (status == 0) == bool(out)
        assert [line.startswith("error: pyproject.toml") for line in errors.splitlines()] == [True] * (status == 2)
    assert statuses == {0, 2}
