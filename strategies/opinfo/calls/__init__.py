"""Calls of aten overloads: captured from OpInfo, named, run."""
