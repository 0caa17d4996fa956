"""The entries of the baseline: known findings, and causes with a remedy."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from datetime import date
from typing import Self

import msgspec

from verifier.core.case import MeshSpec
from verifier.core.wording import version_key
from verifier.records.schema import FindingRecord, RunRecord, TrialRecord

__all__ = ["NOT_EXPLAINED", "BaselineEntry", "Cause", "entry_of", "torch_of"]

NOT_EXPLAINED = "not explained yet"
"""The placeholder for the reason that a person has to write. It does not count as a reason: the finding stays new."""


@dataclass(frozen=True, kw_only=True)
class BaselineEntry:
    """One known finding; the file has the fields in this order.

    ``summary`` is the first line of the finding's message. ``torch`` has the versions on which it was seen, ``mended``
    those on which it was tried and did not fail; of others nothing is known. ``expires`` is the last day on which it is
    accepted. ``groups`` has the symptoms of its failures before they are minimised.
    ``imports`` registered its rules; it is empty for torch's own. ``replay`` is a TrialRecord as JSON on one line.
    ``why_none`` says why there is no remedy.
    """

    fingerprint: str
    op: str
    family: str
    verdict: str
    rule: str
    mesh: str
    summary: str
    reason: str
    link: str = ""
    torch: tuple[str, ...]
    mended: tuple[str, ...] = ()
    expires: date
    imports: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    why_none: str = ""
    replay: str

    @property
    def explains(self) -> str:
        """How the entry explains a failure, for the report."""
        why = self.why_none or "none has been written"
        return f"looks like entry {self.fingerprint}, which has no remedy: {why}"

    @property
    def explained(self) -> bool:
        """Whether a person has given a reason."""
        return self.reason.strip() not in ("", NOT_EXPLAINED)

    def applies(self, imports: Collection[str], own_rules: Collection[str]) -> bool:
        """Return whether the entry is about the rules that a run verifies.

        An entry about torch's rule does not apply to a rule that the user registered instead. An entry about the rules
        of one set of imports does not apply to those of another set.

        Parameters
        ----------
        imports
            What the run imported.
        own_rules
            The ops whose rules these registered.
        """
        return set(self.imports) == set(imports) if self.imports or self.is_replaced(own_rules) else True

    def is_replaced(self, own_rules: Collection[str]) -> bool:
        """Return whether the op of the entry runs by one of ``own_rules``, so that its trial says nothing of torch."""
        return self.op in own_rules or self.rule.partition(":")[0] in own_rules

    def tried_under(self, torch: str, fails: bool) -> Self:
        """Return the entry with what a trial showed under one version of torch."""
        seen, mended = {*self.torch} - {torch}, {*self.mended} - {torch}
        (seen if fails else mended).add(torch)
        return replace(self, torch=_in_order(seen), mended=_in_order(mended))

    def trial(self) -> TrialRecord:
        """Return the trial to run again."""
        return msgspec.json.decode(self.replay, type=TrialRecord)

    def is_on(self, meshes: Collection[MeshSpec]) -> bool:
        """Return whether the trial is on a mesh of the same shape as one of ``meshes``, flattened as it is."""
        own = MeshSpec.parse(self.trial().mesh)
        return any((mesh.shape, mesh.flat) == (own.shape, own.flat) for mesh in meshes)


@dataclass(frozen=True, kw_only=True)
class Cause(BaselineEntry):
    """What one change to torch would mend, in whatever ops it shows; the other fields are of its smallest finding.

    ``where`` has the places in torch, each a file and a function. ``remedy`` is the name of a
    :class:`verifier.execution.remedies.Remedy`, and of this cause.
    """

    remedy: str
    title: str
    where: tuple[str, ...]

    @property
    def explains(self) -> str:
        return f"mended by remedy {self.remedy}"

    def applies(self, imports: Collection[str], own_rules: Collection[str]) -> bool:
        """Return whether the cause may show: a remedy changes what is torch's own, whatever else is registered."""
        return True


def torch_of(run: RunRecord) -> str:
    """Return the version of torch that a run verified, without a local suffix such as ``+cpu``."""
    return run.header.versions.get("torch", "unknown").partition("+")[0]


def entry_of(finding: FindingRecord, run: RunRecord, expires: date) -> BaselineEntry:
    """Return the entry of a finding of ``run``, without a reason."""
    entry = BaselineEntry(
        fingerprint=finding.fingerprint,
        op=finding.op,
        family=finding.family,
        verdict=finding.verdict,
        rule=finding.rule,
        mesh=finding.mesh,
        summary=finding.message.partition("\n")[0],
        reason=NOT_EXPLAINED,
        torch=(torch_of(run),),
        expires=expires,
        replay=msgspec.json.encode(finding.trial).decode(),
        groups=tuple(finding.groups),
    )
    imports = tuple(sorted(run.header.imports))
    return entry if entry.applies(imports, run.header.own_rules) else replace(entry, imports=imports)


def _in_order(versions: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(versions, key=version_key))
