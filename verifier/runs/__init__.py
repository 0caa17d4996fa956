"""What lies on disk: runs, journals, summaries, coverage."""
