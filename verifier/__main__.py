"""``python -m verifier``."""

if __name__ == "__main__":
    import gc

    # nothing that is loaded becomes garbage, and looking for some takes a second: a sixth of the time to load it, and
    # as long again when Python ends
    gc.disable()

    from verifier.entry import main

    gc.freeze()
    gc.enable()
    main()
