"""The README and the documents are true: their commands exist, and those of worked examples do what they say."""

from __future__ import annotations

import ast
import configparser
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from forked_commands import run_python
from torch.distributed.run import get_args_parser
from torch_versions import needs_torch
from typer.testing import CliRunner

from verifier.cli.app import app
from verifier.core.case import DEFAULT_MESHES, MeshSpec
from verifier.planning.budgets import CAMPAIGN_PROFILES, OWN_RULES
from verifier.planning.profiles import hypothesis_settings
from verifier.rules.campaign.request import DEFAULT_PRODUCT_MESHES as DEFAULT_RULE_MESHES
from verifier.rules.campaign.request import DEFAULT_WORLD_SIZES
from verifier.runs.store import RunStore

CLI: Any = typer.main.get_command(app)  # a group, of whatever click typer brings
ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TOP = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in [*TOP, *sorted(DOCS.rglob("*.md"))]}
README, RUNS = PAGES["README.md"], PAGES["docs/reference/runs.md"]
FINGERPRINT = re.compile(r"\b[0-9a-f]{12}\b")


class Block(NamedTuple):
    """A block of code in a page; ``mark`` names one that a test below executes."""

    page: str
    mark: str
    language: str
    title: str
    text: str


def blocks_of(page: str, text: str) -> Iterator[Block]:
    found = re.findall(
        r"(?:^<!-- executed: ([\w ]+) -->\n)?^```(\w*)(?: title=(\S+))?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL
    )
    yield from (Block(page, *one) for one in found)


BLOCKS = [block for page, text in PAGES.items() for block in blocks_of(page, text)]
COMMANDS = [
    command
    for block in BLOCKS
    if block.language == "bash"
    for line in block.text.splitlines()
    for command in line.split(" && ")
]
INLINE = re.findall(r"`(python -m verifier (?!COMMAND)[^`…]+)`", "\n".join(PAGES.values()))
VERIFIER_COMMANDS = [line for line in dict.fromkeys([*COMMANDS, *INLINE]) if line.startswith("python -m verifier ")]
TOX_COMMANDS = [line for line in COMMANDS if line.startswith("tox run ")]
PYTEST_COMMANDS = [line for line in COMMANDS if line.startswith("pytest ")]
TORCHRUN_COMMANDS = [line for line in COMMANDS if line.startswith("torchrun ")]
PIP_COMMANDS = [line for line in COMMANDS if line.startswith("python -m pip install ")]
OTHER_PYTHON = [
    line
    for line in COMMANDS
    if line.startswith("python ") and not line.startswith(("python -m verifier ", "python -m pip "))
]
EXAMPLES = {block.title: block.text for block in BLOCKS if block.title}


def marked(mark: str) -> Block:
    (block,) = [block for block in BLOCKS if block.mark == mark]
    return block


