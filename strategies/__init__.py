"""Families, which know the inputs of a group of ops, and our own sharding strategies for some ops."""

from __future__ import annotations

from contextlib import AbstractContextManager

__all__ = ["install", "installed"]


def install() -> None:
    """Let DTensor shard embeddings by our own strategies instead of torch's, in this process and from now on.

    ``--import strategies.install`` does so in the controller and in every rank.
    """
    # Imported here, so that the import of a family's program does not load the strategies.
    from strategies.installing import install

    install()


def installed() -> AbstractContextManager[None]:
    """Return a context inside which DTensor shards embeddings by our own strategies."""
    from strategies.installing import installed

    return installed()
