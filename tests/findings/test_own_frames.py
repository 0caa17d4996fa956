"""A crash in a strategy of the user's shows the lines of the user's files, and no others."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

from verifier.execution.imports import run_file
from verifier.findings.own_frames import own_frames, refuses

SOURCE = """
import torch


def dims(x):
    return {}[x.ndim]


def strategy(x):
    for dim in dims(x):
        yield dim
"""


def test_the_lines_of_the_users_are_shown_down_to_the_one_that_raised(tmp_path: Path) -> None:
    file = tmp_path / "crashing_rules.py"
    file.write_text(SOURCE)
    rules = run_file(file)
    try:
        pytree.tree_map(lambda x: list(rules.strategy(x)), [torch.ones(2)])
    except KeyError as error:
        try:
            raise RuntimeError("sharding propagation failed") from error  # as DTensor does
        except RuntimeError:
            text = traceback.format_exc()
    frames = [frame for frame in own_frames(text) if not frame.startswith(__file__)]
    assert frames == [f"{file}:10 in strategy: for dim in dims(x):", f"{file}:6 in dims: return {{}}[x.ndim]"]


def test_a_crash_inside_torch_alone_shows_no_line() -> None:
    assert own_frames(f'  File "{torch.__file__}", line 3, in op\n    raise KeyError\nKeyError') == []
    assert own_frames("RuntimeError: no traceback") == []


def test_what_a_strategy_raises_itself_is_told_from_what_it_trips_over() -> None:
    frame = '  File "/home/me/my_rules.py", line 3, in rule\n    {}\n'
    end = "ValueError: no scalars\n\nSharding propagation failed for Op(op=aten.cumsum.default)"
    assert refuses(frame.format('raise ValueError("no scalars")') + end)
    assert refuses(frame.format('if not x.ndim: raise ValueError("no scalars")') + end)
    assert not refuses(frame.format("return sizes[9]") + end)
    assert not refuses(frame.format('raise ValueError("no scalars")') + "ValueError: no scalars")  # in a kernel, say
    assert not refuses(end)
