"""The only importer of torch's private modules, by subject.

Everything here was read off torch 2.13.0.
"""
