"""Samples for the rule check: a call at several sizes, with several spellings and values."""
