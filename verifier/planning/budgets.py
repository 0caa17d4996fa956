"""Profiles of campaigns: how much of what Hypothesis draws is tried."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CAMPAIGN_PROFILES", "CampaignProfile"]


@dataclass(frozen=True)
class CampaignProfile:
    """How much a campaign tries: ``max_examples`` cases per mesh and ``combinations_per_case`` of each.

    It ends after ``time_limit`` seconds if that is not None, whatever is left.
    """

    name: str
    max_examples: int
    combinations_per_case: int
    time_limit: float | None = None


CAMPAIGN_PROFILES = {
    profile.name: profile
    for profile in (
        CampaignProfile("dev", max_examples=10, combinations_per_case=16),
        CampaignProfile("ci", max_examples=30, combinations_per_case=32),
        # on three mesh dims a trial may take DTensor a second, so there the night's time is the limit
        CampaignProfile("nightly", max_examples=400, combinations_per_case=256, time_limit=8 * 3600.0),
        CampaignProfile("gpu", max_examples=30, combinations_per_case=32),
    )
}
