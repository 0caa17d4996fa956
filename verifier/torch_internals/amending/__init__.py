"""Amendments to how DTensor decides: remedies are made of them, and each takes itself back."""
