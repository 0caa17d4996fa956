"""What is stored: the schema of ``run.json``, of findings and of stored cases.

Every stored file begins with a ``format_version``. The JSON is these dataclasses, field by field, as msgspec writes
them; ``docs/reference/run-schema.json`` is generated from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verifier.core.wording import plural

FORMAT_VERSION = 8
"""Version of records, journals and findings. Since version 3, known findings say how they were explained."""

READ_VERSIONS = (5, 6, 7, 8)
"""Versions that are read. What later versions added has a default.

Since version 6, paths say which collectives were really issued. Since version 7, findings say where the strategy is,
and what was not tried says what a user has to do before the run counts. Since version 8, the rule check says which code
of a user's strategy no call reached.
"""


NOT_SELECTED = "is not selected"
"""The detail of a :class:`KnownRecord` whose op the run did not select."""

OUT_OF_TIME = "not reached within the time limit"
"""Why something was not tried: the run had no time."""

FAILS = "fails as described"
GONE = "did not fail"
NOT_RUN = "not run"
"""Outcomes of a finding's script; others say how it broke off."""

INTERRUPTED = "interrupted"
"""Why something was not tried: a Ctrl-C ended the run."""


@dataclass
class TensorRecord:
    """A tensor by value. ``values`` is flat and row-major; nan and infinities are strings, complex numbers pairs.

    ``order`` has the dims of a tensor that is not contiguous, the outermost in memory first. If it is empty, they are
    from the last to the first. ``strides`` has those of a tensor whose elements share memory or have gaps in between.
    """

    dtype: str
    shape: list[int]
    values: list[Any]
    contiguous: bool = True
    requires_grad: bool = False
    parameter: bool = False
    order: list[int] = field(default_factory=list)
    strides: list[int] = field(default_factory=list)


@dataclass
class CaseRecord:
    """A call by value. An argument that holds a tensor is ``{"tensor": TensorRecord}``; lists nest."""

    op: str
    call: str
    args: list[Any]
    kwargs: dict[str, Any]
    family: str = ""
    exact: bool = True
    tags: list[str] = field(default_factory=list)


@dataclass
class TrialRecord:
    """Enough to run one trial again, whatever the versions of the generators."""

    case: CaseRecord
    mesh: str
    device: str
    combination: list[str]
    cotangents: list[list[str]]
    seed: int = 0


CONFIRMED = "confirmed"
UNCONFIRMED = "unconfirmed"
NOT_TRIED = "not tried"
"""Values of a confirmation's status; only special values, which accuse no rule, are "not tried"."""


@dataclass
class ConfirmationRecord:
    """Whether real processes showed a finding, or an accused rule, once more.

    ``status`` is ``"confirmed"``, ``"unconfirmed"`` or ``"not tried"``. ``backend`` and ``ranks`` say what showed it;
    ``why`` says why nothing did, or in which earlier run something did.
    """

    status: str
    backend: str = ""
    ranks: int = 0
    why: str = ""

    @property
    def unsure(self) -> bool:
        """Whether the tool accuses without evidence from real processes."""
        return self.status == UNCONFIRMED

    @property
    def text(self) -> str:
        """As one line.

        >>> ConfirmationRecord("confirmed", "gloo", 1).text
        'confirmed on gloo, 1 rank'
        >>> ConfirmationRecord("unconfirmed", why="the script ran").text
        'unconfirmed: the script ran'
        """
        if self.status == CONFIRMED:
            return f"confirmed on {self.backend}, {plural(self.ranks, 'rank')}" + (f", {self.why}" if self.why else "")
        return f"{self.status}: {self.why}" if self.why else self.status


@dataclass
class FindingRecord:
    """A deduplicated, minimised and confirmed bad verdict.

    ``message`` has three lines: difference, call, likely cause. ``script`` needs only torch, and ``imports`` if there
    are any. ``rank_memory`` is the limit under which a replay shows the finding; empty if memory does not matter.
    ``script_status`` is ``"fails as described"``, ``"did not fail"``, ``"not run"`` with a reason, how the script broke
    off, or why there is none.
    """

    fingerprint: str
    op: str
    family: str
    verdict: str
    level: int
    mesh: str
    input_placements: dict[str, str]
    output_placements: list[str]
    known: bool
    phase: str
    subject: str
    dtype: str
    rule: str
    message: str
    confirmed: ConfirmationRecord
    minimised: bool
    occurrences: int
    trial: TrialRecord
    script: str
    script_status: str
    reason: str = ""
    also: list[str] = field(default_factory=list)
    """Other combinations and meshes in which the same defect showed, as text."""
    cotangent: str = ""
    imports: list[str] = field(default_factory=list)
    """The user's modules and files with which it was found; the script runs them first."""
    rank_memory: str = ""
    groups: list[str] = field(default_factory=list)
    """The keys, before minimising, of failures that turned out to be this defect: op, verdict, place, rule."""
    explained: str = ""
    """How a known finding was explained: the remedy that mends it, or the entry that it looks like."""
    strategy: str = ""
    """Where the strategy is defined that claims the rule, as FILE:LINE; torch's files are named from torch's folder."""
    format_version: int = FORMAT_VERSION


