"""How many bytes each store, part and request may hold."""
