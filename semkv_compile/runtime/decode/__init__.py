"""A decode step: `layer_step` is a layer's turn, from top to bottom; the rest makes graphs of it and runs them."""
