"""What code is written for: an op, its parameters as code names them, and what a way of registering cannot say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from verifier.deriving.learning.alike import as_one_result
from verifier.deriving.learning.evidence import CallEvidence
from verifier.planning.own_samples import callable_of, module_of
from verifier.torch_internals.names import OpOverload
from verifier.torch_internals.registries import asked_per_element

__all__ = ["CannotWriteError", "Provenance", "Subject", "Target", "strategy_name"]


class Target(StrEnum):
    """In which of DTensor's ways a strategy is registered; or the function that runs ``local_map`` by the rules."""

    SINGLE_DIM = "single-dim"
    REGISTER_SHARDING = "register-sharding"
    LOCAL_MAP = "local-map"


class CannotWriteError(ValueError):
    """A strategy cannot be registered in this way."""


@dataclass(frozen=True)
class Provenance:
    """What a derivation rests on, for the comment of the code.

    Parameters
    ----------
    imports
        Files and modules that define the op.
    """

    torch: str
    verifier: str
    meshes: str
    dtype: str
    seed: int
    command: str
    imports: Sequence[str] = ()


class Subject:
    """An op, the calls that its rules rest on, and the way of registering them.

    Raises
    ------
    CannotWriteError
        If no code can have rules of such calls in this way.
    """

    def __init__(self, op: OpOverload, calls: Sequence[CallEvidence], target: Target) -> None:
        self.op, self.calls, self.target = op, calls, target
        self.schema = op._schema.arguments
        self.tensors = [a.name for a in self.schema if "Tensor" in str(a.type)]
        self.lists = {a.name for a in self.schema if "List[" in str(a.type) and "Tensor" in str(a.type)}
        self.optional = {a.name for a in self.schema if str(a.type).startswith("Optional[") and "Tensor" in str(a.type)}
        absent = {name for call in calls for name in self.tensors if name not in call.slots}
        self.numbers = absent - self.optional - self.lists
        """Parameters for which some call has a number in the place of a tensor."""
        self.empty = absent & self.lists
        """Lists that have no tensor in some call."""
        self.path = callable_of(str(op)) or f"torch.ops.{op}"
        self.module = module_of(str(op))
        self.name = strategy_name(op)
        self._refuse()

    def _refuse(self) -> None:
        """Raise for what no code can say in this way."""
        if any(argument.is_out for argument in self.schema) and self.op.namespace == "aten":
            raise CannotWriteError(
                f"{self.op}: DTensor makes the strategy of an overload with out= from its base overload{_base(self.op)}"
            )
        counts = {len(call.results) for call in self.calls if call.rules} if self.returns_list else set()
        if len(counts) > 1 and not self.alike:
            raise CannotWriteError(
                f"{self.op}: it returns {' or '.join(map(str, sorted(counts)))} tensors of different numbers of dims, "
                "which code cannot tell apart; let the op return as many in each call, or a tuple"
            )
        if callable_of(str(self.op)) and self.target is not Target.LOCAL_MAP:
            raise CannotWriteError(
                f"{self.path} is a function and no op, so it has no strategy; use --target local-map"
            )
        if self.target is Target.LOCAL_MAP and any(argument.alias_info is not None for argument in self.schema):
            raise CannotWriteError(f"{self.op}: it returns or writes to its arguments, which local_map cannot do")
        if self.target is not Target.LOCAL_MAP and self._is_named_in_place and not self._returns_first:
            raise CannotWriteError(
                f"{self.op}: of an op whose name ends with an underscore DTensor returns the first argument, or "
                "nothing, whatever the op returns; under another name it can have a strategy"
            )
        if self.target is Target.REGISTER_SHARDING and self.written:
            raise CannotWriteError(
                f"{self.op}: by register_sharding, DTensor writes to a copy of {self.written[0]} where it "
                "redistributes it, and the caller does not see that; use --target single-dim"
            )
        given = {slot for call in self.calls for slot in call.slots}
        keyword = [
            a.name for a in self.schema
            if a.kwarg_only and not a.is_out and a.name in self.tensors and a.name in given
        ]  # fmt: skip
        if keyword and self.target is not Target.LOCAL_MAP:
            raise CannotWriteError(
                f"{self.op}: DTensor does not redistribute a tensor that is given by keyword, as {keyword[0]} is, so "
                "that no strategy of it is right; let it be positional, or use --target local-map"
            )
        if self.target is Target.REGISTER_SHARDING and (problem := self.not_for_register_sharding()):
            raise CannotWriteError(f"{self.op}: register_sharding cannot place {problem}; use --target single-dim")

    def not_for_register_sharding(self) -> str:
        """Return what the public function cannot place; empty if it can place everything."""
        keyword = [a.name for a in self.schema if a.kwarg_only and a.name in self.tensors]
        return (
            f"the list {min(self.lists)}" if self.lists else f"the keyword {keyword[0]}" if keyword
            else "a list of results" if any("List" in str(result.type) for result in self.op._schema.returns)
            else "None for a result" if any(call.absent for call in self.calls) else ""
        )  # fmt: skip

    @property
    def per_element(self) -> bool:
        """Whether DTensor asks the strategy of one tensor of each list at a time, and one rule can say it of all."""
        listed = self.target is Target.SINGLE_DIM and bool(self.lists) and asked_per_element(self.op)
        return listed and (self.alike or not self.returns_list)

    @property
    def written(self) -> list[str]:
        """The parameters that the op writes to and of which DTensor would hand on a copy where it redistributes them.

        It leaves the first argument as it is if the name of the op ends with an underscore, and those of ``out=``.
        """
        looked_at = [a.name for a in self.schema[:1] if self._is_named_in_place and a.name not in self.lists]
        return [a.name for a in self.schema if _is_written(a) and not a.is_out and a.name not in looked_at]

    @property
    def _is_named_in_place(self) -> bool:
        return self.op._opname.endswith("_")

    @property
    def _returns_first(self) -> bool:
        """Whether the op returns its first argument alone, or nothing."""
        returns, first = [one.alias_info for one in self.op._schema.returns], self.schema[0].alias_info
        if len(returns) != 1 or first is None:
            return not returns
        return returns[0] is not None and returns[0].before_set == first.before_set

    @property
    def returns_list(self) -> bool:
        """Whether the op returns a list of tensors."""
        return any("List" in str(result.type) for result in self.op._schema.returns)

    @property
    def returns_numbers(self) -> bool:
        """Whether the op returns something beside tensors."""
        return any("Tensor" not in str(result.type) for result in self.op._schema.returns)

    @property
    def alike(self) -> bool:
        """Whether all tensors of the list that the op returns are placed alike."""
        return as_one_result(self.calls)

    @property
    def count_of_results(self) -> str:
        """How many tensors the op returns, as code: as many as a list among the arguments has, or what the op says."""
        calls = [call for call in self.calls if call.rules]
        lengths = [
            dict.fromkeys(self.lists, 0)
            | {name: len(value) for name, value in call.values.items() if isinstance(value, list)}
            | {name: length for name, length in zip(call.slots, call.lengths, strict=True) if name in self.lists}
            for call in calls
        ]
        counts = [len(call.results) - len(call.gradients) for call in calls]
        named = next((name for name in lengths[0] if counts == [known.get(name) for known in lengths]), "")
        return f"len({named})" if named else "count_of_results"

    def is_there(self, name: str) -> str:
        """Return the condition that a call has a tensor for a parameter; empty if it always has."""
        return (
            f"{name} is not None"
            if name in self.optional
            else f'hasattr({name}, "shape")'
            if name in self.numbers
            else f"len({name}) > 0"
            if name in self.empty
            else ""
        )

    @property
    def may_lack_tensors(self) -> bool:
        """Whether some calls have no tensor for a parameter."""
        return any(map(self.is_there, self.tensors))

    def given_tensors(self) -> str:
        """Return the list of the tensors that a call has."""
        whole = ", ".join(f"*{name}" if name in self.lists else name for name in self.tensors)
        return f'[one for one in [{whole}] if hasattr(one, "shape")]' if self.may_lack_tensors else f"[{whole}]"

    @property
    def sees_mesh(self) -> bool:
        """Whether the function of the rules is told on which mesh its tensors are."""
        return self.target is Target.REGISTER_SHARDING

    def parameters(self) -> str:
        """Return the parameters of the op as those of a function."""
        texts, keyword = [], False
        for argument in self.schema:
            if argument.kwarg_only and not keyword:
                keyword = True
                texts.append("*")
            default = argument.default_value if argument.has_default_value() else None
            optional = argument.has_default_value()
            texts.append(argument.name + (f"={_literal(default)}" if optional else ""))
        return ", ".join(texts)

    def given(self) -> str:
        """Return the arguments that hand these parameters on."""
        return ", ".join(given_as(a.name, a.name, a.kwarg_only) for a in self.schema)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _base(op: OpOverload) -> str:
    """Return the overload that has the same arguments but for those of ``out=``, as the thing to derive; else empty."""
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]
    packet = op.overloadpacket
    for name in packet.overloads():
        if [(a.name, str(a.type)) for a in getattr(packet, name)._schema.arguments] == wanted:
            return f"; derive {op.namespace}.{op._opname}.{name}"
    return ""


def given_as(name: str, value: str, keyword: bool) -> str:
    """Return an argument of a call."""
    return f"{name}={value}" if keyword else value


def strategy_name(op: OpOverload) -> str:
    """Return what the functions of a derived strategy begin with."""
    return re.sub(r"\W", "_", callable_of(str(op)) or str(op).removesuffix(".default"))


def _literal(value: object) -> str:
    plain = value is None or isinstance(value, bool | int | float | str | list)
    return repr(value) if plain else "None"
