"""Amendments to ``fully_shard``: how it gathers weights, and reduces and keeps their gradients."""
