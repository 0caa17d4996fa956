"""Level 1 over many ops, in worker processes."""
