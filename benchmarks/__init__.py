"""Measurements, by what they ask: `speed`, `quality`, `reports` on the papers' claims, and `peers`; `lib` is what they share.

Run one from the root of a checkout, as `python -m benchmarks.speed.decode_cpu`; `--help` says what it takes.
"""
