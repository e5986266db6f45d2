"""How long steps, prompts, calibration and compilation take, and what memory they need."""
