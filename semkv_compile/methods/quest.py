"""Pages chosen by an upper bound of what the query can find in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from semkv.errors import ConfigError
from semkv.ir.program import Program
from semkv.methods.base import Method
from semkv.methods.page_routers import MinMaxRouter
from semkv.methods.pages import Frame, Pages
from semkv.profiles.schema import Profile
from semkv.runtime.components import Components


def check_bits(method: str, bits: int) -> None:
    """Raise `ConfigError` unless an index may have numbers of `bits` bits."""
    if bits not in (4, 8, 16):
        raise ConfigError(f"option 'bits' of method {method!r} is {bits}; expected 4, 8 or 16")


def check_positive(method: str, **values: int) -> None:
    """Raise `ConfigError` for the first option below 1."""
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"option {name!r} of method {method!r} is {value}; expected at least 1")


@dataclass(frozen=True)
class Quest(Method):
    """Quest (Tang et al., 2024): pages with the smallest and largest key per channel, from which a query's best pages follow.

    Query heads of a group share their pages, which one KV head holds once. The paper leaves everything on the device and the
    first two layers whole; here pages wait on the host, and every layer keeps the budget.

    page: tokens. bits: of the bounds, 4, 8, or 16 as in the paper, where a page's bounds cost as much as a token. sinks,
    window: exact tokens at the start and the end. fixed_share: of the budget, for all but unfolded pages.
    """

    page: int = 16
    bits: int = 8
    sinks: int = 4
    window: int = 64
    fixed_share: float = 1 / 2

    name: ClassVar[str] = "quest"
    minimum_tokens: ClassVar[int] = 40

    def __post_init__(self) -> None:
        check_bits(self.name, self.bits)
        check_positive(self.name, page=self.page, window=self.window)

    def components(self, program: Program, profile: Profile | None) -> Components:
        frame = Frame(self.sinks, self.window, fold_chunk=max(8, self.page))
        return Components(
            segmenter=Pages(self.page, frame), router=MinMaxRouter(self.bits), outside="folded", fixed_share=self.fixed_share,
            floor_tokens=32, window=self.window, window_share=frame.share, fold_chunk=frame.fold_chunk,
        )  # fmt: skip