@dataclass
class KnownRecord:
    """A baseline entry that this run tried again: ``status`` is ``known`` (still fails), ``fixed`` or ``untested``.

    ``selected`` is false if the run did not select the op of the entry.
    """

    fingerprint: str
    status: str
    detail: str = ""
    selected: bool = True


@dataclass
class UntestedRecord:
    """``what`` was not tried, ``count`` times, because of ``reason``.

    ``remedy`` says what a user has to do before a run is evidence of ``what``; empty if it is evidence as it is.
    """

    what: str
    reason: str
    count: int
    remedy: str = ""


@dataclass
class EdgeCoverageRecord:
    """The edges between placements of one mesh dim: how many are ``possible``, and which explicit redistributions took.

    ``refused`` has the edges that occurred only in redistributions that DTensor does not support.
    """

    possible: int
    exercised: list[str]
    refused: list[str]


@dataclass
class RuleCoverageRecord:
    """The rules that DTensor claims for an op, as input placements on one mesh dim, and the rules that ran."""

    claimed: list[str]
    exercised: list[str]


@dataclass
class MatrixRecord:
    """Verdicts by the placements of the first two tensor arguments: ``cells[row][column][verdict]`` is a count."""

    op: str
    mesh: str
    row_name: str
    column_name: str
    cells: dict[str, dict[str, dict[str, int]]]


@dataclass
class EdgeRecord:
    """Steps of one kind that DTensor took: ``bytes`` and ``count`` are totals over the run (rank 0's view)."""

    source: str
    target: str
    mesh: str
    mesh_dim: int
    collective: str
    bytes: int
    count: int
    phases: dict[str, int]


@dataclass
class IssuedRecord:
    """A collective as rank 0 issued it: its name in ``torch.distributed``, the ranks of its group, and the dtype.

    ``sent`` and ``received`` are bytes of the tensors that the rank gave and got, padding included.
    """

    name: str
    ranks: list[int]
    dtype: str
    sent: int
    received: int


@dataclass
class PathRecord:
    """Redistributions of equal tensors by equal steps, for one op on one mesh (rank 0's view).

    ``steps`` has the collective of each step, empty for a local one, and the placements after it. ``tensor`` is dtype
    and global shape, as ``float32[8, 4]``. ``explicit`` is true if the caller asked for the redistribution, and else
    ``by`` is the op whose dispatch did. ``given`` has the placements of the call's tensor arguments if the op of the
    call itself did in the forward pass, and else nothing; ``call`` then has the call without the sizes of its tensors.

    ``repeats`` is the op for which the same tensor was redistributed in the same way before, ``undoes`` the op for
    which was gathered what is now sharded again; both are empty in most cases.

    ``measured`` counts those that were measured: on real ranks, in the forward and backward pass. Each of them issued
    the collectives ``issued``. ``peak_bytes`` is the most bytes of local tensors that were alive at once, ``seconds``
    the time of all together, waiting for other ranks included, and ``fastest`` that of the fastest; 0 on GPUs.
    """

    op: str
    mesh: str
    tensor: str
    source: str
    target: str
    steps: list[tuple[str, str]]
    explicit: bool
    count: int
    phases: dict[str, int]
    given: str = ""
    by: str = ""
    repeats: str = ""
    undoes: str = ""
    issued: list[IssuedRecord] = field(default_factory=list)
    measured: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0
    fastest: float = 0.0
    call: str = ""


@dataclass
class CallRecord:
    """Calls of an overload on a mesh with tensor arguments placed as ``given``: ``count`` trials passed."""

    op: str
    mesh: str
    given: str
    count: int


@dataclass
class GraphRecord:
    nodes: list[str]
    edges: list[EdgeRecord]
    paths: list[PathRecord] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)


@dataclass
class TransferRecord:
    """A collective on one argument: ``bytes`` is the size of the largest local tensor that enters it."""

    argument: int
    source: str
    target: str
    collective: str
    bytes: int


@dataclass
class WrongRuleRecord:
    """A claim of DTensor's that a counterexample refutes.

    ``op`` is the aten overload, ``origin`` the sample that shows it; ``input_placements`` are those on which DTensor
    runs the op. ``fingerprint`` names the finding and is empty for a rule that was not confirmed. ``draws`` counts the
    draws that refute it. ``fails`` is true if DTensor failed when it was asked for rules, so that there is no claim and
    no output placement. It is also true if DTensor fails on replicated tensors, so that it can apply no rule at all.
    """

    op: str
    input_placements: list[str]
    output_placements: list[str]
    mesh: str
    shapes: list[list[int]]
    arguments: str
    origin: str
    verdict: str
    message: str
    confirmed: ConfirmationRecord
    fingerprint: str
    known: bool
    draws: int
    fails: bool = False

    @property
    def follows(self) -> bool:
        """Whether it was not tried because another rule of its finding, which was, makes it wrong."""
        return bool(self.fingerprint) and self.confirmed.status == NOT_TRIED


