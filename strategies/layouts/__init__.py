"""Layouts of embedding tables in recommender systems: which rank holds which rows and columns."""