def shown_after(block: Block) -> list[str]:
    """Return the lines of the output that a page shows next after ``block``."""
    after = BLOCKS[BLOCKS.index(block) + 1 :]
    return next(other.text for other in after if other.language == "text").splitlines()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of all examples."""
    for name, text in EXAMPLES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def execute(command: str, folder: Path, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command of a page, in a fork of a process that has loaded torch; if ``fresh``, as a user starts it."""
    program, *arguments = shlex.split(command)
    words = [*{"python": [], "pytest": ["-m", "pytest"]}[program], *arguments]
    names = ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    if not fresh:
        return run_python(*words, folder=folder, environment=environment)
    return subprocess.run(
        [sys.executable, *words],
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
    opening = [block.text.strip() for block in BLOCKS if block.page == "README.md"][:2]
    assert opening == ["python -m pip install tox && tox run -e report", "python -m pip install tox && tox run -e ci"]


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    assert {(block.page, block.language) for block in BLOCKS if block.language not in KINDS} == set()
    fences = {page: len(re.findall("^ *```", text, re.MULTILINE)) for page, text in PAGES.items()}
    found = {page: 2 * sum(block.page == page for block in BLOCKS) for page in PAGES}
    assert fences == found, "a block that is indented or not closed is not read"
    indented = re.compile("^    (python|pytest|tox|torchrun) ", re.MULTILINE)
    assert [page for page, text in PAGES.items() if indented.search(text)] == []


KINDS = ("bash", "python", "toml", "text")


def test_every_command_is_of_a_kind_that_is_checked() -> None:
    checked = {
        *VERIFIER_COMMANDS, *TOX_COMMANDS, *PYTEST_COMMANDS, *TORCHRUN_COMMANDS, *PIP_COMMANDS, *OTHER_PYTHON,
    }  # fmt: skip
    assert [line for line in COMMANDS if line not in checked] == []
    assert min(map(len, (TOX_COMMANDS, PYTEST_COMMANDS, TORCHRUN_COMMANDS, PIP_COMMANDS, OTHER_PYTHON))) > 0


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
    assert all(f"testenv:{name}" in parser for name in command.rpartition(" ")[2].split(","))


@pytest.mark.parametrize("command", PIP_COMMANDS)
def test_pip_installs_what_is_here_or_pinned(command: str) -> None:
    for argument in shlex.split(command)[4:]:
        assert argument in ("tox", "-c", "constraints.txt", "-e", ".", ".[torchrec]", "--no-deps", "torchrec==1.8.0")


@pytest.mark.parametrize("command", PYTEST_COMMANDS)
def test_pytest_command_names_files_that_exist(command: str) -> None:
    files = [argument for argument in shlex.split(command) if argument.endswith(".py")]
    assert [file for file in files if file not in EXAMPLES and not (ROOT / file).is_file()] == []


@pytest.mark.parametrize("command", OTHER_PYTHON)
def test_script_exists_and_has_the_options(command: str) -> None:
    _, first, *arguments = shlex.split(command)
    if first == "-c":
        assert missing_names(arguments[0]) == []
        return
    if first == "-m":
        spec = importlib.util.find_spec(arguments[0])
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin)
    else:
        source = ROOT / first
    text = source.read_text(encoding="utf-8")
    assert "__main__" in text
    options = [one for one in arguments if one.startswith("--")]
    assert [one for one in options if f'"{one}"' not in text and f'"{one[2:]}"' not in text] == []


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in ("python", "toml")])
def test_block_is_code(block: Block) -> None:
    if block.language == "toml":
        assert tomllib.loads(block.text)
    else:
        assert missing_names(block.text) == []


def missing_names(source: str) -> list[str]:
    """Return what ``source`` imports of our packages and is not there; it has to be Python."""
    compile(source, "<block>", "exec")
    imported = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.module]
    names = [f"{node.module}.{alias.name}" for node in imported for alias in node.names]
    return [name for name in names if name.startswith(("verifier.", "strategies.")) and not is_there(name)]


