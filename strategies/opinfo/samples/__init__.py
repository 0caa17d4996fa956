"""Samples for the rule check: a call at several sizes, spelled and filled in several ways."""
