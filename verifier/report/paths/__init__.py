"""Redistribution paths as text, JSON, GraphML, DOT, Mermaid and SVG."""
