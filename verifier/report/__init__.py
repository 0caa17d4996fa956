"""Writers: each turns a run's record into something to read. They run nothing."""
