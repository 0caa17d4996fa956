"""Plans what is tried: families, profiles, the trials of a case."""
