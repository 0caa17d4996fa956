"""The redistribution graph: all layouts of a tensor on a mesh, all steps between them, and the best paths."""