@dataclass
class MissingRuleRecord:
    """A rule that held in each of ``draws`` draws over ``sizes`` sets of shapes, where DTensor communicates or refuses.

    ``saves`` has what DTensor runs instead at the given shapes; empty if it refuses. ``verdict`` is ``MISSING``.
    ``samples`` counts the samples of the op in which it is missing, and ``calls`` has their calls without sizes.
    """

    op: str
    input_placements: list[str]
    output_placements: list[str]
    shapes: list[list[int]]
    arguments: str
    origin: str
    draws: int
    sizes: int
    world_sizes: list[int]
    saves: list[TransferRecord]
    collectives_saved: int
    bytes_saved: int
    samples: int = 1
    verdict: str = "MISSING"
    calls: list[str] = field(default_factory=list)


@dataclass
class OpRulesRecord:
    """What level 1 says of one op.

    ``combinations`` counts pairs of input placements and one output's placement that have a verdict, ``runs`` how often
    input placements were run, over all draws. ``confirmed`` lists the claims that held in every draw, as text.
    ``special`` has claims that fail only for infinities, NaN, -0.0 and values at a threshold. ``untested`` maps reasons
    to numbers of combinations. ``not_testable`` maps overloads to the reason. ``seconds`` is the time of one worker.
    ``unreached`` has the lines of a user's strategy, as ``FILE:LINE``, that DTensor ran for no call.
    """

    overloads: list[str]
    samples: int
    combinations: int
    runs: int
    confirmed: list[str]
    wrong: list[WrongRuleRecord]
    unconfirmed: list[WrongRuleRecord]
    missing: list[MissingRuleRecord]
    special: list[WrongRuleRecord]
    inconclusive: list[str]
    untested: dict[str, int]
    not_testable: dict[str, str]
    died: list[str]
    seconds: float
    unreached: list[str] = field(default_factory=list)


@dataclass
class RulesRecord:
    """The rule check of one run. ``seconds`` is the wall time of all checks, without starting and confirming."""

    combinations: int
    seconds: float
    seconds_starting: float
    seconds_confirming: float
    jobs: int
    meshes: list[str]
    dtype: str
    sizes: int
    claims_only: bool
    ops: dict[str, OpRulesRecord]


@dataclass
class RunHeader:
    """Everything that was decided before the run began."""

    id: str
    started: str
    seed: int
    profile: str
    families: list[str]
    meshes: list[str]
    dtypes: list[str]
    device: str
    max_examples: int
    time_limit: float | None
    imports: list[str]
    versions: dict[str, str]
    command: str
    shard: str = ""
    """``I/N`` if only that part of the cases was tried."""
    request: dict[str, Any] = field(default_factory=dict)
    """The request as text, from which a run that was cut short is resumed; empty if it cannot be resumed."""
    digests: dict[str, str] = field(default_factory=dict)
    """Digests of the sources that decide the outcome (see :mod:`verifier.runs.revision`), and of the baseline."""
    places: str = ""
    """Where the ranks were; empty if each was a process of this machine with its own devices."""
    own_rules: list[str] = field(default_factory=list)
    """The ops whose rules ``imports`` registered, instead of torch's rules or because torch has none."""


@dataclass
class RunRecord:
    """One recorded run: the whole of ``run.json``.

    ``counts`` maps each verdict to its number of trials; ``coverage`` maps each class of input to the number of trials
    in it; ``seconds_by`` maps each share of the time to seconds summed over ranks; ``rule_coverage`` maps ops to the
    rules that level 2 exercised, ``edge_coverage`` the number of mesh dims to the edges between placements.
    """

    header: RunHeader
    seconds: float
    complete: bool
    trials: int
    counts: dict[str, int]
    counts_by_op: dict[str, dict[str, int]]
    counts_by_mesh: dict[str, dict[str, int]]
    coverage: dict[str, int]
    findings: list[FindingRecord]
    baseline: list[KnownRecord]
    untested: list[UntestedRecord]
    matrices: list[MatrixRecord]
    graph: GraphRecord
    pool_restarts: int
    seconds_by: dict[str, float]
    inconclusive: dict[str, int] = field(default_factory=dict)
    unsupported: dict[str, int] = field(default_factory=dict)
    tool_errors: list[str] = field(default_factory=list)
    rules: RulesRecord | None = None
    rule_coverage: dict[str, RuleCoverageRecord] = field(default_factory=dict)
    edge_coverage: dict[str, EdgeCoverageRecord] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION
