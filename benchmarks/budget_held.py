"""Device and host bytes over a 4K prompt and 4K generated tokens of the bundled model, for every method and budget.

    python benchmarks/budget_held.py                 # writes benchmarks/results/budget_held.json; an interrupted run goes on
    python benchmarks/budget_held.py --new 256       # a shorter look, not written unless --out is given

After every token the memory is walked: device bytes are those of the tensors' storages, spans that a layer unfolds included,
not the runtime's own count. The budget is held where no step exceeds it; the host where it never holds more than the raw KV
plus 2 %.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import semkv
from semkv.compiled import CompiledModel
from semkv.evaluation.environment import describe, now
from semkv.profiles.bundled.tasks import make_haystack
from semkv.runtime.choosing import Zoom
from semkv.runtime.row_memory import RowMemory
from semkv.runtime.site_memory import SiteMemory
from semkv.runtime.spans import FoldedSpans
from semkv.runtime.workspace import Workspace

RESULTS = Path(__file__).resolve().parent / "results" / "budget_held.json"
METHODS = ("streaming_llm", "snapkv", "sekv")
BUDGETS = (0.05, 0.1, 0.2)
RESIDENCIES = {"streaming_llm": ("shared",), "snapkv": ("shared",), "sekv": ("shared", "elastic")}
"""Methods that unfold nothing are the same in both."""
CELLS = [(method, residency, budget) for method in METHODS for residency in RESIDENCIES[method] for budget in BUDGETS]
HOST_LIMIT = 1.02


def storages(tensors: Iterator[Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def device_tensors(memory: SiteMemory) -> Iterator[Tensor]:
    """What one store keeps on the device between steps: exact tokens, window, summaries, spans that stay unfolded."""
    for part in (memory.kept, memory.recent):
        yield from (part._k, part._v, part._positions)
    if memory.spans is not None:
        yield from memory.spans.device_tensors()
    if memory.workspace is not None:
        yield from memory.workspace.tensors


def host_bytes(spans: FoldedSpans) -> int:
    """What one store has on the host: tokens, factors and tables."""
    factors = spans.host_factors
    tables = [x for name, x in vars(spans).items() if name.startswith("segment_")]
    tables += [] if spans.components.summary is not None else [spans.lengths, spans.positions]
    tables += [*factors.offsets.values(), factors.key_rank, factors.value_rank, factors.lengths, spans.retired.data]
    parts = (*spans.host_tokens.parts.values(), *factors.packed.values())
    return sum(x.nbytes for x in tables) + sum(part.data.nbytes for part in parts)


class Watch:
    """Largest residency of a row over its steps, as shares of the budget and of the raw KV at that step.

    With a shared workspace a step holds most when a layer has just unfolded its spans: it looks then, at every layer.
    """

    def __init__(self, row: RowMemory) -> None:
        self.row, self.device, self.host = row, 0.0, 0.0
        self.shared = row.placement.residency == "shared"
        self._unfold = SiteMemory._unfold

    def __enter__(self) -> Watch:
        watch, original = self, self._unfold

        def unfold(memory: SiteMemory, *args: Any) -> tuple[Zoom, Workspace]:
            zoom, workspace = original(memory, *args)
            if watch.shared:
                watch.look(watch.row.tokens + 1, storages(iter(workspace.tensors)))
            return zoom, workspace

        SiteMemory._unfold = unfold
        return self

    def __exit__(self, *exception: object) -> None:
        SiteMemory._unfold = self._unfold

    def look(self, tokens: int, running: int = 0) -> None:
        """Measure now; `running` are bytes that the running layer has unfolded and gives back."""
        stores = list(self.row.budgeted())
        resident = sum(storages(device_tensors(memory)) for memory in stores) + running
        self.device = max(self.device, resident / self.row.cap_bytes(tokens))
        full = sum(self.row.placement.budget.full_bytes(store, tokens) for store in self.row.placement.budgeted)
        self.host = max(
            self.host, sum(host_bytes(memory.spans) for memory in stores if memory.spans is not None) / full
        )


def run(compiled: CompiledModel, ids: Tensor, new: int) -> dict[str, float]:
    """Prefill `ids` and generate `new` tokens greedily, measuring in every step."""
    state = compiled.prefill(ids)
    row = state.rows[0]
    with Watch(row) as watch:
        watch.look(row.tokens)
        for _ in range(new):
            compiled.extend(state, state.logits.argmax(-1, keepdim=True))
            watch.look(row.tokens)
    stats = state.stats
    return {
        "device_peak_share": watch.device,
        "reported_peak_share": stats.peak_share,
        "host_share_of_raw": watch.host,
        "moved_bytes_per_step": stats.moved_bytes_per_step,
        "tokens": row.tokens,
    }


def prompt_ids(tokenizer: Any, tokens: int) -> Tensor:
    """The first `tokens` tokens of a dense haystack, [1, tokens]."""
    text = make_haystack("dense", tokens + 64, seed=0).context
    return torch.tensor([tokenizer(text)["input_ids"][:tokens]])


def main() -> None:
    """Run the grid, print the table, write the results; exit 1 where a bound is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=4096, help="generated tokens")
    parser.add_argument(
        "--out", type=Path, default=None, help="results file; default: the committed one for the full sizes"
    )
    options = parser.parse_args()
    started = now()
    full_size = (options.prompt, options.new) == (4096, 4096)
    out = options.out or (RESULTS if full_size else None)
    rows = earlier(out, options.prompt, options.new)
    done = {(row["method"], row["residency"], row["budget"]) for row in rows}
    model, tokenizer = semkv.bundled.load()
    ids = prompt_ids(tokenizer, options.prompt)
    bases: dict[str, CompiledModel] = {}
    for method, residency, budget in CELLS:
        if (method, residency, budget) in done:
            continue
        if residency not in bases:
            config = semkv.CompileConfig(kv_dtype="float16", floor=0, residency=residency)
            bases[residency] = semkv.compile(
                model, semkv.bundled.profile(), method=method, budget=budget, config=config
            )
        found = run(bases[residency].with_method(method, budget), ids, options.new)
        held = found["device_peak_share"] <= 1 and found["host_share_of_raw"] <= HOST_LIMIT
        rows.append({"method": method, "residency": residency, "budget": budget, "held": held, **found})
        print(json.dumps(rows[-1]), flush=True)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            environment = describe(started).model_dump(mode="json")
            report = {"environment": environment, "prompt": options.prompt, "new": options.new, "rows": rows}
            out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    show(rows)
    raise SystemExit(0 if all(row["held"] for row in rows) else 1)


def earlier(out: Path | None, prompt: int, new: int) -> list[dict]:
    """The rows of an interrupted run of the same sizes."""
    if out is None or not out.is_file():
        return []
    report = json.loads(out.read_text(encoding="utf-8"))
    same = (report["prompt"], report["new"]) == (prompt, new)
    return report["rows"] if same and len(report["rows"]) < len(CELLS) else []


def show(rows: list[dict]) -> None:
    """A row per method, residency and budget."""
    table = Table(title="largest residency over the run")
    for column in ("method", "residency", "budget", "device / budget", "host / raw KV", "KiB moved a step", "held"):
        table.add_column(column)
    for row in rows:
        table.add_row(
            row["method"],
            row["residency"],
            f"{row['budget']:.0%}",
            f"{row['device_peak_share']:.4f}",
            f"{row['host_share_of_raw']:.4f}",
            f"{row['moved_bytes_per_step'] / 1024:.1f}",
            "yes" if row["held"] else "NO",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
