"""The code of the user's sharding rules: what stands in it, and which of it a call reaches."""
