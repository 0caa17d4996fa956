"""Calls of every op that DTensor has a rule for: what torch's own test database of ops dispatches to.

``source`` has them for the rule check, ``family`` for the check on meshes. Importing them loads that database, which
takes seconds, so that this package does not.
"""
