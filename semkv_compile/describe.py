"""What a compilation found and did, for people."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from semkv.compiled import CompiledModel
from semkv.ir.recurrence import RecurrentSite
from semkv.ir.site import AttentionSite
from semkv.runtime.state import State


def describe(compiled: CompiledModel, state: State | None = None, *, verbose: bool = False) -> str:
    """Print a row per attention site and return the text; see `semkv.explain`."""
    program = compiled.program
    table = Table(title=f"{compiled.method.name}, budget {compiled.budget if compiled.budget is not None else 'none'}")
    for column in ("site", "where", "heads", "dims", "found", "became", "share", "why"):
        table.add_column(column, overflow="fold")
    for site in program.sites:
        share = f"{site.budget_share:.3f}" if site.treatment == "method" else "not counted"
        table.add_row(
            str(site.index),
            escape(site.name),
            f"{site.q_heads}/{site.kv_heads}",
            _dims(site),
            _found(site),
            compiled.method.name if site.treatment == "method" else site.treatment,
            share,
            escape(site.reason),
        )
    facts = [
        f"KV in {str(compiled.placement.budget.dtype).removeprefix('torch.')}, host {compiled.settings.host}",
        _floor(compiled),
        f"attention of a step by {compiled.kernels}",
        f"rows {'run together' if program.batched else 'run one at a time'}; context {program.max_positions or 'not declared'}; "
        f"vocabulary {program.vocab_size}",
    ]
    if compiled.placement.plan.keeps_generated:
        facts.insert(
            2,
            "the budget is the prompt's: tokens that follow it stay exact beside it, and so do prompts that the floor holds whole",
        )
    if program.ranks is not None:
        facts += [escape(note) for note in program.notes if note.startswith("shard_heads")]
    facts += _recurrent(compiled)
    facts += compiled.method.notes(compiled.profile)
    facts += [] if state is None else [_measured(state), _steps(state), *_cut(state)]
    out = Console(record=True, width=140, file=io.StringIO())
    out.print(table)
    for fact in facts:
        out.print(fact)
    if verbose:
        for note in program.notes:
            out.print(f"  {note}", markup=False)
    text = out.export_text()
    print(text, end="")
    return text


def _recurrent(compiled: CompiledModel) -> list[str]:
    """What goes on from states of its own, and how large those are."""
    facts = []
    if sites := compiled.program.stateful:
        size = sum(site.nbytes for site in sites)
        facts.append(f"recurrent states of {size} bytes a row, whatever its length, beside the budget: {_names(sites)}")
    if sites := compiled.program.choosers:
        size = sum(site.nbytes for site in sites)
        facts.append(
            f"the model chooses what attention reads, by index keys of {size} bytes a token beside the budget: {_names(sites)}"
        )
    return facts


def _names(sites: Sequence[RecurrentSite]) -> str:
    return ", ".join(site.name for site in sites[:3]) + (f" and {len(sites) - 3} more" if len(sites) > 3 else "")


def _measured(state: State) -> str:
    """What the layers of a state held and read in its steps."""
    stats = state.stats
    if not stats.steps:
        return "this state has taken no step yet: what layers hold and read is measured in steps"
    held, read = f"{stats.device_share:.1%}", f"{stats.attended_share:.1%}"
    beyond = ""
    if state.placement.plan.keeps_generated:
        beyond = (
            f"; at most {stats.excess_share:.1%} ({stats.excess_share_mean:.1%}) were beyond the budget, "
            f"{state.nbytes['excess']} bytes now"
        )
    return (
        f"in {stats.steps} steps a layer held at most {held} of its full KV on the device ({stats.device_share_mean:.1%} on the mean) "
        f"and read at most {read} ({stats.attended_share_mean:.1%}){beyond}"
    )


def _steps(state: State) -> str:
    """How a step of a state is run."""
    steps = state.placement.steps
    if steps is None:
        return "a step asks the memory for its entries, layer by layer"
    if not steps.serves(state.rows):
        return "a step asks the memory for its entries, layer by layer: some of its units wait as factors, or as other than whole tokens"
    reasons = steps.reasons()
    if not reasons:
        return "a step is one graph of tensors"
    return f"a step is one graph of tensors, which is cut: {'; '.join(reasons)}"


def _cut(state: State) -> list[str]:
    """From where on surprisal bounds spans, where it does."""
    alpha = state.stats.alpha
    if alpha is None:
        return []
    return [
        f"tokens bound spans from {alpha:.2f} standard deviations above the mean surprisal on, as far as the budget reaches"
    ]


def _floor(compiled: CompiledModel) -> str:
    """What short rows have."""
    budget = compiled.placement.budget
    if budget.keeps_all or budget.value is None:
        return "every token of every row is exact"
    if budget.floor:
        return (
            f"rows of up to {budget.floor} tokens are exact; from {budget.in_force_from} tokens on the fraction is in force, in between "
            f"{budget.floor} tokens per KV head"
        )
    return (
        f"no floor: the budget is for rows of every length, the least that {compiled.method.name} needs is "
        f"{compiled.placement.minimum_tokens} tokens per KV head"
    )


def _dims(site: AttentionSite) -> str:
    return str(site.key_dim) if site.key_dim == site.value_dim else f"{site.key_dim}/{site.value_dim}"


def _found(site: AttentionSite) -> str:
    kind = "MHA" if site.group_size == 1 else ("MQA" if site.kv_heads == 1 else f"GQA x{site.group_size}")
    kept = f"chunks of {site.chunk}" if site.chunk else f"window {site.window}" if site.window else "causal"
    parts = [kind, kept, *(["what its indexer chooses"] if site.chooser >= 0 else [])]
    parts += [f"soft-cap {site.softcap:g}"] if site.softcap else []
    parts += ["sinks"] if site.has_sinks else []
    parts += ["position bias"] if site.has_bias else []
    parts += [f"KV of store {site.store}"] if site.store != site.index else []
    return ", ".join(parts)