def is_there(name: str) -> bool:
    """Return whether a dotted name is a module of ours, or something in one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        path = ROOT.joinpath(*parts[:length])
        if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
            found: Any = importlib.import_module(module)
            for part in parts[length:]:
                if not hasattr(found, part):
                    return False
                found = getattr(found, part)
            return True
    return False


def test_a_missing_name_is_seen() -> None:
    assert missing_names("from verifier.report import schema") == ["verifier.report.schema"]
    assert missing_names("from verifier.report.json import schema\nfrom torch import nothing") == []


SPANS = {span: page for page, text in PAGES.items() for span in re.findall(r"`([^`\n]+)`", text)}


def test_names_of_ours_in_the_text_exist() -> None:
    names = {name: page for name, page in SPANS.items() if re.fullmatch(r"(verifier|strategies)(\.\w+)+", name)}
    assert len(names) > 10
    assert {name: page for name, page in names.items() if not is_there(name)} == {}


def test_files_that_the_text_names_exist() -> None:
    pattern = re.compile(r"(verifier|strategies|tests|benchmarks|docs)/[\w./-]+")
    paths = {path: page for path, page in SPANS.items() if pattern.fullmatch(path)}
    assert len(paths) > 30
    assert {path: page for path, page in paths.items() if not (ROOT / path).exists()} == {}


def test_tests_that_the_text_names_exist() -> None:
    files = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    known = {path.stem for path in files}
    for path in files:
        known |= set(re.findall(r"^ *def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    named = {name: page for name, page in SPANS.items() if re.fullmatch(r"test_\w+", name)}
    assert len(named) > 20
    assert {name: page for name, page in named.items() if name not in known} == {}


def test_examples_have_names_of_their_own() -> None:
    titles = sorted(block.title for block in BLOCKS if block.title)
    assert titles == ["my_mlp.py", "my_op.py", "my_rules.py", "test_mine.py", "test_my_lookup.py", "test_my_model.py"]


def test_every_mark_is_of_a_block_that_is_executed() -> None:
    marks = [block.mark for block in BLOCKS if block.mark]
    assert sorted(marks) == ["a layout", "mul and cat", "my rules on ranks", "my rules without ranks"]
    assert sum(text.count("<!-- executed") for text in PAGES.values()) == len(marks)


def test_profiles_in_the_table_are_those_that_exist() -> None:
    row = r"^\| `(\w+)` \| (\d+), ([a-z ]+) \| (\d+) \| (\d+) \| ([a-z0-9 ]+) \|$"
    expected = []
    own = CAMPAIGN_PROFILES[OWN_RULES]
    assert own.meshes == ("2", "2x2")
    assert f"{own.max_examples} cases per mesh, {own.combinations_per_case} combinations per case" in flowing(RUNS)
    for name, profile in CAMPAIGN_PROFILES.items():
        if profile is own:
            continue
        settings = hypothesis_settings(name)
        each_time = "the same" if settings.derandomize else "something new"
        limit = "none" if profile.time_limit is None else f"{profile.time_limit / 3600:g} hours"
        numbers = (profile.max_examples, profile.combinations_per_case)
        expected.append((name, str(settings.max_examples), each_time, *map(str, numbers), limit))
    assert re.findall(row, RUNS, re.MULTILINE) == expected


def flowing(text: str) -> str:
    return " ".join(text.split())


def test_default_meshes_are_those_that_it_names() -> None:
    assert f"without `--mesh` they are {', '.join(DEFAULT_MESHES[:-1])} and {DEFAULT_MESHES[-1]}." in flowing(RUNS)


def test_default_meshes_of_the_rule_check_are_those_that_it_names() -> None:
    names = [*map(str, DEFAULT_WORLD_SIZES), *DEFAULT_RULE_MESHES]
    said = f"without `--world-size` and `--mesh` it checks {', '.join(names[:-1])} and {names[-1]}."
    assert said in flowing(RUNS)


def anchors(text: str) -> set[str]:
    """Return what links to the headings of a page end in, as GitHub makes them."""
    headings = re.findall("^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(pages: dict[str, str]) -> list[tuple[str, str]]:
    dead = []
    for page, text in pages.items():
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            name, _, anchor = link.partition("#")
            if "://" in link:
                continue
            target = (ROOT / page).parent / name if name else ROOT / page
            if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
                dead.append((page, link))
    return dead


def test_links_lead_somewhere() -> None:
    assert dead_links(PAGES) == []
    wrong = {"docs/README.md": "[a](../README.md) [b](#none) [c](../docs.md) [d](reference/runs.md#exit-status)"}
    assert dead_links(wrong) == [("docs/README.md", "#none"), ("docs/README.md", "../docs.md")]


def test_every_page_is_listed() -> None:
    listed = set(re.findall(r"\]\(([^)#]+)\)", PAGES["docs/README.md"]))
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} - {"README.md"}
    assert pages - listed == set()


def generate() -> Any:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_commands_is_the_programs_own_help() -> None:
    page = generate().commands_page()
    assert page == PAGES["docs/reference/commands.md"], "the help has changed: run python docs/generate.py"
    for name, command in CLI.commands.items():
        options = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert all(re.search(rf"^\| `(-\w, )?{option}\b", section, re.MULTILINE) for option in options), name


def test_the_page_of_causes_is_that_of_the_baseline_and_the_remedies() -> None:
    page = generate().causes_page()
    assert page == PAGES["docs/reference/causes.md"], "a cause or remedy has changed: run python docs/generate.py"


def test_the_map_of_rooms_is_the_table_of_floors() -> None:
    text = PAGES["ARCHITECTURE.md"]
    assert generate().with_map(text) == text, "a room or its docstring has changed: run python docs/generate.py"


def test_the_picture_of_the_report_is_small() -> None:
    assert re.search(r"!\[[^\]]+\]\(docs/report\.png\)", README)
    assert 20_000 < (DOCS / "report.png").stat().st_size < 300_000


# ----------------------------------------------------------------------------------------------------- what is executed
@pytest.mark.processes
def test_help_lists_the_commands(tmp_path: Path, installed: None) -> None:
    done = execute("python -m verifier --help", tmp_path, fresh=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("run", "rules", "report", "gate", "replay"))


@pytest.mark.processes
def test_own_strategy_is_refuted_as_shown(folder: Path, installed: None) -> None:
    block = marked("my rules on ranks")
    run, replay, report = block.text.splitlines()

    done = execute(run, folder, fresh=True)
    assert done.returncode == 1, done.stdout + done.stderr
    record = RunStore(folder / "reports").newest()
    assert record is not None
    (found,) = record.findings
    assert found.verdict == "WRONG_VALUE"
    assert "S(0)" in found.input_placements.values()
    (shown,) = set(FINGERPRINT.findall(block.text))
    assert f"found WRONG_VALUE {shown}: output [0, 0] on rank 0: " in shown_after(block)[0]

    done = execute(replay.replace(shown, found.fingerprint), folder)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "still fails: WRONG_VALUE" in done.stdout
    assert execute(report, folder).returncode == 1
    assert (folder / "reports" / "latest" / "index.html").is_file()


@pytest.mark.processes
def test_own_strategy_is_refuted_by_the_rule_check_as_shown(folder: Path, installed: None) -> None:
    block = marked("my rules without ranks")
    (command,) = block.text.splitlines()
    shown = shown_after(block)

    done = execute(command, folder)
    assert done.returncode == 1, done.stdout + done.stderr
    assert shown[0] in done.stdout.splitlines()
    assert shown[1].partition(" with ")[2] in done.stdout  # the shapes are those of torch's samples
    record = RunStore(folder / "reports").newest()
    assert record is not None
    (found,) = record.findings
    assert found.level == 1
    assert (found.level, found.confirmed.text) == (1, "confirmed on gloo, 2 ranks")


@pytest.mark.processes
def test_pytest_example_passes_and_is_recorded(folder: Path, installed: None) -> None:
    example = next(line for line in PYTEST_COMMANDS if "-n auto" in line)
    done = execute(example.replace("-n auto", "-n 0 -p no:cacheprovider") + " test_mine.py", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    record = RunStore(folder / "reports").newest()
    assert record is not None
    assert set(record.counts) == {"PASS"}


@pytest.mark.processes
def test_pytest_options_exist(folder: Path, installed: None) -> None:
    example = next(line for line in PYTEST_COMMANDS if "--verifier-mesh" in line)
    done = execute(f"{example} --collect-only -q -p no:cacheprovider", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 tests collected" in done.stdout


@needs_torch("<2.14", "README shows the rules of mul and cat that 2.13 claims; a later one claims others")
@pytest.mark.processes
def test_rules_of_torch_are_checked_as_shown(folder: Path, installed: None) -> None:
    block = marked("mul and cat")
    (command,) = block.text.splitlines()
    done = execute(command, folder)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    seconds = re.compile(r" +\d+\.\d+  ")
    said = [seconds.sub(" ", line) for line in done.stdout.splitlines()]
    shown = [seconds.sub(" ", line) for line in shown_after(block)]
    assert [line for line in shown if line not in said] == [], done.stdout


def test_layout_is_shown_as_it_is() -> None:
    block = marked("a layout")
    (command,) = block.text.splitlines()
    done = CliRunner().invoke(app, shlex.split(command)[3:])
    assert done.exit_code == 0, done.output
    assert [line.rstrip() for line in done.stdout.splitlines()] == shown_after(block)
