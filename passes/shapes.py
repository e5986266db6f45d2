"""The shapes of a program that was read from a file, found by running it without numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from semkv.errors import ArtifactError
from semkv.ir.graph import copy_graph_module, output_value
from semkv.ir.program import Program
from semkv.ir.recurrence import recur

ROWS, TOKENS = 3, 37
"""Sizes that stand for any: rows and tokens are symbols."""
ALIKE = dict.fromkeys(
    (torch.ops.aten.polar.default, torch.ops.aten.complex.default),
    lambda x, y: torch.view_as_complex(torch.stack(torch.broadcast_tensors(x, y), -1)),
)
"""What makes the same shapes as operators that fix sizes."""


def with_shapes(program: Program) -> Program:
    """The program with a fake value at every node of body and head, of any number of rows and tokens.

    Raises
    ------
    ArtifactError: an operator cannot be run without numbers; it is named.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    dynamic = [DimDynamic.DYNAMIC] * 2
    rows = ROWS if program.batched else 1
    sizes = dynamic if program.batched else [DimDynamic.STATIC, DimDynamic.DYNAMIC]
    device = next((x.device for x in program.body.state_dict().values()), torch.device("cpu"))
    real = torch.zeros(rows, TOKENS, dtype=torch.int64, device=device)
    given = mode.from_tensor(real, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
    try:
        body = _ran(program.body, mode, given, given.clone())
        head = program.head
        if head is not None:
            head = _ran(head, mode, output_value(body.graph).meta["val"])
    except Exception as cause:
        raise ArtifactError(
            f"the shapes of this program cannot be found ({str(cause)[:300]}): compile the model instead of reading its program"
        ) from cause
    return program.evolve(body=body, head=head)


def _ran(module: GraphModule, mode: FakeTensorMode, *given: torch.Tensor) -> GraphModule:
    copied = copy_graph_module(module)
    _Propagation(copied, mode).propagate_dont_convert_inputs(*given)
    return copied


class _Propagation(FakeTensorProp):
    """Bodies of recurrent sites, which are for certain numbers of tokens, are not run: their forms say what they make. Nor are operators
    that fix the numbers of rows and tokens even without numbers."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is recur:
            pieces, _, tensors, _ = args
            rows, tokens = tensors[0].shape[:2]
            return [tensors[0].new_empty((rows, tokens, *form.shape), dtype=form.dtype) for form in pieces.outputs]
        return super().call_function(ALIKE.get(target, target), args, kwargs)

    def run_node(self, n: Node) -> Any:
        fixed = len(self.symbols.replacements)
        value = super().run_node(n)
        if len(self.symbols.replacements) > fixed:
            raise ValueError(f"{n.format_node()} fixes the number of rows or tokens")
        return value

    @property
    def symbols(self) -> ShapeEnv:
        assert self._mode.shape_env is not None
        return self._mode.shape_env


__all__ = ["with_shapes"]
