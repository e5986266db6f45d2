"""SpeContext: selection levels, overlap and bytes saved, offload thresholds, throughput.

    python -m benchmarks.reports.specontext            # an interrupted run goes on
    python -m benchmarks.reports.specontext --page     # the page alone, from the results that are there
    python -m benchmarks.reports.specontext --model PATH --profile PATH

40 questions per family at 4K tokens, asked after compression. Writes benchmarks/results/reports_specontext.json and
docs/results/reports_specontext.md, another model's with its name.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.claims import Claim, Figures, claims_table, over_contexts, together, verdict, write_parts
from benchmarks.lib.costs import spread
from benchmarks.lib.grids import FAMILIES, Bench, parser, provenance_of, read_parts, table, write_document
from semkv.compiler.offload import offload_demand
from semkv.config import CompileConfig
from semkv.evaluation import Grid, Variant
from semkv.evaluation.subject import as_ids
from semkv.evaluation.tables import markdown, percent, size
from semkv.profiles.schema.memory import UNBOUNDED, offloaded_stores
from semkv.runtime.state import State

NAME = "reports_specontext"
SAMPLES = 40
BUDGETS = (0.05, 0.1, 0.2)
GENERATED = 256
"""Tokens behind a context of which overlap and traffic are read."""
TOKENS = 512
"""Budget in tokens of the offload test, as the paper's are."""
FIRST, LAST = 600, 3000
"""The offload test grows a row from before the first threshold until all layers have left."""
WORKLOADS = ((2048, 12), (8192, 12))
"""Tokens of a prompt, and steps behind it."""
CONTEXTS = 4
"""Contexts of each figure."""
DEVICE = "4GB"
BATCHES = (1, 2)
STRICT = {"strict": True}

LAYER_WISE, ANEW, ELASTIC, OFFLOAD = (
    "layer-wise",
    "retrieval head (C1)",
    "+ elastic loading (C2)",
    "+ layers on the device (C3)",
)
"""Columns of the throughput. All select the same number of tokens; from C1 on they are the same tokens. Without elastic loading a step
fetches all of them."""
OVERLAP = 0.8
ALIKE = 0.05
"""Numbers of selected tokens that differ by less than this part are equal."""

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
def traffic(bench: Bench, budget: float, options: dict[str, Any], length: int, index: int) -> dict[str, float]:
    """Overlap between steps, and bytes that a step moves, over `GENERATED` tokens sampled behind a context."""
    compiled = compiled_as(bench, budget, options)
    state = compiled.prefill(as_ids(bench.sample(length, index).ids))
    chance = torch.Generator().manual_seed(index)
    for _ in range(GENERATED):
        token = int(torch.multinomial(state.logits[-1].float().softmax(-1), 1, generator=chance))
        compiled.extend(state, as_ids((token,)))
    stats = state.stats
    return {"overlap": stats.overlap, "moved": stats.moved_bytes_per_step, "full": state.full_bytes}


def traffics(bench: Bench, figures: Figures, length: int) -> list[dict[str, Any]]:
    """`traffic` of every selection and budget, a number for each context."""
    kept = []
    contexts = bench.arguments.contexts or CONTEXTS
    for budget in BUDGETS:
        for label, options in (
            (HEAD, STRICT),
            (BATCH, STRICT | {"selection": "batch"}),
            (LAYERS, {"retrieval": "layers"}),
        ):
            if not bench.serves("specontext", budget, options):
                continue
            found = []
            for index in range(contexts):
                settings = {"budget": budget, "length": length, "tokens": GENERATED, "index": index} | options
                found.append(
                    figures.get(
                        "traffic", settings, lambda b=budget, o=options, i=index: traffic(bench, b, o, length, i)
                    )
                )
            kept.append({"budget": budget, "label": label} | {name: [one[name] for one in found] for name in found[0]})
    return kept


