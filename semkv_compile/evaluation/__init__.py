"""Evaluation of compiled models on retrieval tasks: samples, runs that resume, statistics, tables and pictures."""

from semkv.evaluation.evaluate import evaluate
from semkv.evaluation.schema import Report
from semkv.evaluation.settings import Grid, Variant, build_variants

__all__ = ["Grid", "Report", "Variant", "build_variants", "evaluate"]
