"""Verify a whole model under a parallel plan."""
