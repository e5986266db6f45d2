"""Products of queries with packed codes."""
