"""The tables that each step of `semkv-profile` ends with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console

from semkv.cli.profile_memory import memory_table
from semkv.cli.tables import simple_table

SHOWN_ROWS = 48
"""Layers that a table shows; of a deeper model every n-th."""

COLUMNS = (
    ("site", "site", "{:.0f}"),
    ("recall", "recall", "{:.2f}"),
    ("precision", "prec.", "{:.2f}"),
    ("zoom_rate", "zoomed", "{:.3f}"),
    ("caught", "caught", "{:.2f}"),
    ("coarse", "coarse", "{:.2f}"),
    ("oracle", "oracle", "{:.2f}"),
    ("key_rank", "k rank", "{:.1f}"),
    ("value_rank", "v rank", "{:.1f}"),
    ("threshold", "tau", "{:.2f}"),
    ("mined", "mined", "{:.3f}"),
)
LEGEND = """recall, prec.: zoomed spans against the targets of Eq. 12, at mined queries
zoomed: share of the spans above tau, a logit
caught: of the attention on far spans, what the router takes when 6 % of the
  tokens may be unfolded; coarse: what the mean keys' directions take, without
  training; oracle: the most that can be taken
k rank, v rank: components that the gates keep; mined: share of the queries that
  attend to few, distant spans"""


def print_step(console: Console, step: str, profile: Any, note: str = "") -> None:
    """Print what a step put into the profile, and its note."""
    TABLES[step](console, profile)
    if note:
        console.print(f"{step}: {note}", highlight=False)


def _shown(count: int) -> range:
    return range(0, count, -(-count // SHOWN_ROWS))


def _numbers(values: tuple[float, ...], form: str = "{:.2f}") -> str:
    """Up to eight numbers, or least, middle and most of more."""
    if len(values) <= 8:
        return " ".join(form.format(value) for value in values)
    ordered = sorted(values)
    return " / ".join(form.format(ordered[place]) for place in (0, len(ordered) // 2, -1))


def taxonomy_table(console: Console, profile: Any) -> None:
    """Roles, stability and similarity per KV store."""
    section = profile.info.head_taxonomy
    if section is None:
        return
    table = simple_table(
        "head roles per KV store", "store", "anchor", "volatile", "pivot", "satellite", "stability", "similarity"
    )
    kinds = ("anchor", "volatile", "pivot", "satellite")
    for store in _shown(len(section.roles)):
        row = section.roles[store]
        figures = (_numbers(section.stability[store]), _numbers(section.similarity[store]))
        table.add_row(str(store), *(str(row.count(kind)) for kind in kinds), *figures)
    console.print(table)
    counts = {kind: sum(row.count(kind) for row in section.roles) for kind in kinds}
    heads = sum(counts.values())
    whole = counts["pivot"] + counts["volatile"]
    console.print(
        f"{', '.join(f'{count} {kind}' for kind, count in counts.items())} of {heads} KV heads; pivots and volatile heads "
        f"keep every token: {whole / heads:.0%} of the KV",
        highlight=False,
    )
    kept = ", ".join(f"{name} {share:.0%}" for name, share in section.transfer.items())
    console.print(f"satellites that are satellites in one data set alone: {kept}", highlight=False)


def retrieval_table(console: Console, profile: Any) -> None:
    """Semantic and classic scores per site, and the best heads."""
    section = profile.info.retrieval_heads
    if section is None:
        return
    table = simple_table(
        "retrieval scores per site", "site", "semantic (Eq. 5)", "classic top-1", f"top-{section.top_k}"
    )
    for site in _shown(len(section.semantic)):
        rows = (section.semantic[site], section.classic[site], section.classic_top_k[site])
        table.add_row(str(site), *map(_numbers, rows))
    console.print(table)
    scores = [(value, site, head) for site, row in enumerate(section.semantic) for head, value in enumerate(row)]
    best = ", ".join(f"{site}.{head} {value:.2f}" for value, site, head in sorted(scores, reverse=True)[:8])
    console.print(f"best semantic heads (site.head): {best}", highlight=False)


def errors_table(console: Console, profile: Any) -> None:
    """Layer errors, and what Alg. 1 makes of them at 256 tokens per layer."""
    section = profile.info.layer_errors
    if section is None:
        return
    from semkv.profiles.schema.allocation import layer_budgets

    counted = [store for store, error in enumerate(section.errors) if error > 0]
    sizes = dict(zip(counted, layer_budgets([section.errors[store] for store in counted], 256 * len(counted))))
    table = simple_table(
        f"output error with {section.keep} tokens kept",
        "store",
        "share of error",
        "relative",
        "tokens of 256 a layer",
        *section.sets,
    )
    for store in _shown(len(section.errors)):
        shares = (f"{row[store]:.3f}" for row in section.sets.values())
        figures = (f"{section.errors[store]:.3f}", f"{section.relative[store]:.3f}", str(sizes.get(store, "-")))
        table.add_row(str(store), *figures, *shares)
    console.print(table)


def sketch_table(console: Console, profile: Any) -> None:
    """What codes of each length catch, per site."""
    section = profile.info.sketch
    if section is None:
        return
    lengths = (f"{stage + 1} B" for stage in range(section.stages))
    table = simple_table(
        "token sketch per site: far attention caught", "site", *lengths, f"per head, {section.stages} B"
    )
    for site in _shown(len(section.caught)):
        caught = profile.tensors.get(f"sketch.caught.{site}")
        if caught is None:
            continue
        means = [f"{value:.2f}" for value in caught.mean(0).tolist()]
        table.add_row(str(site), *means, " ".join(f"{value:.2f}" for value in section.caught[site]))
    console.print(table)
    console.print(
        f"of the attention beyond the first {section.sinks} and last {section.window} tokens that {section.share:.0%} of the tokens can "
        "hold, what those hold whose codes of so many bytes score best, on held-out text; mean over KV heads",
        highlight=False,
    )


def sentences_table(console: Console, profile: Any) -> None:
    """How many tokens may end a sentence, and how long sentences are."""
    section = profile.info.sentences
    if section is None:
        return
    console.print(
        f"sentences: {section.marks} of {section.tokens} tokens may end one; {section.mean_tokens:.1f} tokens on the mean, "
        f"{section.longest} at most, in {section.samples} samples",
        highlight=False,
    )


def head_table(console: Console, profile: Any) -> None:
    """Sizes of the retrieval head, and what it finds."""
    section = profile.info.retrieval_head
    if section is None:
        return
    reads = (
        f"embeddings and the hidden states before at sites {section.feature_sites}"
        if section.features
        else "embeddings"
    )
    console.print(
        f"retrieval head: {section.q_heads} query and {section.kv_heads} KV heads of {section.head_dim} dimensions on {reads}; "
        f"{section.parameters:,} parameters, {1 - section.parameters / section.whole:.1%} fewer than the one-layer model's "
        f"{section.whole:,}; {section.key_nbytes} bytes a token in half precision",
        highlight=False,
    )
    console.print(
        f"of the attention that {section.share:.0%} of the tokens can hold, those that it chooses per KV head hold "
        f"{section.caught:.0%}, one choice for all heads {section.caught_batch:.0%}, on held-out text",
        highlight=False,
    )


def sekv_table(console: Console, profile: Any) -> None:
    """Figures of all sites, and per site, on held-out text."""
    provenance = profile.info.provenance
    if profile.info.sekv is None or provenance is None:
        return
    figures = ", ".join(f"{name} {value:.3g}" for name, value in provenance.losses.items())
    console.print(f"on held-out text, after {provenance.steps} steps at most: {figures}")
    table = simple_table("per site, held-out contexts", *(title for _, title, _ in COLUMNS))
    for row in provenance.table:
        table.add_row(*(form.format(row[key]) for key, _, form in COLUMNS))
    console.print(table)
    console.print(LEGEND, highlight=False)


TABLES: dict[str, Callable[[Console, Any], None]] = {
    "taxonomy": taxonomy_table,
    "retrieval-heads": retrieval_table,
    "layer-errors": errors_table,
    "sketch": sketch_table,
    "sentences": sentences_table,
    "retrieval-head": head_table,
    "memory": memory_table,
    "sekv": sekv_table,
}

__all__ = ["TABLES", "print_step"]
