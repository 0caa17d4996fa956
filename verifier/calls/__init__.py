"""One call from a test of the user's: its arguments, its result, the record of the session."""
