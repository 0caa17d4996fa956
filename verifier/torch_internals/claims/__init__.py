"""What DTensor's strategies claim of a call, read without ranks: nothing is run on them."""
