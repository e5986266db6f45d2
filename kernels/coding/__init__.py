"""Codes of vectors, with a scale each."""
