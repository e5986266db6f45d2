"""Whether answers stay right: methods on the bundled model and on real ones, and whether budgets are held."""
