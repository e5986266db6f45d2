"""The pictures of `semkv-profile --report`: one file per section that the profile has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from semkv.cli.profile_choice import choice_picture
from semkv.cli.profile_memory import memory_picture

COLOURS = {"anchor": "tab:blue", "volatile": "tab:red", "pivot": "tab:orange", "satellite": "tab:green"}
BUDGETS = (64, 256, 1024)
"""Mean tokens per layer that budgets are drawn for."""
LABELLED = 64
"""Heads are named in a scatter of at most this many."""


def write_report(folder: Path, profile: Any, history: list[dict[str, float]]) -> list[str]:
    """Write `report.json` (all sections and the figures over the steps) and a picture per section; their names."""
    folder.mkdir(parents=True, exist_ok=True)
    info = profile.info
    content = info.model_dump(mode="json", exclude={"tensors", "tensors_digest"}) | {"history": history}
    (folder / "report.json").write_text(json.dumps(content, indent=1) + "\n")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawings = {
        "heads.png": (info.head_taxonomy, _heads),
        "clusters.png": (info.head_taxonomy, _clusters),
        "retrieval_heads.png": (info.retrieval_heads, _retrieval),
        "layer_errors.png": (info.layer_errors, _errors),
        "sketch.png": (info.sketch, _sketch),
        "memory.png": (info.memory_model, memory_picture),
        "choice.png": (info.choices or None, choice_picture),
        "losses.png": (history or None, _losses),
    }
    written = ["report.json"]
    for name, (section, draw) in drawings.items():
        if section is None:
            continue
        figure = draw(pyplot, section, profile)
        figure.savefig(folder / name, dpi=120)
        pyplot.close(figure)
        written.append(name)
    return written


def _heads(pyplot: Any, section: Any, profile: Any) -> Any:
    """Every KV head by stability and similarity, its role as colour, the thresholds as lines."""
    figure, axis = pyplot.subplots(figsize=(6, 5), layout="constrained")
    points = [
        (role, section.stability[store][head], section.similarity[store][head], f"{store}.{head}")
        for store, row in enumerate(section.roles)
        for head, role in enumerate(row)
    ]
    for role, colour in COLOURS.items():
        mine = [point for point in points if point[0] == role]
        axis.scatter([p[1] for p in mine], [p[2] for p in mine], color=colour, label=f"{role} ({len(mine)})", alpha=0.8)
    if len(points) <= LABELLED:
        for _, x, y, name in points:
            axis.annotate(name, (x, y), xytext=(3, 3), textcoords="offset points", fontsize=6)
    axis.axvline(section.tau_stable, color="grey", lw=0.8, ls="--")
    axis.axhline(section.tau_similar, color="grey", lw=0.8, ls="--")
    axis.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xlabel="stability (Eq. 2)", ylabel="similarity (Eq. 3)")
    axis.set_title(f"KV heads (layer.head), {section.samples} samples of {section.steps} steps", fontsize=10)
    axis.legend(fontsize=8)
    return figure


def _clusters(pyplot: Any, section: Any, profile: Any) -> Any:
    """The similarity graph of each layer: heads on a circle, edges above the threshold, stars drawn black; pale lines for all overlaps."""
    import networkx

    from semkv.profiles.schema.roles import similarity_graph

    stores = [store for store in range(len(section.roles)) if f"taxonomy.overlap.{store}" in profile.tensors]
    columns = min(8, max(1, len(stores)))
    rows = -(-len(stores) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(2.2 * columns, 2.4 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat:
        axis.axis("off")
    for axis, store in zip(axes.flat, stores):
        overlap = profile.tensors[f"taxonomy.overlap.{store}"].tolist()
        graph = similarity_graph(overlap, section.tau_similar)
        places = networkx.circular_layout(graph)
        follows = section.clusters[store]
        for one in graph:
            for other in range(one):
                line = [places[one], places[other]]
                axis.plot(
                    [p[0] for p in line], [p[1] for p in line], color="grey", lw=0.8, alpha=overlap[one][other] / 2
                )
        for one, other, facts in graph.edges(data=True):
            star = follows[one] == other or follows[other] == one
            line = [places[one], places[other]]
            axis.plot(
                [p[0] for p in line],
                [p[1] for p in line],
                color="black" if star else "lightgrey",
                lw=3 * facts["overlap"] if star else 1.5,
                zorder=1,
            )
        for head, role in enumerate(section.roles[store]):
            axis.scatter(*places[head], s=160, color=COLOURS[role], zorder=2)
            axis.annotate(str(head), places[head], ha="center", va="center", fontsize=7, color="white", zorder=3)
        axis.set(xlim=(-1.35, 1.35), ylim=(-1.35, 1.35))
        axis.set_title(f"layer {store}", fontsize=8)
    handles = [pyplot.Line2D([], [], marker="o", ls="", color=colour) for colour in COLOURS.values()]
    figure.legend(handles, list(COLOURS), loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _whole_ticks(axis: Any) -> None:
    for side in (axis.xaxis, axis.yaxis):
        side.get_major_locator().set_params(integer=True)


def _padded(rows: Any) -> list[list[float]]:
    most = max(map(len, rows))
    return [[*row, *[float("nan")] * (most - len(row))] for row in rows]


def _retrieval(pyplot: Any, section: Any, profile: Any) -> Any:
    """Semantic scores beside the classic ones: heat maps over layers and heads, and one against the other."""
    panels = (
        ("semantic (Eq. 5)", section.semantic),
        ("classic top-1", section.classic),
        (f"classic top-{section.top_k}", section.classic_top_k),
    )
    figure, axes = pyplot.subplots(1, 4, figsize=(15, 3.8), layout="constrained")
    for axis, (title, rows) in zip(axes, panels):
        image = axis.imshow(_padded(rows), aspect="auto", vmin=0, vmax=max(max(map(max, rows)), 1e-9), cmap="viridis")
        axis.set_title(title, fontsize=10)
        _whole_ticks(axis)
        axis.set(xlabel="query head", ylabel="layer")
        figure.colorbar(image, ax=axis)
    flat = [[value for row in rows for value in row] for _, rows in panels]
    axes[3].scatter(flat[1], flat[0], s=14, label="top-1")
    axes[3].scatter(flat[2], flat[0], s=14, marker="x", label=f"top-{section.top_k}")
    axes[3].set(xlabel="classic score", ylabel="semantic score")
    axes[3].set_title(f"{section.passed} of {section.tests} tests passed", fontsize=10)
    axes[3].legend(fontsize=8)
    return figure


def _errors(pyplot: Any, section: Any, profile: Any) -> Any:
    """Errors per layer with those of each data set, and the budgets that Alg. 1 makes of them."""
    from semkv.profiles.schema.allocation import layer_budgets

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    layers = range(len(section.errors))
    for axis in axes:
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].bar(layers, section.errors, color="lightsteelblue", label="all")
    for name, row in section.sets.items():
        axes[0].plot(layers, row, marker=".", lw=0.8, label=name)
    axes[0].set(xlabel="layer", ylabel="share of the error (Eq. 12)")
    axes[0].set_title(f"{section.keep} tokens kept", fontsize=10)
    axes[0].legend(fontsize=7)
    counted = [store for store, error in enumerate(section.errors) if error > 0]
    for mean in BUDGETS:
        sizes = layer_budgets([section.errors[store] for store in counted], mean * len(counted))
        axes[1].step(counted, sizes, where="mid", marker=".", label=f"{mean} tokens a layer")
    axes[1].set(xlabel="layer", ylabel="tokens", yscale="log")
    axes[1].set_title("budget per layer (Alg. 1)", fontsize=10)
    axes[1].legend(fontsize=8)
    return figure


def _sketch(pyplot: Any, section: Any, profile: Any) -> Any:
    """Far attention caught by bytes per token, and by head with all of them."""
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    nbytes = range(1, section.stages + 1)
    for site, row in enumerate(section.caught):
        for head in range(len(row)):
            caught = profile.tensors[f"sketch.caught.{site}"][head].tolist()
            axes[0].plot(
                nbytes, caught, color=pyplot.cm.viridis(site / max(1, len(section.caught) - 1)), lw=0.8, marker="."
            )
    axes[0].set(
        xlabel="bytes of a code", ylabel=f"far attention caught by {section.share:.0%} of the tokens", xticks=nbytes
    )
    axes[0].set_title("held-out samples, a line per KV head (dark: early layers)", fontsize=10)
    rows = [row for row in section.caught if row]
    image = axes[1].imshow(_padded(rows), aspect="auto", vmin=0, vmax=1, cmap="magma")
    _whole_ticks(axes[1])
    axes[1].set(xlabel="KV head", ylabel="layer")
    axes[1].set_title(f"caught per head, codes of {section.stages} bytes", fontsize=10)
    figure.colorbar(image, ax=axes[1])
    return figure


def _losses(pyplot: Any, history: list[dict[str, float]], profile: Any) -> Any:
    """What SeKV's routers catch on held-out text over the steps of their training, mean over sites."""
    names = [name for name in history[0] if name not in ("step", "total")]
    figure, axes = pyplot.subplots(1, len(names), figsize=(3.2 * len(names), 2.6), squeeze=False, layout="constrained")
    for axis, name in zip(axes[0], names):
        axis.plot([row["step"] for row in history], [row[name] for row in history], marker=".")
        axis.set(title=f"{name}, held out", xlabel="step")
    return figure


__all__ = ["write_report"]
