"""Calls of the user's own ops, for both levels: from examples that were declared, or else from the op's schema."""
