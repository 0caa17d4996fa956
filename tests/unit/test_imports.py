"""What ``--import`` runs: what it raises is said, and a run is not resumed with other code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from verifier import entry
from verifier.imports import ImportFailedError, run_imports
from verifier.meshes import PoolError
from verifier.revision import import_digests
from verifier.rules.workers import WorkerError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "my_rules"
    (folder / "kernels").mkdir(parents=True)
    (folder / "__init__.py").write_text("from my_rules.kernels import rows\ndef install(): rows.done = True\n")
    (folder / "kernels" / "__init__.py").touch()
    (folder / "kernels" / "rows.py").write_text("done = False\n")
    (tmp_path / "my_module.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] in ("my_rules", "my_module")]:
        del sys.modules[name]


def test_the_code_of_a_whole_package_counts(package: Path) -> None:
    names = ["my_rules.install", "my_rules.kernels.rows"]
    run_imports(names)
    before = import_digests(names)
    assert len({*before.values()}) == 1
    (package / "kernels" / "rows.py").write_text("done = None\n")
    after = import_digests(names)
    assert all(after[name] != before[name] for name in names)


def test_of_a_module_or_a_file_its_own_code_counts(package: Path) -> None:
    file = package.parent / "my_module.py"
    names = ["my_module", str(file), "sys"]
    run_imports(names)
    before = import_digests(names)
    assert before["my_module"] == before[str(file)]
    assert before["sys"] == ""
    (package / "kernels" / "rows.py").write_text("done = None\n")
    assert import_digests(names) == before
    file.write_text("x = 2\n")
    assert import_digests(["my_module"])["my_module"] != before["my_module"]


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("sys.exit('needs torch 3')", "SystemExit: needs torch 3"),
        ("sys.exit(0)", "SystemExit: 0"),
        ("sys.exit(None)", "SystemExit"),
        ("raise OSError('gone')", "OSError: gone"),
    ],
)
def test_a_file_that_quits_does_not_end_the_run_as_if_all_were_well(
    end: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "quits.py"
    file.write_text(f"import sys\n{end}\n")
    out = tmp_path / "none"
    monkeypatch.setattr(sys, "argv", ["verifier", "run", "embedding", "--import", str(file), "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: --import {file}: {said} ({file}:2)\n"
    assert not out.exists()
    with pytest.raises(ImportFailedError, match=said):  # in a rank, which reports exceptions and no exits
        run_imports([str(file)])


@pytest.mark.parametrize(("code", "status"), [(None, 0), (0, 0), (1, 1), (2, 2), ("no torch", 2)])
def test_only_an_exit_without_a_word_is_status_0(
    code: int | str | None, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry._status_of(lambda: sys.exit(code)) == status
    assert capsys.readouterr().err == ("no torch\n" if isinstance(code, str) else "")


@pytest.mark.parametrize("kind", [PoolError, WorkerError])
def test_a_file_that_fails_in_other_processes_alone_is_one_line(
    kind: type[RuntimeError], capsys: pytest.CaptureFixture[str]
) -> None:
    def failing() -> None:
        raise kind("a rank did not start: --import quits.py: SystemExit: 0")

    assert entry._status_of(failing) == 2
    assert capsys.readouterr().err == "error: a rank did not start: --import quits.py: SystemExit: 0\n"
