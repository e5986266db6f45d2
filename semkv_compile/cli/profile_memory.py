"""The memory model of a profile for people: a table of thresholds, and the picture of device bytes against length."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from semkv.profiles.schema.memory import UNBOUNDED, offloaded_stores

POINTS = 600
"""Lengths that the picture is drawn at."""
SHOWN = 12
"""Thresholds that the table shows; of a deeper model some of them."""


def memory_table(console: Console, profile: Any) -> None:
    """Constants, and for some numbers of layers on the host the longest sequence."""
    from semkv.cli.tables import simple_table
    from semkv.evaluation.tables import size

    section = profile.info.memory_model
    if section is None:
        return
    console.print(
        f"weights {size(section.parameter_bytes)}, retrieval head {size(section.retrieval_bytes)}, working memory "
        f"{size(section.runtime_bytes)} (measured: {size(section.prefill_bytes)} for {section.tokens} tokens, "
        f"{size(section.decode_bytes)} for one); KV {size(sum(section.token_bytes))} per token",
        highlight=False,
    )
    console.print(
        f"device of {size(section.device_bytes)}, {section.rows} row(s), {section.budget} selected tokens:",
        highlight=False,
    )
    table = simple_table("thresholds (Alg. 1)", "layers on the host", "tokens at most")
    last = len(section.thresholds) - 1
    for layers in sorted({round(last * i / (SHOWN - 1)) for i in range(SHOWN)}):
        limit = section.thresholds[layers]
        table.add_row(str(layers), "no limit" if limit == UNBOUNDED else f"{limit:,}")
    console.print(table)


def memory_picture(pyplot: Any, section: Any, profile: Any) -> Any:
    """Device bytes by length as layers leave the device, beside those with everything there (Eq. 6); layers on the host."""
    demand, limits = section.demand, section.thresholds
    finite = [limit for limit in limits if 0 < limit < UNBOUNDED]
    end = max(finite, default=1) * 1.1
    lengths = [max(1, round(end * i / POINTS)) for i in range(1, POINTS + 1)]
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4), layout="constrained")
    inside = [n for n in lengths if n <= limits[-1]]
    waiting = [offloaded_stores(limits, n) for n in inside]
    together = [demand.device_bytes(n, 0) / 1e9 for n in lengths]
    axes[0].plot(lengths, [float(x) for x in together], color="tab:red", lw=1, label="all on the device (Eq. 6)")
    held = [float(demand.device_bytes(n, layers) / 10**9) for n, layers in zip(inside, waiting)]
    axes[0].plot(inside, held, color="tab:blue", label="layers leave it one by one (Eq. 7)")
    axes[0].axhline(section.device_bytes / 1e9, color="black", lw=0.8, ls="--", label="device memory")
    fixed = (demand.weights + demand.runtime) / 1e9
    axes[0].axhline(fixed, color="grey", lw=0.8, ls=":", label="weights and working memory")
    for limit in finite:
        axes[0].axvline(limit, color="lightgrey", lw=0.6, zorder=0)
    axes[0].set(xlabel="tokens", ylabel="device memory (GB)", ylim=(0, 1.5 * section.device_bytes / 1e9))
    axes[0].set_title(f"{section.rows} row(s), {section.budget} selected tokens; thresholds as lines", fontsize=10)
    axes[0].legend(fontsize=8)
    axes[1].step(inside, waiting, where="post", color="tab:blue")
    axes[1].set(xlabel="tokens", ylabel="layers on the host", ylim=(-0.5, len(limits) - 0.5))
    axes[1].yaxis.get_major_locator().set_params(integer=True)
    axes[1].set_title("Alg. 1", fontsize=10)
    return figure
