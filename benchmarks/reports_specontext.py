"""SpeContext on the bundled model: selection levels, overlap and bytes saved, offload thresholds, throughput.

    python benchmarks/reports_specontext.py            # an interrupted run goes on
    python benchmarks/reports_specontext.py --page     # the page alone, from the results that are there

40 questions per family at 4K tokens, asked after compression. Writes benchmarks/results/reports_specontext.json and
docs/results/reports_specontext.md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from grids import FAMILIES, Bench, parser, provenance_of, read_parts, table, write_document
from reports import Claim, Figures, claims_table, write_parts

from semkv.config import CompileConfig
from semkv.evaluation import Grid, Variant
from semkv.evaluation.samples import make_sample
from semkv.evaluation.subject import as_ids
from semkv.evaluation.tables import markdown, size
from semkv.offload import offload_demand
from semkv.profiles.schema.memory import UNBOUNDED, offloaded_stores

NAME = "reports_specontext"
SAMPLES = 40
BUDGETS = (0.05, 0.1, 0.2)
GENERATED = 256
"""Tokens behind a context of which overlap and traffic are read."""
TOKENS = 512
"""Budget in tokens of the offload test, as the paper's are."""
FIRST, LAST = 600, 3000
"""The offload test grows a row from before the first threshold until all layers have left."""
WORKLOADS = ((2048, 48), (8192, 48))
DEVICE = "4GB"
BATCHES = (1, 2)
STRICT = {"strict": True}

LAYER_WISE = "layer-wise"
PARTS = ("+ retrieval head (C1)", "+ layers on the device (C3)")
"""Columns of the throughput, each with one part more; elastic loading (C2) is in all of them."""
OVERLAP = 0.8
EARLIER = (
    "Measured with version 0.1. `retrieval head, all fetched anew` and, under Throughput, `layer-wise` are of layers that shared one "
    "workspace, in which each could read more than its part of the budget, and fetched all anew, so that what is ahead of `layer-wise` "
    "there owes a part of that to C2; to be measured again."
)

HEAD, BATCH, LAYERS = "retrieval head", "one choice for all heads", "every layer for itself"
VARIANTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (HEAD, "specontext", STRICT),
    (BATCH, "specontext", STRICT | {"selection": "batch"}),
    (LAYERS, "specontext", {"retrieval": "layers"}),
    ("quest", "quest", {}),
    ("clusterkv", "clusterkv", {}),
    ("shadowkv", "shadowkv", {}),
)
CLAIMS = tuple(
    Claim(label, base, way, paper, budget)
    for budget in BUDGETS
    for label, base, way, paper in (
        (BATCH, HEAD, "lower", "head level above batch level (Fig. 5a)"),
        (HEAD, LAYERS, "equal", "accuracy kept with one selection before the forward pass (Sec. 7.2)"),
        (HEAD, "quest", "equal", "on a par with Quest, ClusterKV, ShadowKV (Sec. 7.2)"),
        (HEAD, "clusterkv", "equal", "the same"),
        (HEAD, "shadowkv", "equal", "the same"),
    )
)


def grid(samples: int, length: int) -> Grid:
    """Levels of selection and the layer-wise methods, at each budget."""
    variants = [
        Variant(method=method, budget=budget, label=label, options=options)
        for budget in BUDGETS
        for label, method, options in VARIANTS
    ]
    return Grid(
        variants=(Variant(method="full"), *variants),
        families=FAMILIES,
        lengths=(length,),
        samples=samples,
        questions_per_context=4,
    )


def compiled_as(bench: Bench, budget: float | int, options: dict[str, Any], **settings: Any):
    """The bundled model under `specontext` with other settings."""
    config = CompileConfig(kv_dtype="float16", floor=0, **settings)
    return bench.compiled.with_method("specontext", budget=budget, config=config, **options)


@torch.no_grad()
def traffic(bench: Bench, budget: float, options: dict[str, Any], length: int) -> dict[str, float]:
    """Overlap between steps, and bytes that a step moves, over `GENERATED` tokens sampled behind a context."""
    compiled = compiled_as(bench, budget, options)
    state = compiled.prefill(as_ids(make_sample(bench.tokenizer, "dense", length, 0, seed=0, questions=1).ids))
    chance = torch.Generator().manual_seed(0)
    for _ in range(GENERATED):
        token = int(torch.multinomial(state.logits[-1].float().softmax(-1), 1, generator=chance))
        compiled.extend(state, as_ids((token,)))
    stats = state.stats
    return {"overlap": stats.overlap, "moved": stats.moved_bytes_per_step, "full": state.full_bytes}


