"""Changes of calls that are found by asking rules of the user's: what they claim then, and which code is reached."""
