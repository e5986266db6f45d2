"""`semkv::mixed_attention`: one softmax over blocks of entries and factored spans."""

from semkv.ir import ops
from semkv.kernels.calls import OPERATORS, Operator
from semkv.kernels.mixed_attention.blocked import mixed_attention_blocked
from semkv.kernels.mixed_attention.cpp import describe_attention
from semkv.kernels.mixed_attention.dispatch import mixed_attention
from semkv.kernels.mixed_attention.reference import mixed_attention_reference
from semkv.kernels.registration import register

FLOAT_ARGUMENTS = (0, 2, 3, 5, 9, 10, 11, 12, 13, 14, 16, 17, 18, 19)
"""Places of the arguments that gradients flow to: everything but positions and the scales of codes."""

register(ops.library, "mixed_attention", mixed_attention, differentiable=FLOAT_ARGUMENTS)
OPERATORS[ops.mixed_attention] = Operator(mixed_attention, describe_attention)

__all__ = ["FLOAT_ARGUMENTS", "mixed_attention", "mixed_attention_blocked", "mixed_attention_reference"]
