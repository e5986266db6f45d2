"""The sections of `profile.json`: frozen pydantic models that refuse what they do not know.

Numbers are finite, lists and strings bounded, so that a damaged or hostile file is refused before anything large is
built. Tensors live beside it in `tensors.safetensors`; `TensorFacts` pins the shape and dtype of each.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

SCHEMA_VERSION: Literal[1] = 1

MAX_SITES = 1024
MAX_HEADS = 1024
MAX_DIM = 8192

Name = Annotated[str, Field(min_length=1, max_length=512)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Heads = Annotated[int, Field(ge=1, le=MAX_HEADS)]
Dim = Annotated[int, Field(ge=1, le=MAX_DIM)]
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
    def method_sites(self) -> tuple[SiteFacts, ...]:
        """The sites whose memory a method may compress."""
        return tuple(site for site in self.sites if site.treatment == "method")


class SekvSection(Section):
    """SeKV's trained parts (SYSTEMS.md K4-K7, K11). Tensors, for each site index `i` with treatment `method`:

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


class HeadTaxonomy(Section):
    """Roles and clusters of KV heads (HeteroCache). One list per KV store, one entry per KV head."""

    roles: tuple[tuple[Literal["anchor", "volatile", "pivot", "satellite"], ...], ...] = Field(max_length=MAX_SITES)
    clusters: tuple[tuple[int, ...], ...] = Field(max_length=MAX_SITES)
    stability: tuple[tuple[Fraction, ...], ...] = Field(max_length=MAX_SITES)
    tau_stable: Fraction
    tau_similar: Fraction


class RetrievalHeads(Section):
    """Scores per query head (CompressKV), one list per site: semantic (Eq. 5) and classic top-k."""

    semantic: tuple[tuple[Finite, ...], ...] = Field(max_length=MAX_SITES)
    classic: tuple[tuple[Finite, ...], ...] = Field(max_length=MAX_SITES)


class LayerErrors(Section):
    """Normalised output error per KV store under extreme compression (CompressKV Eq. 6-12)."""

    errors: tuple[Annotated[float, Field(ge=0.0, allow_inf_nan=False)], ...] = Field(min_length=1, max_length=MAX_SITES)


class SketchSection(Section):
    """A token sketch: per KV head the best rank-r maps of queries and keys under their measured covariances.

    Tensors, for each site index `i` with treatment `method`: `sketch.query.{i}` [Hq, r, D] and `sketch.key.{i}`
    [Hkv, r, D]; q.k is approximated by (A q).(B k). `energy` is the share of the score's variance kept, mean over KV
    heads, per site.
    """

    rank: int = Field(ge=1, le=256)
    energy: tuple[Fraction, ...] = Field(max_length=MAX_SITES)

    def tensor_shapes(self, model: ModelFacts) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that this section needs."""
        shapes: dict[str, tuple[int, ...]] = {}
        for site in model.method_sites:
            shapes[f"sketch.query.{site.index}"] = (site.q_heads, min(self.rank, site.key_dim), site.key_dim)
            shapes[f"sketch.key.{site.index}"] = (site.kv_heads, min(self.rank, site.key_dim), site.key_dim)
        return shapes


class MemoryModel(Section):
    """Constants of the memory model (SpeContext Eq. 6-8), in bytes, and sequence-length thresholds in tokens."""

    constants: dict[Name, Finite] = Field(max_length=256)
    thresholds: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(), max_length=MAX_SITES)


class Choice(Section):
    """One measured cell of the table that `method="auto"` reads."""

    method: Name
    budget: Annotated[float, Field(gt=0.0, le=1.0)]
    length: int = Field(ge=1)
    score: Fraction
    samples: int = Field(ge=1)


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


class TensorFacts(Section):
    """What `tensors.safetensors` must hold under one name."""

    shape: tuple[Annotated[int, Field(ge=1, le=1 << 24)], ...] = Field(min_length=1, max_length=4)
    dtype: Literal["float16", "bfloat16", "float32"]


class ProfileInfo(Section):
    """Everything in `profile.json` but its own digest. Optional sections are None until they were measured."""

    schema_version: Literal[1] = SCHEMA_VERSION
    fingerprint: Annotated[str, Field(min_length=8, max_length=256)]
    model: ModelFacts
    sekv: SekvSection | None = None
    head_taxonomy: HeadTaxonomy | None = None
    retrieval_heads: RetrievalHeads | None = None
    layer_errors: LayerErrors | None = None
    sketch: SketchSection | None = None
    memory_model: MemoryModel | None = None
    choices: tuple[Choice, ...] = Field(default=(), max_length=65536)
    provenance: Provenance | None = None
    tensors: dict[Name, TensorFacts] = Field(default_factory=dict, max_length=65536)
    tensors_digest: Digest | None = None

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that the sections need."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self.sekv is not None:
            shapes |= self.sekv.tensor_shapes(self.model)
        if self.sketch is not None:
            shapes |= self.sketch.tensor_shapes(self.model)
        return shapes
