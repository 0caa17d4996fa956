"""From an op to a sharding strategy that passed the checks."""
