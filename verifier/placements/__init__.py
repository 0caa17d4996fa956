"""The placement algebra: cut a tensor, combine its parts, enumerate and cover combinations."""
