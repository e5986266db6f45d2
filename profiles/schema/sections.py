"""The sections of `profile.json`: frozen pydantic models that refuse what they do not know.

Numbers are finite, lists and strings bounded, so that a damaged or hostile file is refused before anything large is
built. Tensors live beside it in `tensors.safetensors`; `TensorFacts` pins the shape and dtype of each.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .facts import MAX_SITES, Digest, Finite, Fraction, ModelFacts, Name, Section, SiteFacts
from .heads import HeadTaxonomy, LayerErrors, RetrievalHeads, SketchSection
from .memory import MemoryModel
from .retrieval_head import RetrievalHeadSection
from .sentences import SentenceSection

SCHEMA_VERSION: Literal[2] = 2
"""Version 1 had another token sketch; its other sections are read."""


class SekvSection(Section):
    """SeKV's trained parts. Tensors, for each site index `i` with treatment `method`:

    `sekv.router.{i}` W [Hq, d', D]; `sekv.offset.{i}` [Hq]; `sekv.threshold.{i}` [Hq];
    `sekv.gates.input.weight` [H, R + d' + 1], `sekv.gates.input.bias` [H], `sekv.gates.hidden.weight` [H, H],
    `sekv.gates.hidden.bias` [H], `sekv.gates.key.weight` [R, H], `sekv.gates.key.bias` [R] and the same for `value`.

    For a query q and a span S of |S| tokens with surprisal weights w, per query head:
    summary = normalise(sum_t w_t W k_t) (Eq. 3), score = (W q).summary / sqrt(d') + log |S| (Eq. 5),
    gate = sigmoid(score - offset), zoomed where score - offset > threshold (Eq. 9; the threshold is a logit).
    `score - offset - threshold` orders spans across the query heads of a group.

    Attributes
    ----------
    routing_dims: d' per site index, 0 where the site has no router; at most D.
    max_rank: R, the most components that the rank gates know.
    gate_hidden: H, width of the rank-gate network.
    gate_summary_dim: d' that the gate network reads; shorter summaries are padded with zeros.
    gate_floor: components whose gate lies below it are dropped when factors are stored.
    router_init: how W started: `identity`, `covariance` or `random`.
    trained: False for an untrained router (the "no trained zoom" ablation).
    """

    routing_dims: tuple[Annotated[int, Field(ge=0, le=1024)], ...] = Field(min_length=1, max_length=MAX_SITES)
    max_rank: int = Field(ge=1, le=256)
    gate_hidden: int = Field(ge=1, le=1024)
    gate_summary_dim: int = Field(ge=1, le=1024)
    gate_floor: Fraction = 0.1
    router_init: Literal["identity", "covariance", "random"] = "covariance"
    trained: bool = True

    def tensor_shapes(self, model: ModelFacts) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that this section needs."""
        if len(self.routing_dims) != len(model.sites):
            raise ValueError(f"sekv.routing_dims has {len(self.routing_dims)} entries for {len(model.sites)} sites")
        shapes: dict[str, tuple[int, ...]] = {}
        for site, dim in zip(model.sites, self.routing_dims, strict=True):
            if dim:
                shapes[f"sekv.router.{site.index}"] = (site.q_heads, dim, site.key_dim)
                shapes[f"sekv.offset.{site.index}"] = (site.q_heads,)
                shapes[f"sekv.threshold.{site.index}"] = (site.q_heads,)
            elif site.treatment == "method":
                raise ValueError(f"sekv.routing_dims gives site {site.index} no router, but its treatment is 'method'")
        inputs, hidden, rank = self.max_rank + self.gate_summary_dim + 1, self.gate_hidden, self.max_rank
        layers = {"input": (hidden, inputs), "hidden": (hidden, hidden), "key": (rank, hidden), "value": (rank, hidden)}
        for layer, (rows, columns) in layers.items():
            shapes[f"sekv.gates.{layer}.weight"] = (rows, columns)
            shapes[f"sekv.gates.{layer}.bias"] = (rows,)
        return shapes


class Choice(Section):
    """One measured cell of the table that `method="auto"` reads.

    score: mean over task families, in [0, 1]. samples: questions per family; methods that did well were asked more. moved:
    bytes that a step brings to the device over the bytes of the full KV, mean.
    """

    method: Name
    budget: Annotated[float, Field(gt=0.0, le=1.0)]
    length: int = Field(ge=1)
    score: Fraction
    samples: int = Field(ge=1)
    moved: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0


class Provenance(Section):
    """How the profile came to be.

    data: description of the calibration text, with its label where tasks were mixed in.
    data_digest: sha256 of the token ids.
    settings: every training setting. losses: final values on the held-out split. table: per-site figures of the report.
    """

    created: str = Field(max_length=64)
    command: str = Field(max_length=8192)
    data: str = Field(max_length=8192)
    data_digest: Digest
    tokens: int = Field(ge=1)
    seed: int
    steps: int = Field(ge=0)
    stopped_early: bool = False
    wall_minutes: float = Field(ge=0.0, allow_inf_nan=False)
    versions: dict[Name, str] = Field(max_length=64)
    settings: dict[Name, Any] = Field(default_factory=dict, max_length=256)
    losses: dict[Name, Finite] = Field(default_factory=dict, max_length=256)
    table: tuple[dict[Name, Finite], ...] = Field(default=(), max_length=MAX_SITES)


class Measured(Section):
    """How a section was measured, apart from `Provenance`, which is that of `sekv`.

    data: description of the text. data_digest: sha256 of all token ids. units: samples or tests that were run.
    note: what a person should know about the result.
    """

    created: str = Field(max_length=64)
    command: str = Field(max_length=8192)
    data: str = Field(max_length=8192)
    data_digest: Digest
    units: int = Field(ge=1)
    wall_minutes: float = Field(ge=0.0, allow_inf_nan=False)
    versions: dict[Name, str] = Field(max_length=64)
    settings: dict[Name, Any] = Field(default_factory=dict, max_length=256)
    note: str = Field(default="", max_length=8192)


class TensorFacts(Section):
    """What `tensors.safetensors` must hold under one name."""

    shape: tuple[Annotated[int, Field(ge=1, le=1 << 24)], ...] = Field(min_length=1, max_length=4)
    dtype: Literal["float16", "bfloat16", "float32", "uint8"]


class ProfileInfo(Section):
    """Everything in `profile.json` but its own digest. Optional sections are None until they were measured.

    measured: by the name of a calibration step, how its section came to be.
    """

    schema_version: Literal[1, 2] = SCHEMA_VERSION
    fingerprint: Annotated[str, Field(min_length=8, max_length=256)]
    model: ModelFacts
    sekv: SekvSection | None = None
    head_taxonomy: HeadTaxonomy | None = None
    retrieval_heads: RetrievalHeads | None = None
    layer_errors: LayerErrors | None = None
    sketch: SketchSection | None = None
    sentences: SentenceSection | None = None
    retrieval_head: RetrievalHeadSection | None = None
    memory_model: MemoryModel | None = None
    choices: tuple[Choice, ...] = Field(default=(), max_length=65536)
    measured: dict[Name, Measured] = Field(default_factory=dict, max_length=64)
    provenance: Provenance | None = None
    tensors: dict[Name, TensorFacts] = Field(default_factory=dict, max_length=65536)
    tensors_digest: Digest | None = None

    @model_validator(mode="after")
    def _sections_fit(self) -> ProfileInfo:
        for section in (
            self.head_taxonomy,
            self.retrieval_heads,
            self.layer_errors,
            self.sketch,
            self.sentences,
            self.memory_model,
            self.retrieval_head,
        ):
            if section is not None:
                section.check(self.model)
        return self

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that the sections need."""
        shapes: dict[str, tuple[int, ...]] = {}
        for section in (self.sekv, self.head_taxonomy, self.sketch, self.sentences, self.retrieval_head):
            if section is not None:
                shapes |= section.tensor_shapes(self.model)
        return shapes


__all__ = [
    "SCHEMA_VERSION",
    "Choice",
    "HeadTaxonomy",
    "LayerErrors",
    "Measured",
    "MemoryModel",
    "ModelFacts",
    "ProfileInfo",
    "Provenance",
    "RetrievalHeadSection",
    "RetrievalHeads",
    "SekvSection",
    "SentenceSection",
    "SiteFacts",
    "SketchSection",
    "TensorFacts",
]
