"""The base class of passes, and what a pass may know besides the program."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from semkv.ir.program import Program, Stage
from semkv.ir.ranks import Ranks
from semkv.profiles.schema.codes import KeyBalance
from semkv.profiles.schema.retrieval_head import RetrievalHead


@dataclass(frozen=True)
class PassOptions:
    """What compilation asks of the passes.

    Attributes
    ----------
    method: name of the KV method; `full` leaves every site's tokens exact.
    layer_shares: one positive weight per KV store, from the profile's layer allocation; None is uniform.
    head_roles: per KV store, one role per KV head; None where the profile has no taxonomy.
    thresholds: lengths of Alg. 1 for the counted stores (`semkv.profiles.schema.memory`); None: all wait on the host always.
    retrieval_head: that chooses tokens before the first layer; None where the method has none.
    key_balance: by store, what makes its keys fit into few bits, heads in the order of the model; None: keys stay as they are.
    kernels: which answer the attention of a step: `auto`, `torch`, `cpp` or `triton` (`semkv.kernels.mixed_attention.dispatch`).
    layouts: per site, the fields of a `Configuration` tuned for the device; none for a site, or for all: its defaults.
    ranks: the processes that share the model; None: this one alone. head_nbytes: by store, what each KV head of the user's model takes of
        the budget, which processes are to hold evenly; None: all heads of a layer take as much.
    """

    method: str = "full"
    layer_shares: tuple[float, ...] | None = None
    head_roles: tuple[tuple[str, ...], ...] | None = None
    thresholds: tuple[int, ...] | None = None
    retrieval_head: RetrievalHead | None = None
    key_balance: Mapping[int, KeyBalance] | None = None
    kernels: str = "auto"
    layouts: tuple[tuple[int, ...], ...] = ()
    ranks: Ranks | None = None
    head_nbytes: Mapping[int, tuple[float, ...]] | None = None


class Pass(ABC):
    """One rewrite of a program.

    Subclasses say which stage they need, which they leave, and which passes must have run; the pipeline checks all three
    and the stage's spec on the result. A pass never changes its input: it copies the graphs that it edits.
    """

    name: ClassVar[str]
    needs: ClassVar[Stage]
    leaves: ClassVar[Stage]
    after: ClassVar[tuple[str, ...]] = ()

    def applies(self, program: Program, options: PassOptions) -> bool:
        """A cheap test whether there is anything to do; a pass that does not apply still counts as run."""
        return True

    @abstractmethod
    def run(self, program: Program, options: PassOptions) -> Program:
        """The rewritten program, with a note of what was done."""

    def identity(self) -> str:
        """A hash of the pass's name and class attributes, part of the key of compile caches and artifacts."""
        constants = {key: repr(value) for key, value in vars(type(self)).items() if key.isupper()}
        return hashlib.sha256(f"{type(self).__qualname__}{sorted(constants.items())}".encode()).hexdigest()[:16]
