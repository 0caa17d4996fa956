"""How DTensor expands rules for one mesh dim to all of them, cut down to what matters for claims."""
