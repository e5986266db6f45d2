"""What calibration measures of heads and layers: roles, retrieval scores, layer errors, the token sketch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from .codes import VECTORS, Codebooks, KeyBalance
from .facts import MAX_HEADS, MAX_SITES, Fraction, ModelFacts, Name, NotNegative, Role, Rows, Section


class HeadTaxonomy(Section):
    """Roles and clusters of KV heads (HeteroCache). One row per KV store, one entry per KV head.

    Tensors: `taxonomy.overlap.{s}` [Hkv, Hkv] for each KV store `s` whose treatment is `method`: median over decode steps
    of the overlap (Eq. 1) of two heads' top-k sets, mean over samples, with a diagonal of 1. From it and `stability`,
    `semkv.profiles.schema.roles.head_roles` makes the roles for any thresholds.

    Attributes
    ----------
    roles: `anchor`, `volatile`, `pivot` or `satellite`. Stores that keep a window or everything were not measured:
        their heads are called anchors, with stability 1 and similarity 0.
    clusters: the KV head whose cluster each head is in: a satellite's pivot, and its own index for all others.
    stability: Eq. 2. similarity: Eq. 3; both are means over samples.
    tau_stable, tau_similar: thresholds that the roles were made with.
    top_share: k of the top-k sets over the length of the prompt. pool: width of the average pooling, in tokens.
    steps: decode steps per sample. samples: how many were measured.
    transfer: for each data set, the share of the satellites that are satellites when it alone is measured.
    """

    roles: tuple[tuple[Role, ...], ...] = Field(max_length=MAX_SITES)
    clusters: tuple[tuple[Annotated[int, Field(ge=0, lt=MAX_HEADS)], ...], ...] = Field(max_length=MAX_SITES)
    stability: Rows
    similarity: Rows
    tau_stable: Fraction
    tau_similar: Fraction
    top_share: Fraction = 0.1
    pool: int = Field(default=5, ge=1)
    steps: int = Field(default=100, ge=1)
    samples: int = Field(default=1, ge=1)
    transfer: dict[Name, Fraction] = Field(default_factory=dict, max_length=256)

    @model_validator(mode="after")
    def _whole_clusters(self) -> HeadTaxonomy:
        for store, (roles, clusters) in enumerate(zip(self.roles, self.clusters, strict=False)):
            followed = {to for head, to in enumerate(clusters) if to != head}
            for head, (role, to) in enumerate(zip(roles, clusters, strict=False)):
                if role == "satellite" and (to >= len(roles) or roles[to] != "pivot"):
                    raise ValueError(f"store {store}: head {head} is a satellite of head {to}, which is no pivot")
                if role != "satellite" and to != head:
                    raise ValueError(f"store {store}: head {head} is a {role} and cannot follow head {to}")
                if role == "pivot" and head not in followed:
                    raise ValueError(f"store {store}: head {head} is a pivot without a satellite")
        return self

    def check(self, model: ModelFacts) -> None:
        """Raise `ValueError` unless every row fits the model's KV stores."""
        heads = [site.kv_heads for site in model.stores]
        for name in ("roles", "clusters", "stability", "similarity"):
            _fit_rows(f"head_taxonomy.{name}", getattr(self, name), heads, "KV store")

    def tensor_shapes(self, model: ModelFacts) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that this section needs."""
        stores = (site for site in model.stores if site.treatment == "method")
        return {f"taxonomy.overlap.{site.store}": (site.kv_heads, site.kv_heads) for site in stores}


class RetrievalHeads(Section):
    """Scores per query head (CompressKV), one row per site; means over the tests that passed.

    Attributes
    ----------
    semantic: Eq. 5: attention on the whole answer span while a correct answer token is generated, divided by the number
        of answer tokens, so that it is a share of attention.
    classic: share of the answer tokens that are the token which the head looks at most, inside the span (Wu et al.
        2024). classic_top_k: the same for the `top_k` tokens that it looks at most.
    tests, passed: needle tests that were asked, and those with a unigram recall above `pass_recall`.
    """

    semantic: Rows
    classic: Rows
    classic_top_k: Rows
    top_k: int = Field(default=10, ge=1)
    tests: int = Field(ge=1)
    passed: int = Field(ge=1)
    pass_recall: Fraction = 0.5

    @model_validator(mode="after")
    def _no_more_than_asked(self) -> RetrievalHeads:
        if self.passed > self.tests:
            raise ValueError(f"{self.passed} tests passed of {self.tests}")
        return self

    def check(self, model: ModelFacts) -> None:
        """Raise `ValueError` unless every row fits the model's sites."""
        heads = [site.q_heads for site in model.sites]
        for name in ("semantic", "classic", "classic_top_k"):
            _fit_rows(f"retrieval_heads.{name}", getattr(self, name), heads, "site")


