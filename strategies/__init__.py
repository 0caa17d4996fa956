"""Families: what is known of each group of ops."""
