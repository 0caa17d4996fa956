"""What stands for the code that ``--import`` runs: a run is not resumed with other code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from verifier.imports import import_digests, run_imports


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
