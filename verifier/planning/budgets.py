"""Profiles of campaigns: how much of what Hypothesis draws is tried."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CAMPAIGN_PROFILES", "DEFAULT_PROFILE", "OWN_RULES", "CampaignProfile"]

DEFAULT_PROFILE = "dev"
OWN_RULES = "own"
"""The profile for all that imports register, if no pattern is given: its answer comes in seconds."""


@dataclass(frozen=True)
class CampaignProfile:
    """How much a campaign tries: ``max_examples`` cases per mesh and ``combinations_per_case`` of each.

    It ends after ``time_limit`` seconds if that is not None, whatever is left.

    Parameters
    ----------
    meshes
        The meshes if the user names none; empty for the usual ones.
    trial_limit
        Seconds after which ranks that wait for each other hang.
    minimising
        Seconds for minimising a failure; None for the usual.
    hash_seeds
        Hash seeds of the ranks, each of which takes a process that loads torch; None for one each.
    backward_every
        On several mesh dims one of so many trials has a backward pass, with replicated, sharded and partial gradients
        in turn, and the others have none. DTensor plans each pass on every rank, which takes most of the time there. 0
        if each trial has all three.
    """

    name: str
    max_examples: int
    combinations_per_case: int
    time_limit: float | None = None
    meshes: tuple[str, ...] = ()
    trial_limit: float = 20.0
    minimising: float | None = None
    hash_seeds: int | None = None
    backward_every: int = 0


CAMPAIGN_PROFILES = {
    profile.name: profile
    for profile in (
        CampaignProfile("dev", max_examples=10, combinations_per_case=16),
        CampaignProfile("ci", max_examples=30, combinations_per_case=32),
        # on three mesh dims a trial may take DTensor a second, so there the night's time is the limit
        CampaignProfile("nightly", max_examples=400, combinations_per_case=256, time_limit=8 * 3600.0),
        CampaignProfile("gpu", max_examples=30, combinations_per_case=32),
        # level 1 tries three ranks, too. These are enough cases for each claimed rule of most ops, and on two ranks
        # all of their combinations.
        CampaignProfile(
            OWN_RULES,
            max_examples=6,
            combinations_per_case=10,
            meshes=("2", "2x2"),
            trial_limit=10.0,
            minimising=4.0,
            hash_seeds=2,
            backward_every=3,
        ),
    )
}