class LayerErrors(Section):
    """Output error per KV store under extreme compression (CompressKV Eq. 6-12), one entry per KV store.

    Attributes
    ----------
    errors: Eq. 12, a share: they sum to 1. 0 for stores whose treatment is not `method`.
    relative: mean over steps and samples of |O_comp - O_full| / |O_full| after the output projection.
    sets: Eq. 10 of each data set.
    keep: tokens that each store kept. window: those of them that are the prompt's last.
    steps: decode steps per sample. samples: how many were measured.
    """

    errors: tuple[Fraction, ...] = Field(min_length=1, max_length=MAX_SITES)
    relative: tuple[NotNegative, ...] = Field(default=(), max_length=MAX_SITES)
    sets: dict[Name, tuple[Fraction, ...]] = Field(default_factory=dict, max_length=256)
    keep: int = Field(default=32, ge=1)
    window: int = Field(default=8, ge=1)
    steps: int = Field(default=100, ge=1)
    samples: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _shares(self) -> LayerErrors:
        if abs(sum(self.errors) - 1) > 1e-4:
            raise ValueError(f"errors sum to {sum(self.errors):g}, expected 1")
        return self

    def check(self, model: ModelFacts) -> None:
        """Raise `ValueError` unless there is one entry per KV store."""
        stores = len(model.stores)
        rows = {"errors": self.errors, "relative": self.relative or self.errors}
        rows |= {f"sets.{name}": row for name, row in self.sets.items()}
        for name, row in rows.items():
            if len(row) != stores:
                raise ValueError(f"layer_errors.{name} has {len(row)} entries for {stores} KV stores")


