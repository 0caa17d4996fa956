"""The nouns: cases, meshes, trials, observations, verdicts, and what every room uses."""
