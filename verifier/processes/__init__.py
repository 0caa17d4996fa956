"""Child processes: forked from one that has loaded torch, watched and ended."""