class SketchSection(Section):
    """A token sketch: residual codebooks of the keys of each KV head (`semkv.profiles.schema.codes.Codebooks`).

    Tensors, for each site index `i` with treatment `method`:
    `sketch.mean.{i}` [Hkv, D], the mean key; `sketch.root.{i}` float16 [Hkv, D, R], a square root of the second moment of
    the group's queries, turned to R directions, and `sketch.back.{i}` float16 [Hkv, R, D] from there;
    `sketch.books.{i}` uint8 [Hkv, S, 256, R] and `sketch.scale.{i}` float16 [Hkv, S, 1]: a number n of a book
    stands for (n - 128) times its scale. `sketch.value_mean.{i}` [Hkv, Dv], `sketch.value_books.{i}` [Hkv, S', 256, Dv] and
    `sketch.value_scale.{i}`: the same of values, as they are. `sketch.caught.{i}` [Hkv, S]: `caught` with the first stages alone.

    Attributes
    ----------
    stages, value_stages: S and S', books of each head and bytes of a code. rank: R, at most D; None: D.
    balanced: there is `sketch.balance.{i}` [Hkv, D], by which keys that are held in 4 bits are multiplied (`KeyBalance`).
    form: 1, of profiles from before: the R directions are those along which queries are longest, so that the pseudo-inverse of
        `sketch.root` leads back and `sketch.back` is not there; each vector of a book has a scale, [Hkv, S, 256].
    caught: of the attention to far tokens that the best `share` of a context's tokens hold, how much those hold whose codes score best,
        on held-out samples; a row per site, empty where its treatment is not `method`.
    share: tokens chosen over tokens of the context. sinks, window: far tokens are those beyond the first and the last so many.
    """

    stages: int = Field(ge=1, le=16)
    value_stages: int = Field(default=1, ge=1, le=16)
    rank: Annotated[int, Field(ge=1)] | None = None
    balanced: bool = False
    form: Literal[1, 2] = 1
    caught: Rows
    share: Fraction = 0.05
    sinks: int = Field(default=4, ge=0)
    window: int = Field(default=32, ge=0)

    def check(self, model: ModelFacts) -> None:
        """Raise `ValueError` unless every row fits the model's sites."""
        heads = [site.kv_heads if site.treatment == "method" else 0 for site in model.sites]
        _fit_rows("sketch.caught", self.caught, heads, "site")

    def tensor_shapes(self, model: ModelFacts) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that this section needs."""
        shapes: dict[str, tuple[int, ...]] = {}
        for site in model.method_sites:
            heads, dim, at = site.kv_heads, site.key_dim, site.index
            rank = min(dim, self.rank or dim)
            shapes[f"sketch.mean.{at}"] = (heads, dim)
            if self.balanced:
                shapes[f"sketch.balance.{at}"] = (heads, dim)
            shapes[f"sketch.root.{at}"] = (heads, dim, rank)
            scales = VECTORS if self.form == 1 else 1
            if self.form == 2:
                shapes[f"sketch.back.{at}"] = (heads, rank, dim)
            shapes[f"sketch.books.{at}"] = (heads, self.stages, VECTORS, rank)
            shapes[f"sketch.scale.{at}"] = (heads, self.stages, scales)
            shapes[f"sketch.value_mean.{at}"] = (heads, site.value_dim)
            shapes[f"sketch.value_books.{at}"] = (heads, self.value_stages, VECTORS, site.value_dim)
            shapes[f"sketch.value_scale.{at}"] = (heads, self.value_stages, scales)
            shapes[f"sketch.caught.{at}"] = (heads, self.stages)
        return shapes

    def codebooks(self, tensors: Mapping[str, Tensor], site: int, heads: list[int], stages: int) -> Codebooks:
        """The first `stages` books of the keys of some KV heads of a site, from the profile's `tensors`."""
        mean, root = (tensors[f"sketch.{name}.{site}"][heads].float() for name in ("mean", "root"))
        back = tensors[f"sketch.back.{site}"][heads].float() if self.form == 2 else None
        return Codebooks(mean, _vectors(tensors, "", site, heads)[:, :stages].contiguous(), root, back)

    def balance(self, tensors: Mapping[str, Tensor], site: int) -> KeyBalance:
        """Of the keys of all KV heads of a site. Profiles that were made without `balanced` have a mean alone."""
        mean = tensors[f"sketch.mean.{site}"].float()
        return KeyBalance(mean, tensors[f"sketch.balance.{site}"].float() if self.balanced else torch.ones_like(mean))

    def value_codebooks(self, tensors: Mapping[str, Tensor], site: int, heads: list[int], stages: int) -> Codebooks:
        """The same of values."""
        mean = tensors[f"sketch.value_mean.{site}"][heads].float()
        return Codebooks(mean, _vectors(tensors, "value_", site, heads)[:, :stages].contiguous())


def _vectors(tensors: Mapping[str, Tensor], kind: str, site: int, heads: list[int]) -> Tensor:
    """float32 [H, stages, VECTORS, D]."""
    books, scale = (tensors[f"sketch.{kind}{name}.{site}"][heads].float() for name in ("books", "scale"))
    return (books - 128) * scale[..., None]


def _fit_rows(name: str, rows: tuple[tuple[Any, ...], ...], heads: list[int], what: str) -> None:
    if len(rows) != len(heads):
        raise ValueError(f"{name} has {len(rows)} rows for {len(heads)} {what}s")
    for number, (row, wanted) in enumerate(zip(rows, heads)):
        if len(row) != wanted:
            raise ValueError(f"{name}: {what} {number} has {len(row)} entries, expected {wanted}")
