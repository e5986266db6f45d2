"""How calibration divides a context: with the segmenter, the room and the summary cost of the `sekv` method itself."""

from __future__ import annotations

from torch import Tensor

from semkv.config import CompileConfig
from semkv.ir.program import Program
from semkv.methods.sekv import SeKV
from semkv.runtime.budgets.costs import unit_cost_bytes
from semkv.runtime.store.segments import Segmentation

from .settings import CalibrationSettings

USUAL_SPAN = SeKV.max_span
"""Mean length of spans, in tokens, that contexts are divided into at most."""


class Divider:
    """Divides contexts of one program as `sekv` will at run time."""

    def __init__(self, program: Program, settings: CalibrationSettings) -> None:
        method = SeKV(router="untrained", bits=settings.summary_bits)
        components = method.components(program, None)
        stores = [site for site in program.stores if site.treatment == "method"]
        costs = [
            unit_cost_bytes(site, components, program.dtype)
            / ((site.key_dim + site.value_dim) * program.dtype.itemsize)
            for site in stores
        ]
        self.segmenter = method.segmenter()
        self.fixed_share = method.fixed_share
        self.span_cost = max(costs)
        self.page_size = CompileConfig().page_size

    def __call__(self, surprisal: Tensor, budget: float) -> Segmentation:
        """Divide a context: surprisal [n] in nats, `budget` a fraction of the full KV.

        A short context has no room for the spans of a long one at the same budget, so that the curriculum's first
        stages would train on single spans of a thousand tokens: the room is raised until spans have their usual size.
        """
        surprisal = surprisal.cpu()
        room = self.fixed_share * budget * len(surprisal)
        while True:
            made = self.segmenter.divide(surprisal, room, self.span_cost, self.page_size)
            if not len(made.lengths) or float(made.lengths.float().mean()) <= USUAL_SPAN:
                return made
            room = max(1.25 * room, room + 1)
