"""``python -m verifier``, and the script ``dtensor-verifier``."""

from verifier.cli.loading import Loading

__all__ = ["main"]


def main() -> None:
    """Load the program and run it."""
    with Loading():
        from verifier.cli import main as entry
    entry.main()


if __name__ == "__main__":
    main()
