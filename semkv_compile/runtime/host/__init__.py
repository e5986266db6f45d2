"""The host tier: where folded tokens wait, and how they cross."""
