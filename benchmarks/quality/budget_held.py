"""What every layer holds and reads over a 2K prompt and 500 generated tokens, for every method, at 5, 10 and 20 %, on models of 4, 12 and
30 layers.

    python -m benchmarks.quality.budget_held                 # some hours; writes the results and their page; an interrupted run goes on
    python -m benchmarks.quality.budget_held --new 20 --layers 12 --methods quest      # a look, not written unless --out is given

In every step the memory is walked and the entries of each layer's attention are counted, neither by the runtime's own figures:
bytes on the device are those of the tensors' storages, bytes read those of the entries that some query head sees. A budget is held where
no store exceeds its part of it in either way, and the parts together are no more than the row's. Methods that have the mode are also run
with `generated="kept"`, where what is generated stays beside the budget: their excess is printed, and no budget is broken. The model of 4
layers is the bundled one; the others are random, with profiles of a few random tokens.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.fx import GraphModule, Interpreter
from transformers import LlamaConfig, LlamaForCausalLM

import semkv
from benchmarks.lib.grids import measured_on, table, write_document
from benchmarks.lib.pages import Output
from benchmarks.lib.places import RESULTS
from benchmarks.lib.tiny_profiles import MEASURING, TRAINING
from semkv.compiled import CompiledModel
from semkv.errors import BudgetError
from semkv.evaluation.environment import describe, now
from semkv.ir.memory import Entries
from semkv.ir.ops import mixed_attention
from semkv.ir.site import AttentionSite
from semkv.ir.state_ops import EMPTY, factored_attention_
from semkv.methods import METHODS
from semkv.profiles.bundled.tasks import make_haystack
from semkv.profiles.calibration import (
    STEPS,
    CalibrationData,
    Job,
    MeasureData,
    run_steps,
)
from semkv.profiles.calibration.needles import NeedleQuestion, NeedleTest
from semkv.profiles.calibration.samples import SampleSet
from semkv.runtime.decode.row_turns import GraphedSteps
from semkv.runtime.row_memory import RowMemory
from semkv.runtime.store.site_memory import SiteMemory

RESULT = RESULTS / "budget_held.json"
PROMPT, NEW = 2048, 500
LAYERS = (4, 12, 30)
BUDGETS = (0.05, 0.1, 0.2)
VOCABULARY = 64
"""Of the random models: so few that some of their answers are right by chance, without which no retrieval heads are told apart."""
ROUNDING = 1 + 1e-9
OPTIONS: dict[str, dict[str, Any]] = {"heterocache": {"strict": True}, "omnikv": {"strict": True}}
"""Modes of methods that keep some heads or layers whole by default, which no small budget holds."""
KEPT = {"generated": "kept"}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "sekv, trained": ("sekv", {"router": "trained"}),
    "sekv, paper": ("sekv", {"preset": "paper"}),
    **{
        f"{name}, kept": (name, OPTIONS.get(name, {}) | KEPT)
        for name in ("snapkv", "pyramidkv", "chunkkv", "cake", "compresskv", "sentencekv", "heterocache")
    },
}
"""Other modes, by what the table calls them: method and options."""
ARGUMENTS = [argument.name for argument in mixed_attention._schema.arguments]
FACTORS = ("key_u", "key_s", "key_v", "value_u", "value_s", "value_v")


def storages(tensors: Iterator[Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def device_tensors(memory: SiteMemory) -> Iterator[Tensor]:
    """What one store keeps on the device: exact tokens, window, summaries, indexes, unfolded tokens."""
    for part in (memory.kept, memory.recent):
        yield from part.buffers
    if memory.spans is not None:
        yield from memory.spans.device_tensors()
    if memory.slots is not None:
        yield from memory.slots.tensors.values()
    if memory.factors.there is not None:
        yield from memory.factors.there.tensors


def read_bytes(entries: Entries) -> int:
    """Bytes of the keys and values in `entries`, without a batch dimension, that some query head sees."""
    total = 0.0
    scales = zip(*((own or [None] * len(entries.block_k)) for own in (entries.block_k_scale, entries.block_v_scale)))
    biases = entries.block_bias or [None] * len(entries.block_k)
    for k, v, positions, bias, own in zip(entries.block_k, entries.block_v, entries.block_positions, biases, scales):
        seen = (positions != EMPTY).expand(k.shape[0], -1)
        if bias is not None:
            seen = seen & (bias.amax(1).unflatten(0, (k.shape[0], -1)).amax(1) > float("-inf"))
        vectors = [x for x in (k, v, *own) if x is not None]
        total += int(seen.sum()) * sum(x.shape[-1] * x.itemsize for x in vectors)
    if entries.key_u is not None:
        heads = entries.key_u.shape[0]
        seen = entries.factored_bias.amax((1, 3)).unflatten(0, (heads, -1)).amax(1) > float("-inf")
        total += sum(
            int(seen.sum()) * getattr(entries, name)[0, 0].numel() * getattr(entries, name).itemsize for name in FACTORS
        )
    return round(total)


def code_bytes(memory: SiteMemory) -> int:
    """What attention reads of a store's index, where tokens that stay folded are attended to through it."""
    return storages(iter(memory.spans.device_tensors())) if memory.spans is not None and memory.reads_codes else 0


