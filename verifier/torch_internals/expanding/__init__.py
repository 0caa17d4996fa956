"""How DTensor expands rules for one mesh dim to all of them, and the rules of a strategy that reads no placements."""
