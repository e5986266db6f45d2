"""The base of every section, and what a profile says about its model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_SITES = 1024
MAX_HEADS = 1024
MAX_DIM = 8192

Name = Annotated[str, Field(min_length=1, max_length=512)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Heads = Annotated[int, Field(ge=1, le=MAX_HEADS)]
Dim = Annotated[int, Field(ge=1, le=MAX_DIM)]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Rows = Annotated[tuple[tuple[Fraction, ...], ...], Field(max_length=MAX_SITES)]
Role = Literal["anchor", "volatile", "pivot", "satellite"]
DtypeName = Literal["float16", "bfloat16", "float32", "float64"]


class Section(BaseModel):
    """Base of every section: immutable, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class SiteFacts(Section):
    """One attention site of the calibrated model; see `semkv.ir.site.AttentionSite` for the meaning of the fields."""

    index: int = Field(ge=0, lt=MAX_SITES)
    name: str = Field(max_length=512)
    store: int = Field(ge=0, lt=MAX_SITES)
    q_heads: Heads
    kv_heads: Heads
    key_dim: Dim
    value_dim: Dim
    treatment: Literal["method", "window", "exact"] = "method"

    @model_validator(mode="after")
    def _whole_groups(self) -> SiteFacts:
        if self.q_heads % self.kv_heads:
            raise ValueError(f"site {self.index}: {self.q_heads} query heads, no multiple of {self.kv_heads} KV heads")
        return self


class ModelFacts(Section):
    """The shape of the model that was calibrated, for people and for checks before the weights are looked at."""

    name: Name
    dtype: DtypeName
    vocab_size: int = Field(ge=1)
    max_positions: int | None = Field(default=None, ge=1)
    sites: tuple[SiteFacts, ...] = Field(min_length=1, max_length=MAX_SITES)

    @model_validator(mode="after")
    def _numbered(self) -> ModelFacts:
        if [site.index for site in self.sites] != list(range(len(self.sites))):
            raise ValueError("sites are not numbered 0, 1, 2, ... in execution order")
        return self

    @property
    def stores(self) -> tuple[SiteFacts, ...]:
        """For each KV store, in order, the first site that reads it."""
        first: dict[int, SiteFacts] = {}
        for site in self.sites:
            first.setdefault(site.store, site)
        return tuple(first[store] for store in sorted(first))

    @property
    def method_sites(self) -> tuple[SiteFacts, ...]:
        """The sites whose memory a method may compress."""
        return tuple(site for site in self.sites if site.treatment == "method")