class Reading(Interpreter):
    """A step's graph, operator by operator. seen: takes the entries of each call of attention, of one row, without a batch dimension, and
    the bytes of factors that were read before it, where they wait."""

    def __init__(self, module: GraphModule, seen: Callable[[Entries, int], None]) -> None:
        super().__init__(module)
        self.seen, self.factored = seen, 0

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if target == mixed_attention:
            named = dict(zip(ARGUMENTS, args)) | dict(kwargs)
            entries = Entries(**{name: first_row(named[name]) for name in Entries._fields if name in named})
            self.seen(entries, self.factored)
            self.factored = 0
        made = super().call_function(target, args, dict(kwargs))
        if target == factored_attention_:
            self.factored += int(made[2].sum())
        return made


def first_row(x: Any) -> Any:
    """Tensors [1, ...], or lists of them, without their first dimension."""
    if isinstance(x, Tensor):
        return x[0]
    return [first_row(one) for one in x] if isinstance(x, (list, tuple)) else x


class Watch:
    """What the stores of one row hold and read in the steps that run inside it, as graphs or as steps that ask for entries.

    held, read: the largest share of a store's own part of the budget. device, attended: the largest share of a store's full KV. row: of the
    parts of all stores, the largest share of the row's budget. host: what waits there, of the full KV.
    """

    def __init__(self, row: RowMemory) -> None:
        self.watched = row
        self._seen: list[int] = []
        self.held = self.read = self.device = self.attended = self.row = self.host = 0.0
        self._original = RowMemory.entries

    def __enter__(self) -> Watch:
        watch, original = self, self._original

        def entries(row: RowMemory, site: AttentionSite, owner: bool, q: Tensor, *rest: Any) -> Entries:
            made = original(row, site, owner, q, *rest)
            if row is watch.watched and row.placement.stores[site.store].treatment == "method":
                watch.look(site, read_bytes(made), row.tokens + q.shape[1])
            return made

        RowMemory.entries = entries
        return self

    def __exit__(self, *exception: object) -> None:
        RowMemory.entries = self._original

    def saw(self, entries: Entries, factored: int) -> None:
        """A part of a layer, in a step that is a graph, and bytes of the factors that it read."""
        self._seen.append(read_bytes(entries) + factored)

    def stepped(self) -> None:
        """The step is over: measure what the layers of a graph read, and what they hold."""
        row, seen = self.watched, iter(self._seen)
        for site in row.placement.program.sites if self._seen else ():
            store = row.placement.stores[site.store]
            read = sum(next(seen) for _ in row.placement.parts(store))
            if store.treatment == "method":
                self.look(site, read, row.tokens)
        assert next(seen, None) is None, "attention that no layer of the memory asked for"
        self._seen = []

    def look(self, site: AttentionSite, read: int, tokens: int) -> None:
        """Measure the store of `site`, of which attention read so many bytes."""
        row = self.watched
        store, memories = row.placement.stores[site.store], row.stores[site.store]
        held = sum(storages(device_tensors(memory)) for memory in memories)
        held += sum(
            memory.factors.nbytes for memory in memories if memory.factors.there is None
        )  # read where they wait
        full = row.placement.budget.full_bytes(store, tokens)
        read += sum(code_bytes(memory) for memory in memories)
        cap = row._store_cap(store, memories, tokens)
        self.held, self.read = max(self.held, held / cap), max(self.read, read / cap)
        self.device, self.attended = max(self.device, held / full), max(self.attended, read / full)
        if site.index == row.placement.budgeted[-1].index:
            caps = sum(row._store_cap(one, row.stores[one.store], tokens) for one in row.placement.budgeted)
            self.row = max(self.row, (caps + row.charged_nbytes) / row.whole_cap(tokens))
            waiting = sum(memory.host_nbytes for memory in row.budgeted())
            self.host = max(
                self.host, waiting / sum(row.placement.budget.full_bytes(one, tokens) for one in row.placement.budgeted)
            )

    @property
    def holds(self) -> bool:
        """Whether nothing went above its budget."""
        return max(self.held, self.read, self.row) <= ROUNDING


