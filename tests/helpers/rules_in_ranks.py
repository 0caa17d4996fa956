"""Tasks by which ranks that run already put rules in the place of torch's, and take them back."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from verifier.core.ops import resolve
from verifier.torch_internals.caches import clear_caches
from verifier.torch_internals.registries import let_new_rules_win, registries_of_rules

_before: list[tuple[dict[object, object], ...]] = []


def register(mesh: DeviceMesh, path: str) -> None:
    """Call the function at the dotted ``path``, which registers rules with DTensor in this rank."""
    _before.append(tuple(dict(registry) for registry in registries_of_rules()))
    with let_new_rules_win():
        resolve(path)()
    clear_caches()


def take_back(mesh: DeviceMesh) -> None:
    """Have the rules of before again. A rank that has taken the place of a lost one has never had others."""
    while _before:
        for registry, old in zip(registries_of_rules(), _before.pop(), strict=True):
            registry.clear()
            registry.update(old)
    clear_caches()
