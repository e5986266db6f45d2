"""Implementations of the semkv operators and of the arithmetic around them; one operation per folder, reference first.

Importing this package registers the operators' implementations with PyTorch.
"""

from semkv.kernels import attention, linear, mixed_attention, state

__all__ = ["attention", "linear", "mixed_attention", "state"]
