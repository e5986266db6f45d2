"""The memory of one layer of one row: exact tokens, folded spans, slots."""
