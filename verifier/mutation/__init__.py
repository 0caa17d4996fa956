"""Mutation testing of sharding strategies: which changes to a strategy's source the rule check notices."""
