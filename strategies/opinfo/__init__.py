"""Calls of every op that DTensor has a rule for: the aten calls that torch's test database OpInfo dispatches to.

``source`` has the calls for the rule check, ``family`` for the check on meshes. Both load OpInfo, which takes seconds,
so this package imports neither.
"""