def traffics(bench: Bench, figures: Figures, length: int) -> list[dict[str, Any]]:
    """`traffic` of every selection and budget."""
    kept = []
    for budget in BUDGETS:
        for label, options in (
            (HEAD, STRICT),
            (BATCH, STRICT | {"selection": "batch"}),
            (LAYERS, {"retrieval": "layers"}),
        ):
            settings = {"budget": budget, "length": length, "tokens": GENERATED} | options
            found = figures.get("traffic", settings, lambda b=budget, o=options: traffic(bench, b, o, length))
            kept.append({"budget": budget, "label": label, **found})
    return kept


def traffic_table(kept: Sequence[Mapping[str, Any]]) -> str:
    """What elastic loading finds there already, and what it saves against fetching a step's selection anew."""
    lines = []
    for one in kept:
        anew = one["moved"] / (1 - one["overlap"])
        lines.append(
            [
                f"{100 * one['budget']:g} %",
                one["label"],
                f"{100 * one['overlap']:.0f}",
                size(one["moved"]),
                size(anew),
                size(anew - one["moved"]),
                "yes" if one["overlap"] > OVERLAP else "no",
            ]
        )
    columns = [
        "budget",
        "selection",
        "overlap, %",
        "moved per step",
        "the same choice fetched anew",
        "saved",
        f"overlap above {100 * OVERLAP:g} %, seen here",
    ]
    return table(columns, lines)


@torch.no_grad()
def offload(bench: Bench) -> dict[str, Any]:
    """One row grown across every threshold, beside one whose layers wait on the host from the start."""
    probe = compiled_as(bench, TOKENS, STRICT, offload="progressive", device_memory="1TB")
    demand = offload_demand(probe.program, probe.placement.plan, bench.profile, probe.placement.budget, probe.settings)
    device = int(demand.device_bytes(FIRST + 100, 0))
    progressive = compiled_as(bench, TOKENS, STRICT, offload="progressive", device_memory=device)
    plain = compiled_as(bench, TOKENS, STRICT)
    ids = make_sample(bench.tokenizer, "single", LAST, 0, seed=0, questions=1).ids
    states = [compiled.prefill(as_ids(ids[:FIRST])) for compiled in (plain, progressive)]
    limits = [limit for limit in progressive.placement.thresholds if FIRST <= limit < len(ids)]
    stops = sorted({stop for limit in limits for stop in (limit, limit + 1, limit + 20)} | {len(ids)})
    place, worst, lines = FIRST, 0.0, []
    for stop in (stop for stop in stops if stop <= len(ids)):
        step = as_ids(ids[place:stop])
        one, other = (
            compiled.extend(state, step) for compiled, state in zip((plain, progressive), states, strict=True)
        )
        worst = max(worst, float((one - other).abs().max()))
        place = stop
        layers = sum(memory.on_device for memory in states[1].rows[0].budgeted())
        held = states[1].nbytes
        lines.append(
            {
                "tokens": stop,
                "layers_on_device": layers,
                "resident": held["resident"],
                "host": held["host"],
                "same_token": bool((one.argmax(-1) == other.argmax(-1)).all()),
            }
        )
    return {
        "device_memory": device,
        "thresholds": list(progressive.placement.thresholds),
        "worst": worst,
        "lines": lines,
    }


def offload_table(found: dict[str, Any]) -> str:
    lines = [
        [
            str(x["tokens"]),
            str(x["layers_on_device"]),
            size(x["resident"]),
            size(x["host"]),
            "yes" if x["same_token"] else "NO",
        ]
        for x in found["lines"]
    ]
    return table(["tokens", "layers that wait on the device", "waiting there", "on the host", "same tokens"], lines)


