"""Remedies for what users give to styles, to local_map, to their own rules, to meshes and to files."""
