"""Runs on disk: journals, summaries, coverage."""
