"""What holds for the calls of an op, and the rules of their arguments that explain it."""
