"""An operator's launches in Triton, in a process of the interpreter or on a GPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from semkv.ir import state_ops


def launch(name: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """The result of an operator by name, by launches alone, and the tensors of its arguments as they are then."""
    from semkv.kernels.state.triton import LAUNCHES

    found, launches = LAUNCHES[getattr(state_ops, name)][0](**arguments)
    for one in launches:
        one.run()
    return found, {key: x for key, x in arguments.items() if isinstance(x, Tensor)}
