"""The source of a program has each function that it calls, once."""

from __future__ import annotations

import gc
import inspect
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pkgutil import iter_modules

import torch

from strategies import chains
from verifier.findings.script.source import needs_its_module, parsed, program_source


def halved(values: torch.Tensor) -> torch.Tensor:
    return values if len(values) < 2 else ends(values[: len(values) // 2])


def ends(values: torch.Tensor) -> torch.Tensor:
    """Return the first element, by way of a function that calls this one."""
    return halved(values)


def program(values: torch.Tensor) -> torch.Tensor:
    return ends(values)


def test_functions_that_call_each_other() -> None:
    call = f"{__name__}.program"
    assert not needs_its_module(call)
    source = program_source(call)
    assert [source.count(f"def {name}(") for name in ("halved", "ends", "program")] == [1, 1, 1]
    assert source.index("def ends(") < source.index("def program(")


def with_a_class(values: torch.Tensor) -> torch.Tensor:
    class Doubled(torch.nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return 2 * given

    return Doubled()(values)


def test_a_class_inside_of_a_program_needs_no_module() -> None:
    assert not needs_its_module(f"{__name__}.with_a_class")


def test_programs_of_chains_need_torch_alone() -> None:
    modules = [import_module(f"{chains.__name__}.{one.name}") for one in iter_modules(chains.__path__)]
    calls = [
        f"{module.__name__}.{name}"
        for module in modules
        for name in getattr(module, "__all__", ())
        if inspect.isfunction(made := getattr(module, name)) and "x" in inspect.signature(made).parameters
    ]
    assert len(calls) > 30
    assert [call for call in calls if needs_its_module(call)] == []


def test_sources_are_parsed_by_several_threads_though_others_run_meanwhile() -> None:
    def run_others(*_: object) -> None:
        time.sleep(0)

    def parse() -> int:
        return len(parsed("x = [1, 2, (3, 4)]\n" * 300).body)

    before = gc.get_threshold()
    gc.callbacks.append(run_others)
    gc.set_threshold(50)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert [*pool.map(lambda _: parse(), range(8))] == [300] * 8
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(run_others)
