"""Files: read with bounds and checks, written atomically; tensors in them; the folder of the cache."""