def traffic_table(kept: Sequence[Mapping[str, Any]]) -> str:
    """What elastic loading finds there already, and what it saves against fetching a step's selection anew."""
    lines = []
    for one in kept:
        overlap = over_contexts(listed(one["overlap"]))
        moved = statistics.fmean(listed(one["moved"]))
        anew = moved / (1 - overlap.value)
        lines.append(
            [
                f"{100 * one['budget']:g} %",
                one["label"],
                percent(overlap),
                size(moved),
                size(anew),
                size(anew - moved),
                verdict(overlap, low=OVERLAP),
            ]
        )
    columns = [
        "budget",
        "selection",
        "overlap, %",
        "moved per step",
        "the same choice fetched anew",
        "saved",
        f"overlap above {100 * OVERLAP:g} %",
    ]
    return table(columns, lines)


def listed(held: Any) -> list[float]:
    """A number for each context; results from before there were several have one."""
    return list(held) if isinstance(held, list) else [held]


@torch.no_grad()
def offload(bench: Bench) -> dict[str, Any]:
    """One row grown across every threshold, beside one whose layers wait on the host from the start."""
    probe = compiled_as(bench, TOKENS, STRICT, offload="progressive", device_memory="1TB")
    demand = offload_demand(probe.program, probe.placement.plan, bench.profile, probe.placement.budget, probe.settings)
    device = int(demand.device_bytes(FIRST + 100, 0))
    progressive = compiled_as(bench, TOKENS, STRICT, offload="progressive", device_memory=device)
    plain = compiled_as(bench, TOKENS, STRICT)
    ids = bench.sample(LAST, family="single").ids
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


def selected(state: State) -> float:
    """Tokens per KV head and layer that the last step unfolded."""
    found = [m.slots.filled / m.site.kv_heads for row in state.rows for m in row.budgeted() if m.slots]
    return statistics.fmean(found)


def emptied(state: State) -> None:
    """Have a state fetch all that its next step unfolds, into the slots that there are."""
    for row in state.rows:
        for memory in row.budgeted():
            if memory.slots is not None:
                memory.slots.forget()


def layer_wise(bench: Bench, ids: torch.Tensor, wanted: float):
    """Every layer for itself, with the budget at which a step unfolds about `wanted` tokens, and its state."""
    budget = int(wanted) + 2 * bench.compiled.placement.page_size + 64
    for _ in range(4):
        compiled = compiled_as(bench, budget, {"retrieval": "layers"})
        state = compiled.prefill(ids)
        probe = state.fork()
        compiled.extend(probe, ids[:, -1:])
        lacking = wanted - selected(probe)
        if abs(lacking) <= ALIKE * wanted / 2:
            break
        budget += round(lacking)
    return compiled, state


@torch.no_grad()
def throughput(bench: Bench, prompt: int, new: int, batch: int, index: int) -> dict[str, Any]:
    """Median time of a decode step [s] of each form behind one context (each row its own), turn by turn, and the tokens that a step of it
    selects, which are made equal: a form with fewer to fetch would be ahead for that alone."""
    rows = [bench.sample(prompt + 64, index * batch + row, "single").ids[:prompt] for row in range(batch)]
    ids = torch.tensor(rows)
    head = compiled_as(bench, 0.1, STRICT)
    probe = head.prefill(ids)
    head.extend(probe, ids[:, -1:])
    by_layer, first = layer_wise(bench, ids, selected(probe))
    forms = {
        "full": bench.compiled.with_method("full"),
        ANEW: head,
        ELASTIC: head,
        OFFLOAD: compiled_as(bench, 0.1, STRICT, offload="progressive", device_memory=DEVICE, rows=batch),
    }
    states = {LAYER_WISE: first} | {name: compiled.prefill(ids) for name, compiled in forms.items()}
    forms[LAYER_WISE] = by_layer
    spent: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(new):
        token = states["full"].logits.argmax(-1, keepdim=True)  # the same for all
        for name, compiled in forms.items():
            if name in (ANEW, LAYER_WISE):
                emptied(states[name])
            started = time.perf_counter()
            compiled.extend(states[name], token)
            spent[name].append(time.perf_counter() - started)
    return {
        "seconds": {name: statistics.median(times) for name, times in spent.items()},
        "selected": {name: selected(state) for name, state in states.items() if name != "full"},
    }


