"""Where level 2 runs: processes that are ranks, or one process that simulates them."""
