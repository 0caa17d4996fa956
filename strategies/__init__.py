"""Families, which know the inputs of a group of ops, and our own sharding strategies for some ops."""

from __future__ import annotations

from contextlib import AbstractContextManager

__all__ = ["install", "install_all", "installed"]


def install(what: str = "embeddings") -> None:
    """Let DTensor shard embeddings by our own strategies instead of torch's, in this process and from now on.

    ``--import strategies.install`` does so in the controller and in every rank.

    Parameters
    ----------
    what
        ``"embeddings"``, or ``"all"`` for all remedies of known causes as well.

    Raises
    ------
    ValueError
        For anything else.
    """
    # Imported here, so that the import of a family's program does not load the strategies.
    from strategies.installing import install, install_remedies

    if what not in ("embeddings", "all"):
        raise ValueError(f"install({what!r}): expected 'embeddings' or 'all'")
    install()
    if what == "all":
        install_remedies()


def install_all() -> None:
    """Do as ``install("all")``: ``--import strategies.install_all`` does so in the controller and in every rank."""
    install("all")


def installed() -> AbstractContextManager[None]:
    """Return a context inside which DTensor shards embeddings by our own strategies."""
    from strategies.installing import installed

    return installed()
