"""The baseline of known findings, and the decision on a set of evidence."""
