"""Level 2: a run of many trials within a budget, resumable, in parts."""
