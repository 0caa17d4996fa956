"""Parts of a campaign, so that several machines can share it."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["RunPart"]


@dataclass(frozen=True, order=True)
class RunPart:
    """One of ``count`` parts of the cases of a campaign, counted from 1.

    Every part draws all cases and runs only its own. A case therefore has the same number in each part.

    >>> RunPart.parse("2/3"), [number for number in range(1, 8) if RunPart(2, 3).has(number)]
    (RunPart(index=2, count=3), [2, 5])
    """

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> RunPart:
        """Return the part that ``I/N`` names.

        Raises
        ------
        ValueError
            If the text is not of this form, or I is not from 1 to N.
        """
        found = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", text)
        if not found:
            raise ValueError(f"--shard {text!r} is not I/N, such as 1/3")
        index, count = int(found[1]), int(found[2])
        if not count:
            raise ValueError(f"--shard {text}: there is no part of 0; N is at least 1")
        if not 1 <= index <= count:
            raise ValueError(f"--shard {text}: shards are counted from 1, so I is from 1 to {count}")
        return cls(index, count)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def has(self, number: int) -> bool:
        """Return whether the case ``number``, counted from 1, belongs to this part."""
        return (number - 1) % self.count == self.index - 1
