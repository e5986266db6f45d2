"""Registers, spills, shared memory and occupancy of every kernel, read from machine code for sm_80, sm_90 and sm_100; no GPU.

    python -m benchmarks.speed.kernel_report            # writes benchmarks/results/kernels.json and the table of docs/kernels.md
    python -m benchmarks.speed.kernel_report --only sketch_scores     # measure one operation's again, the others' rows stay
    python -m benchmarks.speed.kernel_report --page     # the table alone, from the results that are there

Nothing runs: these are figures of the compiler, not of a GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch
import triton
from torch import Tensor

from benchmarks.lib.places import ROOT
from semkv.kernels.drift_overlap.triton import drift_overlap_launches
from semkv.kernels.gate_scores.triton import gate_scores_launches
from semkv.kernels.gather.triton import copy_tokens_launches
from semkv.kernels.generation import Specialization
from semkv.kernels.mixed_attention.paged import PagedTokens
from semkv.kernels.mixed_attention.triton import Configuration, mixed_attention_launches
from semkv.kernels.rotary_append.triton import rotary_append_launches
from semkv.kernels.selection.triton import select_launches
from semkv.kernels.sketch_scores.triton import sketch_scores_launches
from semkv.kernels.span_summaries.triton import span_summaries_launches
from semkv.kernels.state.triton.append import append_launches
from semkv.kernels.state.triton.choose import choose_launches
from semkv.kernels.state.triton.coarse import coarse_launches
from semkv.kernels.state.triton.products import look_up_launches, products_launches
from semkv.kernels.state.triton.scores import scores_launches
from semkv.kernels.state.triton.unfold import unfold_launches
from semkv.kernels.surprisal.triton import surprisal_launches
from semkv.profiles.calibration import MeasureSettings

RESULTS, PAGE = ROOT / "benchmarks/results/kernels.json", ROOT / "docs/kernels.md"
START, END = "<!-- start of the table -->", "<!-- end of the table -->"
CAPABILITIES = (80, 90, 100)
MODELS = {
    "Llama-3.1-8B, Mistral-7B": (32, 8, 128),
    "Qwen2.5-14B": (40, 8, 128),
}
"""Query heads, KV heads, head dim; the first two models have the same."""


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def mixed_attention(model: tuple[int, int, int]) -> Iterator[tuple[str, Specialization]]:
    """One decode step in bfloat16: budgets of a 128K context do not change the code, so sizes are nominal."""
    q_heads, kv_heads, dim = model
    q, where = empty(1, q_heads, 1, dim), empty(1, 1, dtype=torch.int64)
    k, places = empty(1, kv_heads, 4096, dim), empty(1, kv_heads, 4096, dtype=torch.int64)
    left, values, right = empty(1, kv_heads, 32, 32, 16), empty(1, kv_heads, 32, 16), empty(1, kv_heads, 32, dim, 16)
    factored = (left, values, right, left, values, right, empty(1, kv_heads, 32, 32, dtype=torch.int64))
    hidden = empty(1, q_heads, 1, 32, 32, dtype=torch.float32)
    pages = empty(1, kv_heads, 256, dtype=torch.int32), empty(1, dtype=torch.int32)
    paged = PagedTokens(
        empty(kv_heads, 65536, dim), empty(kv_heads, 65536, dim), empty(1, 65536, dtype=torch.int32), *pages, 16
    )

    def coarse(bits: int) -> tuple:
        """Exact entries, and means in codes."""
        codes = empty(1, kv_heads, 1024, dim * bits // 8, dtype=torch.uint8)
        scale, bias = empty(1, kv_heads, 1024, 1, dtype=torch.float16), empty(1, 1, 1, 1024, dtype=torch.float32)
        both = [k, codes], [k, codes], [places, empty(1, 1, 1024, dtype=torch.int64)]
        return *both, [None, bias], None, [None, scale], [None, scale]

    variants: dict[str, tuple[tuple, PagedTokens | None]] = {
        "exact": (([k], [k], [places]), None),
        "exact in pages of 16": ((), paged),
        "exact, coarse in 8 bits": (coarse(8), None),
        "exact, coarse in 4 bits": (coarse(4), None),
        "exact, coarse in 4 bits, factored": ((*coarse(4), *factored, hidden), None),
    }
    for name, (entries, pool) in variants.items():
        _, launches = mixed_attention_launches(
            q, where, *entries, scale=dim**-0.5, paged=pool, configuration=Configuration(splits=8)
        )
        yield f"mixed attention: {name}", launches[0].specialization
    yield "mixed attention: merge of 8 splits", launches[1].specialization


def gate_scores(model: tuple[int, int, int]) -> Iterator[tuple[str, Specialization]]:
    """Summaries of 64 numbers over mean keys in 8 bits, and in 4."""
    q_heads, kv_heads, dim = model
    q, weight = empty(q_heads, 1, dim), empty(q_heads, 64, dim, dtype=torch.float32)
    own = empty(q_heads, dtype=torch.float32)
    for bits in (8, 4):
        codes, scale = (
            empty(kv_heads, 4096, dim * bits // 8, dtype=torch.uint8),
            empty(kv_heads, 4096, 1, dtype=torch.float16),
        )
        norms, lengths = empty(q_heads, 4096, 1, dtype=torch.float16), empty(1, 4096, dtype=torch.int32)
        _, launches = gate_scores_launches(q, weight, codes, scale, norms, lengths, own, own, bits=bits)
        yield f"gate scores: mean keys in {bits} bits", launches[1].specialization
    yield "gate scores: queries", launches[0].specialization


def sketch_scores(model: tuple[int, int, int]) -> Iterator[tuple[str, Specialization]]:
    """Codes of as many bytes as calibration gives heads of this size."""
    q_heads, kv_heads, dim = model
    stages = MeasureSettings().key_bytes(dim)
    tables = empty(kv_heads, q_heads // kv_heads, stages, 256, dtype=torch.float32)
    _, launches = sketch_scores_launches(tables, empty(kv_heads, 65536, stages, dtype=torch.uint8))
    yield f"sketch scores: codes of {stages} bytes", launches[0].specialization
    yield "sketch scores: normalisation", launches[1].specialization


def selection(model: tuple[int, int, int]) -> Iterator[tuple[str, Specialization]]:
    q_heads, kv_heads, _ = model
    score, threshold = empty(q_heads, 1, 65536, dtype=torch.float32), empty(q_heads, dtype=torch.float32)
    _, launches = select_launches(score, threshold, empty(kv_heads, 65536, dtype=torch.int32), 100_000)
    for name, place in (("keys", 0), ("sums of the last digit", -3), ("ties", -2), ("marks", -1)):
        yield f"selection: {name}", launches[place].specialization


def gather(model: tuple[int, int, int]) -> Iterator[tuple[str, Specialization]]:
    _, kv_heads, dim = model
    tokens, slots = empty(3, 16384, dtype=torch.int64), empty(kv_heads * 8192, dim)
    codes, scale = empty(kv_heads, 65536, dim, dtype=torch.uint8), empty(kv_heads, 65536, 1, dtype=torch.float16)
    for name, pool, scales in (("raw", empty(kv_heads, 65536, dim), None), ("8 bits", codes, scale)):
        yield f"gather: {name}", copy_tokens_launches([pool], [scales], [slots], tokens)[0].specialization


def span_summaries(model: tuple[int, int, int]) -> Iterator[tuple[str, Specialization]]:
    _, kv_heads, dim = model
    spans = empty(1024, dtype=torch.int64)
    _, launches = span_summaries_launches(empty(kv_heads, 65536, dim), spans, spans, empty(65536, dtype=torch.float32))
    yield "span summaries: weighted mean and bounds", launches[0].specialization


def surprisal(model: tuple[int, int, int]) -> Iterator[tuple[str, Specialization]]:
    """In these models the hidden states are as wide as all query heads together."""
    q_heads, _, dim = model
    hidden, weight = empty(4096, q_heads * dim), empty(128256, q_heads * dim)
    _, launches = surprisal_launches(hidden, weight, empty(4096, dtype=torch.int64))
    yield "surprisal: tiles of the vocabulary", launches[0].specialization
    yield "surprisal: merge", launches[1].specialization


def rotary_append(model: tuple[int, int, int]) -> Iterator[tuple[str, Specialization]]:
    q_heads, kv_heads, dim = model
    q, k, turn = empty(1, q_heads, 1, dim), empty(1, kv_heads, 1, dim), empty(1, 1, dim // 2, dtype=torch.float32)
    place, pool = empty(1, 1, dtype=torch.int64), empty(kv_heads, 65536, dim)
    positions = empty(1, 65536, dtype=torch.int32)
    _, launches = rotary_append_launches(q, k, k, turn, turn, place, place, pool, pool, positions)
    yield "rotary embedding and append", launches[0].specialization


def drift_overlap(model: tuple[int, int, int]) -> Iterator[tuple[str, Specialization]]:
    """After a selection, whose kernels are listed there."""
    weights, baseline = empty(model[1], 65536, dtype=torch.float32), empty(model[1], 65536, dtype=torch.bool)
    yield "drift overlap", drift_overlap_launches(weights, baseline, 2048)[1][-1].specialization


def state(model: tuple[int, int, int]) -> Iterator[tuple[str, Specialization]]:
    """The operators on a memory's tensors, where 128K tokens wait in 8 bits."""
    q_heads, kv_heads, dim = model
    group, waiting, slots = q_heads // kv_heads, 131072, 8192
    one, where = empty(1, dtype=torch.int64), empty(1, 1, dtype=torch.int64)
    new = empty(1, kv_heads, 1, dim)

    def coded(tokens: int, bits: int = 8) -> tuple[Tensor, Tensor]:
        codes = empty(1, kv_heads, tokens, dim * bits // 8, dtype=torch.uint8)
        return codes, empty(1, kv_heads, tokens, 1, dtype=torch.float16)

    def places(*shape: int) -> Tensor:
        return empty(1, *shape, dtype=torch.int32)

    for name, (into, scale) in (
        ("numbers", (empty(1, kv_heads, 128, dim), None)),
        ("8 bits", coded(128)),
        ("4 bits", coded(128, 4)),
    ):
        _, launches = append_launches(into, into, places(1, 128), new, new, where, one, scale, scale)
        yield f"state: append, {name}", launches[0].specialization
    q = empty(1, kv_heads, group, dim, dtype=torch.float32)
    for bits in (8, 4):
        codes, scale = coded(8192, bits)
        yield f"state: products, {bits} bits", products_launches(q, codes, scale, bits)[1][0].specialization
        bounds = products_launches(q, codes, scale, bits, y=codes, y_scale=scale)
        yield f"state: bounds, {bits} bits", bounds[1][0].specialization
    stages = MeasureSettings().key_bytes(dim)
    tables, codes = (
        empty(1, kv_heads, group, stages, 256, dtype=torch.float32),
        empty(1, kv_heads, waiting, stages, dtype=torch.uint8),
    )
    yield f"state: look-ups, {stages} bytes", look_up_launches(tables, codes)[1][0].specialization
    score = empty(1, kv_heads, group, waiting, dtype=torch.float32)
    added = empty(1, kv_heads, group, 65, dtype=torch.float32)[..., 64:]
    yield "state: scores", scores_launches(score, one, added)[1][0].specialization
    yield "state: choice of tokens", choose_launches(score, one, one)[1][0].specialization
    cost, least = places(1, waiting), empty(kv_heads, group, dtype=torch.float32)
    each = choose_launches(score, one, one, least, cost, each=True)
    yield "state: choice of spans, each query's", each[1][0].specialization
    (chosen, _, _), _ = choose_launches(score, one, one)
    (into, scale), (host, host_scale) = coded(slots), coded(waiting)
    held = (into, into, places(kv_heads, slots), places(kv_heads, slots))
    of_tokens = unfold_launches(*held, chosen, host, host, one, one, 1, scale, scale, host_scale, host_scale)[1]
    tables = {"bounds": places(1, waiting + 1), "order": places(kv_heads, waiting)}
    of_spans = unfold_launches(*held, chosen, host, host, one, one, 0, scale, scale, host_scale, host_scale, **tables)[
        1
    ]
    yield "state: places of tokens", of_tokens[0].specialization
    yield "state: places of spans", of_spans[0].specialization
    yield "state: copies in 8 bits", of_tokens[1].specialization
    books, shift = empty(kv_heads, 1, 256, dim, dtype=torch.float32), empty(1, kv_heads, group, 1, dtype=torch.float32)
    codes = empty(1, kv_heads, waiting, 1, dtype=torch.uint8)
    mean = empty(kv_heads, dim, dtype=torch.float32)
    _, launches = coarse_launches(score, shift, chosen, one, codes, books, mean)
    yield "state: weights by code", launches[0].specialization
    yield "state: sums and books", launches[1].specialization


Operation = Callable[[tuple[int, int, int]], Iterator[tuple[str, Specialization]]]

OPERATIONS: tuple[Operation, ...] = (
    mixed_attention,
    gate_scores,
    sketch_scores,
    selection,
    gather,
    span_summaries,
    surprisal,
    rotary_append,
    drift_overlap,
    state,
)


def measure(operations: tuple[Operation, ...], capabilities: tuple[int, ...] = CAPABILITIES) -> list[dict]:
    rows = []
    for model, sizes in MODELS.items():
        for operation in operations:
            for name, specialization in operation(sizes):
                for capability in capabilities:
                    found = specialization.compile(capability).resources
                    rows.append(
                        {
                            "kernel": name,
                            "model": model,
                            "capability": capability,
                            **asdict(found),
                            "occupancy": found.occupancy(capability),
                        }
                    )
                    print(rows[-1], flush=True)
    return rows


def merged(earlier: dict, versions: dict[str, str], rows: list[dict], name: str) -> list[dict]:
    """`rows` of the operation `name` in the place of its earlier ones; `SystemExit` where those are of other versions."""
    if {key: earlier[key] for key in versions} != versions:
        raise SystemExit(
            f"the earlier rows are of {earlier['triton']=}, {earlier['torch']=}, and not of {versions}: measure all of them"
        )
    prefix, found = name.replace("_", " "), []
    for model in MODELS:
        own = [row for row in earlier["rows"] if row["model"] == model]
        first = next((n for n, row in enumerate(own) if row["kernel"].startswith(prefix)), len(own))
        behind = [row for row in own[first:] if not row["kernel"].startswith(prefix)]
        found += [*own[:first], *(row for row in rows if row["model"] == model), *behind]
    return found


def table(rows: list[dict]) -> str:
    lines = [
        "| kernel | model | target | registers | spills, bytes | shared, KiB | warps | occupancy |",
        "|---|---|---|" + "---:|" * 5,
    ]
    for row in rows:
        lines.append(
            f"| {row['kernel']} | {row['model']} | sm_{row['capability']} | {row['registers']} | {row['stack_bytes']} | "
            f"{row['shared_bytes'] / 1024:.1f} | {row['warps']} | {row['occupancy']:.0%} |"
        )
    return "\n".join(lines)


def filled(page: str, rows: list[dict]) -> str:
    """`page` with the table of `rows` between its marks."""
    before, rest = page.split(START)
    return f"{before}{START}\n{table(rows)}\n{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [operation.__name__ for operation in OPERATIONS]
    parser.add_argument(
        "--only", choices=names, help="measure this operation's kernels, and keep the rows of all others"
    )
    parser.add_argument("--page", action="store_true", help="write the table alone, from the results that are there")
    asked = parser.parse_args()
    if not asked.page:
        versions = {"triton": triton.__version__, "torch": torch.__version__}
        chosen = tuple(operation for operation in OPERATIONS if asked.only in (None, operation.__name__))
        rows = measure(chosen)
        if asked.only:
            rows = merged(json.loads(RESULTS.read_text()), versions, rows, asked.only)
        RESULTS.write_text(json.dumps({**versions, "rows": rows}, indent=1) + "\n")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), json.loads(RESULTS.read_text())["rows"]), encoding="utf-8")


if __name__ == "__main__":
    main()
