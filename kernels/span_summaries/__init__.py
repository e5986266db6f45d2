"""What is kept of a span of tokens: its mean and its bounds."""

from semkv.kernels.span_summaries.reference import span_summaries_reference

__all__ = ["span_summaries_reference"]
