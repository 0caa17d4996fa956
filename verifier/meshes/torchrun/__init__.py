"""Meshes of ranks that torchrun started."""