def run(compiled: CompiledModel, ids: Tensor, new: int) -> dict[str, Any]:
    """Prefill `ids` and generate `new` tokens greedily, measuring in every turn."""
    watches: list[Watch] = []

    def reading(module: GraphModule, anew: frozenset[int] = frozenset()) -> Callable[..., Any]:
        reading = Reading(module, lambda entries, factored: watches[0].saw(entries, factored))
        return lambda *inputs, behind=(): reading.run(*inputs, *behind)

    steps = GraphedSteps(compiled.program, reading, reading, lambda module: lambda: reading(module))
    if compiled.placement.steps is not None:
        object.__setattr__(compiled, "placement", replace(compiled.placement, steps=steps))
    state = compiled.prefill(ids)
    with Watch(state.rows[0]) as watch:
        watches.append(watch)
        for _ in range(new):
            compiled.extend(state, state.logits.argmax(-1, keepdim=True))
            watch.stepped()
    stats = state.stats
    return {
        "held": watch.holds,
        "device_of_budget": watch.held,
        "read_of_budget": watch.read,
        "parts_of_budget": watch.row,
        "device_share": watch.device,
        "attended_share": watch.attended,
        "host_share_of_raw": watch.host,
        "reported": {
            name: getattr(stats, name)
            for name in ("device_share", "device_share_mean", "attended_share", "attended_share_mean", "excess_share")
        },
        "moved_bytes_per_step": stats.moved_bytes_per_step,
    }


