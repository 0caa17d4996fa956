"""The oracle: reference values, tolerance, verdicts."""