@torch.no_grad()
def throughput(bench: Bench, prompt: int, new: int, batch: int) -> dict[str, float]:
    """Median time of a decode step [s] of each form, all in one run, turn by turn."""
    ids = torch.stack(
        [
            torch.tensor(make_sample(bench.tokenizer, "single", prompt + 64, i, seed=1, questions=1).ids[:prompt])
            for i in range(batch)
        ]
    )
    forms = {
        "full": bench.compiled.with_method("full"),
        LAYER_WISE: compiled_as(bench, 0.1, {"retrieval": "layers"}),
        PARTS[0]: compiled_as(bench, 0.1, STRICT),
        PARTS[1]: compiled_as(bench, 0.1, STRICT, offload="progressive", device_memory=DEVICE, rows=batch),
    }
    states = {name: compiled.prefill(ids) for name, compiled in forms.items()}
    spent: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(new):
        for name, compiled in forms.items():
            token = states[name].logits.argmax(-1, keepdim=True)
            started = time.perf_counter()
            compiled.extend(states[name], token)
            spent[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in spent.items()}


def layers_that_stay(bench: Bench) -> tuple[int, int]:
    """Layers of the model, and those that wait on a device of `DEVICE` at the longest workload in the largest batch."""
    compiled = compiled_as(bench, 0.1, STRICT, offload="progressive", device_memory=DEVICE, rows=max(BATCHES))
    longest = max(prompt + new for prompt, new in WORKLOADS)
    layers = len(compiled.program.stores)
    return layers, layers - offloaded_stores(compiled.placement.thresholds, longest)


def throughputs(bench: Bench, figures: Figures) -> list[dict[str, Any]]:
    """Seconds of a step of every form, by workload and batch."""
    kept = []
    for prompt, new in WORKLOADS:
        for batch in BATCHES:
            settings = {"prompt": prompt, "new": new, "batch": batch}
            found = figures.get("throughput", settings, lambda p=prompt, n=new, b=batch: throughput(bench, p, n, b))
            kept.append(settings | {"seconds": found})
    return kept


def workload(one: Mapping[str, Any]) -> str:
    return f"[{one['prompt']}, {one['new']}], {one['batch']}"


def throughput_table(kept: Sequence[Mapping[str, Any]]) -> str:
    """Table 3 and Fig. 11: steps per second over those of the full cache, by workload and batch."""
    names = [name for name in kept[0]["seconds"] if name != "full"]
    lines = [
        [workload(one), *[f"{one['seconds']['full'] / one['seconds'][name]:.2f}" for name in names]] for one in kept
    ]
    return table(["[in, out], batch", *names], lines)


def throughput_verdicts(kept: Sequence[Mapping[str, Any]]) -> str:
    """What the paper says of throughput beside ours at every workload, and whether each goes that way."""

    def over(name: str, base: str) -> list[float]:
        """Steps per second of a form over those of another."""
        return [one["seconds"][base] / one["seconds"][name] for one in kept]

    said: tuple[tuple[str, str, list[float], Callable[[Sequence[float]], bool]], ...] = (
        (
            "all three together are ahead of the full cache: 18.1 and 24.9 times eager attention, 1.68 and 2.20 times FlashInfer, at "
            "[2k, 16k] and [2k, 32k] (Table 3, DeepSeek-Distill-Llama-8B, which has 32 requests at once where eager attention "
            "has room for 4)",
            "times full's",
            over(PARTS[1], "full"),
            lambda values: min(values) > 1,
        ),
        (
            "C1 adds (Fig. 11, a picture without figures)",
            "over layer-wise",
            over(PARTS[0], LAYER_WISE),
            lambda values: min(values) > 1,
        ),
        ("C2 adds, by moving less", "-", [], lambda values: False),
        (
            "C3 adds, by more of the KV on the device",
            "over C1",
            over(PARTS[1], PARTS[0]),
            lambda values: min(values) > 1.05,
        ),
        (
            "10.06 times eager attention and 1.17 times ShadowKV on a GPU held to 4 GB (Fig. 10b)",
            "-",
            [],
            lambda values: False,
        ),
    )
    lines = [
        [paper, figure, *([f"{value:.2f}" for value in values] or ["-"] * len(kept)), seen(values, holds)]
        for paper, figure, values, holds in said
    ]
    return table(["the paper says", "figure", *map(workload, kept), "seen here"], lines)


def seen(values: Sequence[float], holds: Callable[[Sequence[float]], bool]) -> str:
    if not values:
        return "not measured"
    return "yes" if holds(values) else "no"


