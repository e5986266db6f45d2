"""Running a compiled model: prompts, steps, `forward` and `generate`, and what engines ask."""
