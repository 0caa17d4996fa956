"""Derived rules as code: strategies, functions of DTensors, tests of both, and changes of single lines."""
