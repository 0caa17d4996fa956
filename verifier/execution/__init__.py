"""One rank's part of a trial."""
