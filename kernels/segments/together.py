"""Calls of segments that are made as one: those of several rows, of which little changes from one step to the next."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from weakref import ref

import torch
from torch import Tensor

from semkv.kernels.cpp import team
from semkv.kernels.segments.cpp import Refusal, Segment
from semkv.kernels.segments.tape import Behind, Tape, TapeCall, check_inside, segments_library


class Standing:
    """A segment's call, of which the first inputs, a row each of tensors of several, come anew each time, and the others stay where they
    are. What it returns are tensors of one row, the first dimension.

    table: where inputs, weights, outputs and scratch are, as the instructions read it.
    """

    def __init__(self, tape: Tape, anew: Sequence[Tensor], others: Sequence[Tensor], behind: Behind) -> None:
        self.tape, self.form, self._behind = tape, form_of(anew), ref(behind)
        self._weights = tape.weights_at()
        given = [x.data_ptr() for x in (*anew, *others, *behind)] + self._weights
        self.outputs = len(given)
        self.table = array("q", given + [0] * (len(tape.outputs) + 1))
        self._call = TapeCall(self.table.buffer_info()[0], *tape.words, torch.get_num_threads(), team())
        self.at = ctypes.addressof(self._call)

    @classmethod
    def of(cls, segment: Segment, anew: Sequence[Tensor], others: Sequence[Tensor], behind: Behind) -> Standing | None:
        """anew: a row of each; others: inputs between these and those `behind`, which the caller keeps. None where no instructions answer
        such inputs, or they return something else."""
        found = segment.tape_of((*anew, *others, *behind))
        if isinstance(found, Refusal) or not found.takes_all or not found.returns_rows:
            return None
        segment.reason = None
        return cls(found, anew, others, behind)

    def stands(self, behind: Behind) -> bool:
        """Whether it is the call with the inputs `behind` and the weights as they are."""
        return self._behind() is behind and self._weights == self.tape.weights_at()

    def use(self, threads: int) -> None:
        """Compute with so many threads."""
        self._call.threads = threads


def form_of(rows: Sequence[Tensor]) -> list[tuple[object, ...]]:
    """What inputs are the same for, whichever row of theirs is taken."""
    return [(x.dtype, x.shape[1:], x.stride()) for x in rows]


class Together:
    """Runs standing calls as one, one after the other in the same scratch."""

    def __init__(self) -> None:
        self._scratch: list[Tensor] = []
        self._run = segments_library().function("run_tapes")

    def __call__(self, calls: Sequence[Standing], anew: Sequence[Tensor]) -> list[Tensor] | None:
        """What they return of the rows of `anew`, each [len(calls), ...]; None where they are not for such rows, or do not return the
        same, or gradients are recorded."""
        form, outputs = form_of(anew), calls[0].tape.outputs
        if torch.is_grad_enabled() or any(call.form != form or call.tape.outputs != outputs for call in calls):
            return None
        made = [torch.empty((len(calls), *x.shape[1:]), dtype=x.dtype, device="cpu") for x in outputs]
        size, threads = max(call.tape.size for call in calls), torch.get_num_threads()
        scratch = self._scratch.pop() if self._scratch else torch.empty(0, dtype=torch.float32, device="cpu")
        if scratch.nbytes < size:
            scratch = torch.empty(-(-size // 4), dtype=torch.float32, device="cpu")
        inputs = [(place, x.data_ptr(), x.stride(0) * x.itemsize) for place, x in enumerate(anew)]
        written = [(place, x.data_ptr(), x.nbytes // len(calls)) for place, x in enumerate(made)]
        last = scratch.data_ptr()
        for row, call in enumerate(calls):
            table = call.table
            for place, begin, step in inputs:
                table[place] = begin + row * step
            for place, begin, step in written:
                table[call.outputs + place] = begin + row * step
            table[-1] = last
            call.use(threads)
        places = array("q", [call.at for call in calls])
        outside = self._run(ctypes.c_void_p(places.buffer_info()[0]), ctypes.c_int64(len(calls)))
        self._scratch.append(scratch)
        check_inside(outside)
        return made


__all__ = ["Standing", "Together"]
