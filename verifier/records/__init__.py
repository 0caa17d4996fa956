"""The file format of runs, and tensors as text."""
