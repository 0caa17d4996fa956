"""Rows that are scaled, and how they are sharded."""
