"""``python -m verifier``."""

from verifier.entry import main

if __name__ == "__main__":
    main()