def layers_that_stay(bench: Bench) -> tuple[int, int]:
    """Layers of the model, and those that wait on a device of `DEVICE` at the longest workload in the largest batch."""
    compiled = compiled_as(bench, 0.1, STRICT, offload="progressive", device_memory=DEVICE, rows=max(BATCHES))
    longest = max(prompt + new for prompt, new in WORKLOADS)
    layers = len(compiled.program.stores)
    return layers, layers - offloaded_stores(compiled.placement.thresholds, longest)


def throughputs(bench: Bench, figures: Figures) -> list[dict[str, Any]]:
    """Seconds of a step of every form, and the tokens that it selects, by workload and batch, a number for each context."""
    kept = []
    longest = bench.lengths([prompt for prompt, _ in WORKLOADS], 64 + max(new for _, new in WORKLOADS))
    for prompt, new in (one for one in WORKLOADS if one[0] in longest):
        for batch in BATCHES:
            settings = {"prompt": prompt, "new": new, "batch": batch}
            made = [
                figures.get(
                    "throughput",
                    settings | {"index": index},
                    lambda p=prompt, n=new, b=batch, i=index: throughput(bench, p, n, b, i),
                )
                for index in range(bench.arguments.contexts or CONTEXTS)
            ]
            kept.append(
                settings
                | {part: {name: [one[part][name] for one in made] for name in made[0][part]} for part in made[0]}
            )
    return kept


def workload(one: Mapping[str, Any]) -> str:
    return f"[{one['prompt']}, {one['new']}], {one['batch']}"


def over(one: Mapping[str, Any], name: str, base: str) -> list[float]:
    """Steps per second of a form over those of another, behind each context."""
    seconds = one["seconds"]
    if name not in seconds or base not in seconds:
        return []
    return [b / a for a, b in zip(listed(seconds[name]), listed(seconds[base]))]


def alike(one: Mapping[str, Any], name: str, base: str) -> bool:
    """Whether two forms select equally many tokens."""
    counts = one.get("selected", {})
    if base == "full" or name not in counts or base not in counts:
        return base == "full"
    return all(abs(a - b) <= ALIKE * b for a, b in zip(listed(counts[name]), listed(counts[base])))


def throughput_table(kept: Sequence[Mapping[str, Any]]) -> str:
    """Table 3 and Fig. 11: steps per second over those of the full cache, and the tokens selected, by workload and batch."""
    names = [name for name in (LAYER_WISE, ANEW, ELASTIC, OFFLOAD) if name in kept[0]["seconds"]]
    lines = []
    for one in kept:
        counts = {
            name: statistics.fmean(listed(one["selected"][name])) for name in names if name in one.get("selected", {})
        }
        lines.append([workload(one), *[spread(over_contexts(over(one, name, "full"))) for name in names]])
        lines[-1] += [f"{min(counts.values()):.0f} to {max(counts.values()):.0f}" if counts else "-"]
    return table(["[in, out], batch", *names, "tokens selected"], lines)


COMPARED: tuple[tuple[str, str, str], ...] = (
    (
        "all three together are ahead of the full cache: 18.1 and 24.9 times eager attention, 1.68 and 2.20 times FlashInfer, at "
        "[2k, 16k] and [2k, 32k] (Table 3, DeepSeek-Distill-Llama-8B, which has 32 requests at once where eager attention "
        "has room for 4)",
        OFFLOAD,
        "full",
    ),
    ("C1 adds (Fig. 11, a picture without figures)", ANEW, LAYER_WISE),
    ("C2 adds, by moving less (that it also moves while others are computed is not built here)", ELASTIC, ANEW),
    ("C3 adds, by more of the KV on the device", OFFLOAD, ELASTIC),
)