def limit_text(limit: int) -> str:
    return "no limit" if limit >= UNBOUNDED else str(limit)


def write_page(content: Mapping[str, Any], bench: Bench) -> Path:
    """The page, from the results."""
    report, crossed = content["reports"]["selection"], content["offload"]
    length = report.summaries[0].length
    layers, resident = layers_that_stay(bench)
    section = bench.profile.info.retrieval_head
    same = all(line["same_token"] for line in crossed["lines"])
    return write_document(
        NAME,
        "# SpeContext on the bundled model",
        f"{length} tokens, question asked after compression, mean over the four families. Made by `benchmarks/{NAME}.py`; do not edit. "
        f"The retrieval head has {section.parameters:,} parameters, {100 * (1 - section.parameters / section.whole):.1f} % fewer than "
        "the one-layer model that it stands for; its keys are charged to the budget, in 8 or 4 bits (`strict`), where the paper does "
        "not count them.",
        EARLIER,
        "## Selection (Fig. 5a, Sec. 7.2)",
        "What a layer unfolds stays in slots of its own, in its own part of the budget, as elastic loading has it.",
        claims_table(report, CLAIMS),
        "Where the paper says equal and a change is above 0, the retrieval head is ahead of what it is compared with.",
        markdown(report),
        "## Overlap and elastic loading",
        f"Over {GENERATED} tokens sampled behind a context. The paper reports more than {100 * OVERLAP:g} % overlap on 7B and 8B models, "
        "where neighbouring queries ask alike. Where every layer chooses by its own true attention, the line is the model's, not the "
        "head's. Saved is what was there from the step before.",
        traffic_table(content["traffic"]),
        "## Thresholds",
        f"One row grows across every threshold of a pretended device of {size(crossed['device_memory'])} (thresholds in tokens, for no "
        f"layer on the host, one, and so on: {', '.join(map(limit_text, crossed['thresholds']))}), budget {TOKENS} tokens, beside one "
        f"whose layers wait on the host from the start. The largest difference of a logit is {crossed['worst']:.1g}. Layers "
        f"leave one by one as the sequence grows, and tokens stay the same (Sec. 6), seen here: {'yes' if same else 'no'}.",
        offload_table(crossed),
        "## Throughput (Table 3, Fig. 11)",
        "Decode steps per second over those of the full cache in the same run, medians, on a CPU, where the host tier is memory like the "
        "device's: what transfers cost on a link is not measured here, nor larger batches for the room that is saved, from which most of "
        "the paper's figures come. On a model of four layers the full cache is small, and steps are bound by the number of calls.",
        f"`{PARTS[1]}` is given a device of {DEVICE}, the paper's small one. What that tests is that the option runs with the "
        f"thresholds that follow from it, and what it adds to a step: of the {layers} layers of this model {resident} stay on the device "
        "at the longest of these workloads. Where all stay, the limit does not bind, and nothing is moved because of it. How layers "
        "leave when a limit binds is the table of thresholds above, on a pretended device as small as this model needs; how a device of "
        "that size does with a model that fills it is not measured.",
        throughput_table(content["throughput"]),
        "The same steps per second, one form's over another's, beside what the paper says. C3 counts as seen where it is worth 5 % at "
        "every workload. C2 is in every form; what it saves is the table of overlap above.",
        throughput_verdicts(content["throughput"]),
        "## Provenance",
        provenance_of(report, figures=True),
    )


def main() -> None:
    arguments = parser((__doc__ or "").splitlines()[0], page=True).parse_args()
    bench = Bench(NAME, arguments)
    if not arguments.page:
        length, samples = arguments.length, arguments.samples or SAMPLES
        report = bench.run(grid(samples, length), "SpeContext")
        figures = Figures(arguments.rows / f"{NAME}.figures.jsonl", bench.identity)
        moved = traffics(bench, figures, length)
        crossed = figures.get("offload", {"first": FIRST, "last": LAST, "budget": TOKENS}, lambda: offload(bench))
        content = {"traffic": moved, "offload": crossed, "throughput": throughputs(bench, figures)}
        write_parts(NAME, {"selection": report}, content)
    print(f"wrote {write_page(read_parts(NAME), bench)}")


if __name__ == "__main__":
    main()
