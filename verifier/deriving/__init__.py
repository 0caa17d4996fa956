"""From an op to a sharding strategy: what holds for its calls, said as rules of their arguments, as code."""
