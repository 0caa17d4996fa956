"""Writers: each turns a run's record into something to read. None of them runs anything."""
