"""The calls that are tested under the name of one OpInfo, at several sizes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from strategies.opinfo.calls.call import Call, attempt, quiet
from strategies.opinfo.calls.capture import MOST_CAPTURED, Origin, captured, entries_of, hidden, sharded
from strategies.opinfo.calls.op_facts import EVEN_SIZE, KEEP_VALUES, REGENERATIONS, SIZES, SKEWED
from strategies.opinfo.calls.op_names import base_of, home_rows, owners
from strategies.opinfo.samples.derived_overloads import families_with_rule, family, is_sibling
from strategies.opinfo.samples.sizes import resized
from verifier.rules.samples import SampleOptions
from verifier.torch_internals.names import OpOverload
from verifier.torch_internals.opinfo import opinfo_entries
from verifier.torch_internals.ops import cache_by_rules, registered_overloads

__all__ = ["Row", "Template", "registered_of", "spread", "wanted"]

_FOREIGN = 2  # one in two calls of overloads that belong to other rows, because these rows test them


@dataclass(frozen=True, eq=False)
class Template:
    """A captured call at its first size, and its origin.

    Parameters
    ----------
    size
        Which of the sizes the first one is.
    """

    origin: Origin
    call: Call
    label: str
    size: int = 0


class Row:
    """The captured calls of the OpInfos of one name.

    Parameters
    ----------
    name
        Name of the OpInfos.
    options
        How calls are drawn.
    overload
        If given, take only calls of this overload and its siblings, whatever row they belong to.
    most
        Of so many samples of each OpInfo calls are captured.
    """

    def __init__(
        self, name: str, options: SampleOptions, overload: OpOverload | None = None, most: int = MOST_CAPTURED
    ) -> None:
        self.name, self.options, self.overload, self._most = name, options, overload, most
        self.generator = torch.Generator()
        self._composite = name in _composite_rows()
        self._later: dict[tuple[int, int, int], dict[int, list[Call]]] = {}
        self.templates = self._chosen()

    def _wanted(self, op: OpOverload) -> bool:
        if self.overload is not None:
            return op == self.overload or is_sibling(op, self.overload)
        return wanted(op)

    def _chosen(self) -> dict[OpOverload, list[Template]]:
        """Return the templates of each overload that is tested here, without templates that differ only in values."""
        found: dict[OpOverload, dict[str, Template]] = defaultdict(dict)
        for place, entry in entries_of(self.name):
            variant = f"/{entry.variant_test_name}" if entry.variant_test_name else ""
            calls = self._captured(entry, 0)
            failing = {number for number, made in calls.items() if not all(map(_runs, made))}
            # half of an odd extent is not the other half: what OpInfo cuts in two fits at even extents only
            others = self._captured(entry, EVEN_SIZE, failing) if failing else {}
            for number, made in calls.items():
                size = EVEN_SIZE if others.get(number) and all(map(_runs, others[number])) else 0
                for (op, occurrence), call in _counted(others[number] if size else made).items():
                    origin = Origin(place, number, op, occurrence)
                    label = f"{self.name}{variant}, sample {number}" + (f", call {occurrence}" if occurrence else "")
                    found[call.op].setdefault(call.signature(), Template(origin, call, label, size))
        taken, most = self._taken(found), self.options.max_samples
        if most is not None and self.overload is None and not any(self.name in home_rows(op) for op in taken):
            most = max(_FOREIGN, most // _FOREIGN)
        return {op: spread(list(found[op].values()), most) for op in taken}

    def _captured(self, entry: Any, size: int, only: Collection[int] | None = None) -> dict[int, list[Call]]:
        return captured(
            entry,
            self.options.dtype,
            size=size,
            seed=self.options.seed,
            wanted=self._wanted,
            composite=self._composite,
            only=only,
            most=self._most,
        )

    def _taken(self, found: Iterable[OpOverload]) -> list[OpOverload]:
        """Return the overloads that belong to this row; else those that belong to no row; else all."""
        ops = list(found)
        if self.overload is not None:
            return ops
        own = [op for op in ops if self.name in home_rows(op)]
        return own or [op for op in ops if not owners(op) and sharded(op)] or [op for op in ops if sharded(op)]

    # ---------------------------------------------------------------------------------------------------------- sizes
    def at_size(self, template: Template, size: int, seed: int = 0) -> Call | None:
        """Return the call at size number ``size``, with OpInfo's values for ``seed``.

        The tensors are resized if the OpInfo has the same shapes at all sizes, or at the size whose extents must
        differ. The result is None if there is no such call, or if it is the same as at the first size.
        """
        if size == 0 and seed == 0:
            return template.call
        if size >= len(SIZES):
            return None
        if size == 0:
            size = template.size
        call = self._recaptured(template.origin, size, seed)
        if call is None or call.structure() != template.call.structure():
            return None
        if seed:
            return call
        same = call.signature() == template.call.signature()
        if (same or size in SKEWED) and base_of(template.origin.op) not in KEEP_VALUES:
            other = resized(call, size)
            if other is not None and other.signature() != template.call.signature():
                return other
        return None if same else call

    def regenerated(self, template: Template, size: int) -> Callable[[int], Call | None]:
        """Return a function from a draw's number to the call with OpInfo's values for that draw."""
        return lambda number: self.at_size(template, size, 1 + number % REGENERATIONS)

    def _recaptured(self, origin: Origin, size: int, seed: int) -> Call | None:
        key = (origin.entry, size, seed)
        if key not in self._later:
            origins = [t.origin for templates in self.templates.values() for t in templates]
            ops = set(self.templates)
            self._later[key] = captured(
                opinfo_entries()[origin.entry],
                self.options.dtype,
                size=size,
                seed=self.options.seed + 7919 * seed,
                wanted=lambda op: op in ops,
                composite=self._composite,
                only={each.sample for each in origins if each.entry == origin.entry},
            )
        return _counted(self._later[key].get(origin.sample, [])).get((origin.op, origin.occurrence))


def _counted(calls: Iterable[Call]) -> dict[tuple[str, int], Call]:
    """Return the calls by overload and by the number of earlier calls of the same overload."""
    counts: Counter[str] = Counter()
    counted = {}
    for call in calls:
        name = str(call.op)
        counted[name, counts[name]] = call
        counts[name] += 1
    return counted


def _runs(call: Call) -> bool:
    """Return whether torch accepts the call."""
    with quiet():
        return attempt(call) is not None


@cache_by_rules
def wanted(op: OpOverload) -> bool:
    """Return whether DTensor has a rule for ``op``, or for an overload whose calls can be made from calls of ``op``."""
    return sharded(op) or family(op) in families_with_rule()


@cache_by_rules
def registered_of() -> dict[str, tuple[OpOverload, ...]]:
    """Return the overloads that DTensor itself has a rule for, sorted, by the row that tests them."""
    rows: dict[str, list[OpOverload]] = defaultdict(list)
    for op in sorted(registered_overloads(), key=str):
        for row in home_rows(op):
            rows[row].append(op)
    return {row: tuple(ops) for row, ops in rows.items()}


@cache_by_rules
def _composite_rows() -> frozenset[str]:
    """Return the rows of overloads that autograd decomposes outside inference mode."""
    return frozenset(row for row, ops in registered_of().items() if any(hidden(op) for op in ops))


# -------------------------------------------------------------------------------------------------------------- spread
def spread(templates: Sequence[Template], most: int | None) -> list[Template]:
    """Return at most ``most`` of the templates, each chosen for numbers of dims and arguments that earlier ones lack.

    Among equal templates, calls without empty or one-element tensors come first, then earlier calls.
    """
    if most is None or len(templates) <= most:
        return list(templates)
    features = [_features(template.call) for template in templates]
    plain = [all(tensor.numel() > 1 for tensor in template.call.tensors) for template in templates]
    left = list(range(len(templates)))
    seen: set[str] = set()
    chosen: list[int] = []
    while left and len(chosen) < most:
        best = max(left, key=lambda i: (plain[i] or len(chosen) > 0, len(features[i] - seen), plain[i], -i))
        chosen.append(best)
        left.remove(best)
        seen |= features[best]
    return [templates[i] for i in sorted(chosen)]


def _features(call: Call) -> set[str]:
    shapes = [tuple(tensor.shape) for tensor in call.tensors]
    features = {f"ranks {[len(shape) for shape in shapes]}", f"equal {len(set(shapes)) == 1}"}
    features |= {f"dtype {tensor.dtype}" for tensor in call.tensors}
    if any(0 in shape for shape in shapes):
        features.add("empty")
    for name, value in call.values.items():
        if not isinstance(value, torch.Tensor):
            features.add(f"{name}={value if not _has_tensor(value) else 'tensors'}")
    return features


def _has_tensor(value: object) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value)