def throughput_verdicts(kept: Sequence[Mapping[str, Any]]) -> str:
    """What the paper says of throughput beside ours at every workload, and whether each goes that way; forms that do not select alike are
    not compared."""
    lines = []
    for paper, name, base in COMPARED:
        found = [over(one, name, base) if alike(one, name, base) else [] for one in kept]
        known = [over_contexts(values) for values in found if values]
        each = [spread(over_contexts(values)) if values else "-" for values in found]
        lines.append([paper, f"{name} over {base}", *each, together(verdict(one, low=1) for one in known)])
    return table(["the paper says", "steps per second", *map(workload, kept), "here"], lines)


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
        bench.name,
        f"# SpeContext on {bench.title}",
        f"{length} tokens, question asked after compression, mean over {', '.join(report.summaries[0].families)}. Made by "
        f"`benchmarks/reports/specontext.py`; do not edit. "
        f"The retrieval head has {section.parameters:,} parameters, {100 * (1 - section.parameters / section.whole):.1f} % fewer than "
        "the one-layer model that it stands for; its keys are charged to the budget, in 8 or 4 bits (`strict`), where the paper does "
        "not count them.",
        "## Selection (Fig. 5a, Sec. 7.2)",
        "What a layer unfolds stays in slots of its own, in its own part of the budget, as elastic loading has it.",
        claims_table(report, CLAIMS),
        *bench.left_out(),
        markdown(report),
        "## Overlap and elastic loading",
        f"Over {GENERATED} tokens sampled behind each of {CONTEXTS} contexts. The paper reports more than {100 * OVERLAP:g} % overlap on "
        "7B and 8B models, "
        "where neighbouring queries ask alike. Where every layer chooses by its own true attention, the line is the model's, not the "
        "head's. Saved is what was there from the step before.",
        traffic_table(content["traffic"]),
        "## Thresholds",
        f"One row grows across every threshold of a pretended device of {size(crossed['device_memory'])} (thresholds in tokens, for no "
        f"layer on the host, one, and so on: {', '.join(map(limit_text, crossed['thresholds']))}), budget {TOKENS} tokens, beside one "
        f"whose layers wait on the host from the start. The largest difference of a logit is {crossed['worst']:.1g}. Layers "
        f"leave one by one as the sequence grows, and tokens stay the same (Sec. 6): {'they do' if same else 'they do NOT'}.",
        offload_table(crossed),
        "## Throughput (Table 3, Fig. 11)",
        "Decode steps per second over those of the full cache in the same run, medians, on a CPU, where the host tier is memory like the "
        "device's: what transfers cost on a link is not measured here, nor larger batches for the room that is saved, from which most of "
        "the paper's figures come. On a model of four layers the full cache is small, and steps are bound by the number of calls.",
        f"`{OFFLOAD}` is given a device of {DEVICE}, the paper's small one. What that tests is that the option runs with the "
        f"thresholds that follow from it, and what it adds to a step: of the {layers} layers of this model {resident} stay on the device "
        "at the longest of these workloads. Where all stay, the limit does not bind, and nothing is moved because of it. How layers "
        "leave when a limit binds is the table of thresholds above, on a pretended device as small as this model needs; how a device of "
        "that size does with a model that fills it is not measured.",
        throughput_table(content["throughput"]),
        "The same steps per second, one form's over another's behind the same contexts, beside what the paper says; seen where the "
        "interval over contexts is above 1 at every workload. All forms select as many tokens, within "
        f"{100 * ALIKE:g} %: `{LAYER_WISE}` has the budget for it. It and `{ANEW}` fetch all of them in every step.",
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
        figures = Figures(arguments.rows / f"{bench.name}.figures.jsonl", bench.identity)
        moved = traffics(bench, figures, length)
        crossed = figures.get("offload", {"first": FIRST, "last": LAST, "budget": TOKENS}, lambda: offload(bench))
        content = {"traffic": moved, "offload": crossed, "throughput": throughputs(bench, figures)}
        write_parts(bench.name, {"selection": report}, content)
    print(f"wrote {write_page(read_parts(bench.name), bench)}")


if __name__ == "__main__":
    main()
