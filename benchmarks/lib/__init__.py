"""What benchmarks share: models, grids of evaluations, results and pages."""
