"""From failures to findings: group, minimise, write a script."""
