"""Torch's planners of redistributions and its cost model, asked without ranks."""
