"""Families: what is known of each group of ops; and our own sharding strategies for some of them."""

from __future__ import annotations

from contextlib import AbstractContextManager

__all__ = ["install", "installed"]


def install() -> None:
    """Let DTensor shard embeddings by our own strategies in this process, from now on, in the place of torch's.

    ``--import strategies.install`` does so in the controller and in every rank.
    """
    # Not at the top: whoever imports a program of a family needs none of this.
    from strategies.installing import install

    install()


def installed() -> AbstractContextManager[None]:
    """Return a context inside which DTensor shards embeddings by our own strategies, and after it as before."""
    from strategies.installing import installed

    return installed()
