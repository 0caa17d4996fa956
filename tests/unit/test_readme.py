"""The README is true: its commands exist, and those of its worked examples do what it says."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer
from torch.distributed.run import get_args_parser

from verifier.cli.app import app
from verifier.core.case import DEFAULT_MESHES, MeshSpec
from verifier.planning.profiles import CAMPAIGN_PROFILES, hypothesis_settings
from verifier.rules.campaign.request import DEFAULT_PRODUCT_MESHES as DEFAULT_RULE_MESHES
from verifier.rules.campaign.request import DEFAULT_WORLD_SIZES
from verifier.runs.store import RunStore

CLI: Any = typer.main.get_command(app)  # a group, of whatever click typer brings
ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MARK = "<!-- executed by tests/unit/test_readme.py -->\n"
RULES_MARK = "<!-- the rule check, executed by tests/unit/test_readme.py -->\n"
FINGERPRINT = re.compile(r"\b[0-9a-f]{12}\b")

BLOCKS = re.findall(r"^```bash\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
VERIFIER_COMMANDS = [line for line in COMMANDS if line.startswith("python -m verifier ")]
TOX_COMMANDS = [line for line in COMMANDS if "tox run" in line]
PYTEST_COMMANDS = [line for line in COMMANDS if line.startswith("pytest ")]
TORCHRUN_COMMANDS = [line for line in COMMANDS if line.startswith("torchrun ")]
EXAMPLES = dict(re.findall(r"^```python title=(\S+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of the README's examples."""
    for name, text in EXAMPLES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def execute(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of the README with this Python, as someone with the distribution installed."""
    program, *arguments = shlex.split(command)
    start = {"python": [sys.executable], "pytest": [sys.executable, "-m", "pytest"]}[program]
    names = ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.run(
        [*start, *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def installed() -> None:
    """Skip where families and plugin cannot be found from another folder."""
    try:
        metadata.distribution("dtensor-verifier")
    except metadata.PackageNotFoundError:
        pytest.skip("the distribution is not installed, the tests run from its folder")


# -------------------------------------------------------------------------------------------------- what is only parsed
def test_opens_with_the_two_commands() -> None:
    assert COMMANDS[:2] == [
        "python -m pip install tox && tox run -e report",
        "python -m pip install tox && tox run -e ci",
    ]


def test_every_command_is_of_a_kind_that_is_checked() -> None:
    checked = {*VERIFIER_COMMANDS, *TOX_COMMANDS, *PYTEST_COMMANDS, *TORCHRUN_COMMANDS}
    assert [line for line in COMMANDS if line not in checked] == ["python -m pip install -c constraints.txt -e ."]


@pytest.mark.parametrize("command", VERIFIER_COMMANDS)
def test_command_parses(command: str) -> None:
    _, _, _, name, *arguments = shlex.split(command)
    assert name in CLI.commands
    CLI.commands[name].make_context(name, arguments)  # raises for an option that does not exist


@pytest.mark.parametrize("command", TORCHRUN_COMMANDS)
def test_torchrun_command_parses(command: str) -> None:
    torchrun = get_args_parser().parse_args(shlex.split(command)[1:])
    assert torchrun.module
    assert torchrun.training_script == "verifier"
    name, *arguments = torchrun.training_script_args
    CLI.commands[name].make_context(name, [*arguments])  # it takes them off the list
    nodes, per_node = int(torchrun.nnodes), int(torchrun.nproc_per_node)
    assert MeshSpec.parse(arguments[-1]).world_size == nodes * per_node


@pytest.mark.parametrize("command", TOX_COMMANDS)
def test_tox_environment_exists(command: str) -> None:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "tox.ini", encoding="utf-8")
    assert f"testenv:{command.rpartition(' ')[2]}" in parser


def test_options_in_the_table_are_those_that_exist() -> None:
    for name, command in CLI.commands.items():
        row = next(line for line in README.splitlines() if re.match(rf"\| `{name}[ `]", line))
        options = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
        assert set(re.findall(r"`(--[a-z-]+)`", row.rpartition(" | ")[2])) == options - {"--help"}, name


def test_profiles_in_the_table_are_those_that_exist() -> None:
    row = r"^\| `(\w+)` \| (\d+), ([a-z ]+) \| (\d+) \| (\d+) \| ([a-z0-9 ]+) \|$"
    expected = []
    for name, profile in CAMPAIGN_PROFILES.items():
        settings = hypothesis_settings(name)
        each_time = "the same" if settings.derandomize else "something new"
        limit = "none" if profile.time_limit is None else f"{profile.time_limit / 3600:g} hours"
        numbers = (profile.max_examples, profile.combinations_per_case)
        expected.append((name, str(settings.max_examples), each_time, *map(str, numbers), limit))
    assert re.findall(row, README, re.MULTILINE) == expected


def test_default_meshes_are_those_that_it_names() -> None:
    assert f"without `--mesh` they are {', '.join(DEFAULT_MESHES[:-1])} and {DEFAULT_MESHES[-1]}." in README


def test_default_meshes_of_the_rule_check_are_those_that_it_names() -> None:
    names = [*map(str, DEFAULT_WORLD_SIZES), *DEFAULT_RULE_MESHES]
    assert f"without `--world-size` and `--mesh` it checks {', '.join(names[:-1])} and {names[-1]}." in README


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


# ----------------------------------------------------------------------------------------------------- what is executed
def test_help_lists_the_commands(tmp_path: Path, installed: None) -> None:
    done = execute("python -m verifier --help", tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("run", "rules", "report", "gate", "replay"))


def test_own_strategy_is_refuted_as_shown(folder: Path, installed: None) -> None:
    block = README.partition(MARK)[2].partition("```bash\n")[2].partition("```")[0]
    run, replay, report = block.splitlines()

    done = execute(run, folder)
    assert done.returncode == 1, done.stdout + done.stderr
    record = RunStore(folder / "reports").newest()
    assert record is not None
    (found,) = record.findings
    assert found.verdict == "WRONG_VALUE"
    assert "S(0)" in found.input_placements.values()
    (shown,) = set(FINGERPRINT.findall(block))

    done = execute(replay.replace(shown, found.fingerprint), folder)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "still fails: WRONG_VALUE" in done.stdout
    assert execute(report, folder).returncode == 1
    assert (folder / "reports" / "latest" / "index.html").is_file()


def test_own_strategy_is_refuted_by_the_rule_check_as_shown(folder: Path, installed: None) -> None:
    after = README.partition(RULES_MARK)[2]
    (command,) = after.partition("```bash\n")[2].partition("```")[0].splitlines()
    shown = after.partition("```text\n")[2].partition("```")[0].splitlines()

    done = execute(command, folder)
    assert done.returncode == 1, done.stdout + done.stderr
    assert shown[0] in done.stdout.splitlines()
    assert shown[1].partition(" with ")[2] in done.stdout  # the shapes are those of torch's samples
    record = RunStore(folder / "reports").newest()
    assert record is not None
    (found,) = record.findings
    assert found.level == 1
    assert (found.level, found.confirmed.text) == (1, "confirmed on gloo, 2 ranks")


def test_pytest_example_passes_and_is_recorded(folder: Path, installed: None) -> None:
    example = next(line for line in PYTEST_COMMANDS if "-n auto" in line)
    done = execute(example.replace("-n auto", "-n 0 -p no:cacheprovider"), folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    record = RunStore(folder / "reports").newest()
    assert record is not None
    assert set(record.counts) == {"PASS"}


def test_pytest_options_exist(folder: Path, installed: None) -> None:
    example = next(line for line in PYTEST_COMMANDS if "--verifier-mesh" in line)
    done = execute(f"{example} --collect-only -q -p no:cacheprovider", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 tests collected" in done.stdout