def random_model(layers: int) -> CompiledModel:
    """A random Llama of `layers` layers as `full`, with a profile of all sections from a few random tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        initializer_range=0.3,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)

    def ids(tokens: int) -> Tensor:
        return torch.randint(3, VOCABULARY, (tokens,), generator=generator)

    _, tokenizer = semkv.bundled.load()
    data = CalibrationData((ids(TRAINING.length + 8),), (ids(136),), "random tokens")
    sets = tuple(SampleSet(name, (ids(104),), (ids(104),)) for name in ("one", "two"))
    questions = tuple(
        NeedleQuestion(tuple(ids(7).tolist()), tuple(ids(24).tolist()), tuple(range(20, 45))) for _ in range(8)
    )
    measured = MeasureData(sets, (NeedleTest(ids(96), questions),), "random tokens", tokenizer)
    job = Job(model, "random", "", data, TRAINING, measured, MEASURING, False)
    with tempfile.TemporaryDirectory() as work:
        made = run_steps(job, STEPS, work=Path(work))
    assert not made.skipped, made.notes
    return semkv.compile(model, made.profile, method="full", config=semkv.CompileConfig(kv_dtype="float16", floor=0))


def bundled_model() -> CompiledModel:
    """The bundled model of 4 layers as `full`, with its own profile."""
    model, _ = semkv.bundled.load()
    config = semkv.CompileConfig(kv_dtype="float16", floor=0)
    return semkv.compile(model, semkv.bundled.profile(), method="full", config=config)


def prompt_ids(tokens: int) -> Tensor:
    """The first `tokens` tokens of a dense haystack, [1, tokens]."""
    _, tokenizer = semkv.bundled.load()
    text = make_haystack("dense", tokens + 64, seed=0).context
    return torch.tensor([tokenizer(text)["input_ids"][:tokens]])


def made_once(make: Callable[[], CompiledModel]) -> Callable[[], CompiledModel]:
    """`make`, called when it is first needed."""
    found: list[CompiledModel] = []

    def get() -> CompiledModel:
        if not found:
            found.append(make())
        return found[0]

    return get


def main() -> None:
    """Run the grid, print the table, write the results; exit 1 where a bound is exceeded."""
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split("\n\n")[0].split()))
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=NEW, help="generated tokens")
    parser.add_argument("--layers", type=int, nargs="+", choices=LAYERS, default=list(LAYERS), help="of the models")
    served = [name for name, method in METHODS.items() if method.compresses and not method.needs_indexer]
    modes = {name: (name, OPTIONS.get(name, {})) for name in served} | MORE
    parser.add_argument("--methods", nargs="+", choices=list(modes), default=list(modes), help="or modes of them")
    output = Output(parser, RESULT, page)
    options = parser.parse_args()
    if output.page_alone(options):
        return
    started = now()
    whole = (options.prompt, options.new, options.layers, options.methods) == (PROMPT, NEW, list(LAYERS), list(modes))
    out = options.out if whole or options.out != RESULT else None  # a look is not written unless --out is given
    cells = [(n, name, budget) for n in options.layers for name in options.methods for budget in BUDGETS]
    rows = earlier(out, options.prompt, options.new, len(cells))
    done = {(row["layers"], row["method"], row["budget"]) for row in rows}
    ids = prompt_ids(options.prompt)
    models = {n: made_once(bundled_model if n == 4 else lambda n=n: random_model(n)) for n in options.layers}
    for n, name, budget in cells:
        if (n, name, budget) in done:
            continue
        method, own = modes[name]
        row = {"layers": n, "method": name, "options": own, "budget": budget}
        try:
            compiled = models[n]().with_method(method, budget, **own)
            row |= run(compiled, ids % compiled.program.vocab_size, options.new)
        except BudgetError as error:
            row |= {"held": None, "refused": str(error)}
        rows.append(row)
        print(json.dumps(row), flush=True)
        if out is not None:
            environment = describe(started).model_dump(mode="json")
            output.save({"environment": environment, "prompt": options.prompt, "new": options.new, "rows": rows}, out)
    if out is not None:
        output.finish(out)
    show(rows)
    raise SystemExit(1 if any(broken(row) for row in rows) else 0)


def page(report: dict[str, Any]) -> Path:
    """docs/results/budget_held.md from the results."""
    parts = []
    for layers in LAYERS:
        rows = [row for row in report["rows"] if row["layers"] == layers]
        lines = []
        for name in dict.fromkeys(row["method"] for row in rows):
            own = {row["budget"]: row for row in rows if row["method"] == name}
            form = ", strict" if next(iter(own.values()))["options"].get("strict") else ""
            lines.append([f"`{name}`{form}", *[cell for budget in BUDGETS for cell in cells_of(own[budget])]])
        columns = [f"{budget:.0%}, {what}" for budget in BUDGETS for what in ("holds", "reads")]
        model = "The bundled model" if layers == 4 else "A random Llama"
        parts += [f"## {layers} layers", f"{model}.", table(["method", *columns], lines)]
    held = [row for row in report["rows"] if row["held"] is not None and row["options"].get("generated") != "kept"]
    above = sum(not row["held"] for row in held)
    return write_document(
        "budget_held",
        "# Whether each layer keeps to its budget",
        "Made by `benchmarks/quality/budget_held.py`. Do not edit.",
        f"Every method reads a prompt of {report['prompt']:,} tokens and generates {report['new']} more, at 5, 10 and 20 % of the full KV. "
        "In every step the script walks the memory of each layer and counts bytes: of its tensors (*holds*), and of entries that some "
        "query head sees in its attention (*reads*): neither figure is the runtime's own. Below is the largest of all layers and steps, in "
        "percent of the layer's own budget. Up to 100 is within it. Where the figure is a little below, pages and units do not fill it.",
        f"**{above} of {len(held)} runs go beyond a layer's budget.** *Refused*: the method's index leaves no room at that budget, and "
        "`prefill` says so. `kept`: what is generated stays beside the budget of the prompt, as in the papers; `+` says what those tokens "
        "add, in percent of the full KV.",
        *parts,
        "## Provenance",
        measured_on(report["environment"]),
    )


def cells_of(row: dict[str, Any]) -> list[str]:
    """What a layer holds and reads at most, in percent of its budget."""
    if row["held"] is None:
        return ["refused", "-"]
    if row["options"].get("generated") == "kept":
        return [f"+{100 * row['reported']['excess_share']:.1f}", "-"]
    return [f"{100 * row[name]:.1f}" for name in ("device_of_budget", "read_of_budget")]


def broken(row: dict[str, Any]) -> bool:
    """Whether a budget was exceeded that should hold."""
    return row["held"] is False and row["options"].get("generated") != "kept"


def earlier(out: Path | None, prompt: int, new: int, cells: int) -> list[dict]:
    """The rows of an interrupted run of the same sizes."""
    if out is None or not out.is_file():
        return []
    report = json.loads(out.read_text(encoding="utf-8"))
    same = (report["prompt"], report["new"]) == (prompt, new)
    return report["rows"] if same and len(report["rows"]) < cells else []


def show(rows: list[dict]) -> None:
    """A row per model, method and budget."""
    shown = Table(title="the largest of all layers and steps, %")
    for column in (
        "layers",
        "method",
        "budget",
        "holds, of full KV",
        "reads, of full KV",
        "holds, of its budget",
        "reads, of its budget",
        "beyond it, of full KV",
        "held",
    ):
        shown.add_column(column)
    for row in rows:
        figures = ("device_share", "attended_share", "device_of_budget", "read_of_budget")
        said = "refused" if row["held"] is None else "NO" if broken(row) else "yes" if row["held"] else "kept beside"
        shares = ["-" if row["held"] is None else f"{100 * row[name]:.1f}" for name in figures]
        beyond = (
            f"{100 * row['reported']['excess_share']:.1f}"
            if row["options"].get("generated") == "kept" and row["held"] is not None
            else "-"
        )
        shown.add_row(str(row["layers"]), row["method"], f"{row['budget']:.0%}", *shares, beyond, said)
    Console(width=130).print(shown)


if __name__ == "__main__":
    main()
