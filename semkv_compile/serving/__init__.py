"""Compiled models behind other people's servers: what all of them need, and a folder for each."""
