"""Tasks in which running ranks replace torch's rules, and restore them."""

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
    """Restore the rules. A rank that has replaced a lost rank never had others."""
    while _before:
        for registry, old in zip(registries_of_rules(), _before.pop(), strict=True):
            registry.clear()
            registry.update(old)
    clear_caches()
