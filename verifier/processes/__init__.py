"""Child processes: started, watched and ended, and what they set up for themselves."""
