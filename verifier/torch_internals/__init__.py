"""The only importer of torch's private modules, one module per subject.

All of it is written for torch 2.13.0.
"""
