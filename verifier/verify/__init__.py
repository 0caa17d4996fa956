"""Verify one call from a test."""
