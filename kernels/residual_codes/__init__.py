"""Codes of vectors in residual codebooks."""
