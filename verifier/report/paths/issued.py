"""What a redistribution really issued on the rank that was recorded, as words and as JSON."""

from __future__ import annotations

from typing import Any

from verifier.core.wording import bytes_text
from verifier.records.schema import PathRecord
from verifier.report.paths.words import time_text

__all__ = ["issued_lines", "measured_dict", "took_text"]


def issued_lines(record: PathRecord) -> list[str]:
    """Return a line for each collective that was issued; none if nothing was measured.

    Bytes are those of the tensors that the rank gave and got, padding included.
    """
    if record.measured and not record.issued:
        return ["no collective"]
    return [
        f"{one.name} of {one.dtype} over ranks {' '.join(map(str, one.ranks))}: "
        f"{bytes_text(one.sent)} given, {bytes_text(one.received)} got"
        for one in record.issued
    ]


def took_text(record: PathRecord) -> str:
    """Return the seconds and the peak on one line; empty if nothing was measured."""
    if not record.measured:
        return ""
    peak = f"up to {bytes_text(record.peak_bytes)} alive at once"
    if not record.seconds:
        return f"not timed; {peak}"
    mean = time_text(record.seconds / record.measured)
    if record.measured == 1:
        return f"{mean}; {peak}"
    return f"{mean} on average of {record.measured:,}, the fastest {time_text(record.fastest)}; {peak}"


def measured_dict(record: PathRecord) -> dict[str, Any] | None:
    """Return what was measured as JSON can have it; None if nothing was."""
    if not record.measured:
        return None
    return {
        "issued": [
            {
                "collective": one.name,
                "ranks": one.ranks,
                "dtype": one.dtype,
                "bytes_sent": one.sent,
                "bytes_received": one.received,
            }
            for one in record.issued
        ],
        "count": record.measured,
        "peak_bytes": record.peak_bytes,
        "seconds": record.seconds,
        "fastest_seconds": record.fastest,
    }
