"""The judge: reference values, tolerance, verdicts."""
