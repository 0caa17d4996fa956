"""What an installed package declares is found by its own name, and refused by name where it does not fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol, runtime_checkable

import pytest

from verifier.core.entry_points import load_entry_points

GROUP = "dtensor_verifier_test.plugins"
PLUGINS = """
class Plugin:
    def __init__(self, name):
        self.name = name

    def run(self):
        pass

FIRST, SECOND, NONE = Plugin("first"), Plugin("second"), 7
"""


@runtime_checkable
class Runnable(Protocol):
    @property
    def name(self) -> str: ...

    def run(self) -> None: ...


def declare(folder: Path, *lines: str) -> None:
    (folder / "declared_plugins.py").write_text(PLUGINS)
    installed = folder / "plugins-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines]))


def test_what_is_declared_comes_by_its_own_name_in_the_order_of_the_entry_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(tmp_path, "b = declared_plugins:FIRST", "a = declared_plugins:SECOND")
    monkeypatch.syspath_prepend(tmp_path)
    loaded = load_entry_points(GROUP, Runnable)  # type: ignore[type-abstract]
    assert [(name, plugin.name) for name, plugin in loaded.items()] == [("second", "second"), ("first", "first")]


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(tmp_path, "c = declared_plugins:NONE")
    monkeypatch.syspath_prepend(tmp_path)
    message = "entry point c = declared_plugins:NONE is a <class 'int'>, not a Runnable"
    with pytest.raises(TypeError, match=re.escape(message)):
        load_entry_points(GROUP, Runnable)  # type: ignore[type-abstract]


def test_group_that_nobody_fills_is_empty() -> None:
    assert load_entry_points(GROUP, Runnable) == {}  # type: ignore[type-abstract]
