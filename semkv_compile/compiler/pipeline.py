"""The road from a captured model to a lowered program: one readable list of stages, and the manager that runs it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from semkv.capture.dependence import CheckDependence
from semkv.capture.device import device_of, moved, on_cpu
from semkv.capture.export import capture
from semkv.capture.reach import FindReach
from semkv.errors import ConfigError, SpecError
from semkv.ir import spec
from semkv.ir.program import Program
from semkv.ir.ranks import Ranks
from semkv.ir.rewritten import Lowered
from semkv.model.wrappers import unwrapped
from semkv.passes.absorb_latents import AbsorbLatents
from semkv.passes.assign_budgets import AssignBudgets
from semkv.passes.balance_keys import BalanceKeys
from semkv.passes.base import Pass, PassOptions
from semkv.passes.bind_kernels import BindKernels
from semkv.passes.canonicalise import Canonicalise
from semkv.passes.find_attention import FindAttention
from semkv.passes.find_seams import FindSeams
from semkv.passes.group_heads import GroupHeads
from semkv.passes.insert_retrieval_head import InsertRetrievalHead
from semkv.passes.lift_positions import LiftPositions
from semkv.passes.lower_kernels import LowerKernels
from semkv.passes.open_seams import OpenSeams
from semkv.passes.pin_defaults import PinDefaults
from semkv.passes.place_memory import PlaceMemory
from semkv.passes.rewrite_attention import RewriteAttention
from semkv.passes.shapes import with_shapes
from semkv.passes.shard_heads import ShardHeads
from semkv.passes.stream_weights import StreamWeights
from semkv.passes.surprisal_head import SurprisalHead
from semkv.runtime.modes import undisturbed

UNDERSTAND: tuple[Pass, ...] = (
    Canonicalise(),  # captured: no guards, plain ATen
    PinDefaults(),  # captured: no dtype or device is left to the defaults of the process
    FindAttention(),  # captured -> found: one semkv::attention node and one AttentionSite per attention
    LiftPositions(),  # found: positions made inside the graph become functions of the position input
    CheckDependence(),  # found: proof that tokens mix at sites only, and whether rows may be batched
    FindReach(),  # found: the context ends where a table of positions does
    SurprisalHead(),  # found: the body returns hidden states, the head makes logits
    FindSeams(),  # found: where embeddings, rotary positions of several axes and features of images enter
)
"""What depends on the model alone; its result can be kept and lowered many times."""

ON_LATENTS: tuple[Pass, ...] = (
    AbsorbLatents(),  # found: heads that are made of one latent per token become one head that is the latent
)
"""What is done besides where a memory is to hold latents (`CompileConfig.latents`)."""

AMONG_RANKS: tuple[Pass, ...] = (
    ShardHeads(),  # found: the KV heads of this process, their projections, its channels of MLPs, its part of the vocabulary
)
"""What is done besides where processes share a model."""

DECIDE: tuple[Pass, ...] = (
    AssignBudgets(),  # found -> annotated: treatment, reason and budget share of every site
    GroupHeads(),  # annotated: KV heads of one role made contiguous
    BalanceKeys(),  # annotated: keys and queries mapped so that few bits hold keys
)
"""What depends on the method and the profile as well: many methods leave the body as it is."""

REWRITE: tuple[Pass, ...] = (
    RewriteAttention(),  # annotated -> lowered: prefill, extend and decode on a memory
    InsertRetrievalHead(),  # lowered: the speculative selector in front of the graph, where the method has one
    OpenSeams(),  # lowered: the memory says what a prompt brings besides ids
    LowerKernels(),  # lowered: constants folded, decode fixed at one token
    StreamWeights(),  # lowered: projections of a step read their weights fast
)
"""What follows from the body and a retrieval head alone; without one its graphs serve all methods that leave the body as it is."""

LOWER: tuple[Pass, ...] = (*DECIDE, *REWRITE)

PLACE: tuple[Pass, ...] = (
    PlaceMemory(),  # lowered: from which length on each site's folded tokens wait on the host
    BindKernels(),  # lowered: which kernels answer the attention of a step, and their layout
)
"""What depends on the device as well; it changes nothing computed."""


@undisturbed
def captured_program(model: torch.nn.Module, *, dump: Path | None = None) -> Program:
    """The model's program with its sites found and its head split off; independent of method, profile and budget.

    Parameters
    ----------
    model: a decoder in evaluation mode, a Hugging Face one or any module from ids [B, T] to logits [B, T, vocab]. One on
        another device is captured through a copy on the CPU; the program is on the model's device and shares its tensors.
    dump: folder into which the graph is written before and after each pass, as readable text.

    Raises
    ------
    CaptureError: the model cannot be made incremental without risk of a wrong answer.
    """
    model = unwrapped(model)
    source, originals = on_cpu(model)
    program = run_passes(capture(source), UNDERSTAND, PassOptions(), dump=dump)
    return program if source is model else moved(program, device_of(model), originals)


@undisturbed
def on_latents(program: Program) -> Program:
    """A `captured_program` whose attention reads latents where the model makes its heads from them (MLA).

    Raises
    ------
    ConfigError: no attention of the model does, or none would be smaller so.
    """
    found = run_passes(program, ON_LATENTS, PassOptions(), ran=[p.name for p in UNDERSTAND])
    if found.sites == program.sites:
        raise ConfigError(
            "latents=True is for models that make keys and values of all heads from one latent per token (multi-head latent "
            "attention, as in DeepSeek-V3); no attention of this model is found to: leave it out"
        )
    return found


@undisturbed
def among_ranks(program: Program, ranks: Ranks, head_nbytes: Mapping[int, tuple[float, ...]] | None = None) -> Program:
    """What this process has of a `captured_program` that `ranks` share; the program itself where it is alone. head_nbytes: see
    `PassOptions`."""
    options = PassOptions(ranks=ranks, head_nbytes=head_nbytes)
    return run_passes(program, AMONG_RANKS, options, ran=[p.name for p in UNDERSTAND])


@undisturbed
def lowered_among_ranks(program: Program, ranks: Ranks, options: PassOptions, device: torch.device) -> Program:
    """What this process has, on `device`, of a lowered program that an artifact brought, without shapes: they are found anew. Its sites
    stay as they were annotated.

    Raises
    ------
    ArtifactError: the shapes of its graph cannot be found.
    """
    found = with_shapes(program.evolve(stage="found", prefill=None, extend=None, decode=None, selector=None))
    shared = among_ranks(found, ranks, options.head_nbytes)
    first = next(place for place, step in enumerate(LOWER) if step.needs != "found" and step.leaves == "lowered")
    ran = [p.name for p in (*UNDERSTAND, *LOWER[:first])]
    return run_passes(moved(shared, device).evolve(stage="annotated"), LOWER[first:], options, ran=ran)


@undisturbed
def lower(program: Program, options: PassOptions, *, dump: Path | None = None) -> Program:
    """The lowered program of a `captured_program` for one method and profile. Methods that leave the body as it is share graphs
    (`Program.rewritten`)."""
    ran = [p.name for p in UNDERSTAND]
    decided = run_passes(program, DECIDE, options, ran=ran, dump=dump)
    body, head = decided.body, decided.head
    shared = body is program.body and options.retrieval_head is None and dump is None
    known = decided.rewritten.of(body, head) if shared else None
    if known is None:
        ran += [p.name for p in DECIDE]
        made = run_passes(decided, REWRITE, options, ran=ran, dump=dump, first=len(DECIDE))
        if shared:
            notes = made.notes[len(decided.notes) :]
            decided.rewritten.keep(body, head, Lowered(made.prefill, made.extend, made.decode, made.head, notes))
        return made
    return replace(
        decided,
        stage="lowered",
        prefill=known.prefill,
        extend=known.extend,
        decode=known.decode,
        head=known.head,
        notes=(*decided.notes, *known.notes),
    )


@undisturbed
def place(program: Program, options: PassOptions) -> Program:
    """A lowered program whose sites say where their folded tokens wait, by `options.thresholds`, and which kernels they call."""
    return run_passes(program, PLACE, options, ran=[p.name for p in (*UNDERSTAND, *LOWER)])


def run_passes(
    program: Program,
    passes: Sequence[Pass],
    options: PassOptions,
    *,
    ran: Iterable[str] = (),
    dump: Path | None = None,
    first: int = 0,
) -> Program:
    """Run `passes` in order, checking the order before the first and the stage's spec after each. first: its number in `dump`.

    Raises
    ------
    SpecError: the order breaks a pass's constraints (all are listed), or a pass left an illegal graph.
    """
    check_order(passes, stage=program.stage, ran=ran)
    for number, step in enumerate(passes, start=first):
        if step.applies(program, options):
            _dump(program, dump, f"{number:02d}-{step.name}-before")
            program = _run_one(step, program, options)
            _dump(program, dump, f"{number:02d}-{step.name}-after")
        elif step.leaves != program.stage:
            program = program.evolve(stage=step.leaves)
    return program


def check_order(passes: Sequence[Pass], *, stage: str = "captured", ran: Iterable[str] = ()) -> None:
    """Raise `SpecError` naming *every* broken constraint: unknown or late predecessors, wrong stages, duplicates."""
    done = list(ran)
    problems = []
    for step in passes:
        if step.name in done:
            problems.append(f"{step.name} runs twice")
        for other in step.after:
            if other not in done:
                problems.append(f"{step.name} must run after {other}, which has not run by then")
        if step.needs != stage:
            problems.append(f"{step.name} needs stage {step.needs!r}, but the program is at {stage!r} by then")
        stage = step.leaves
        done.append(step.name)
    if problems:
        listed = "\n  ".join(problems)
        raise SpecError(f"the order of the passes breaks {len(problems)} constraints:\n  {listed}")


def identity() -> str:
    """A hash of the pipeline and of every pass in it; part of the key of caches and artifacts."""
    parts = [f"{step.name}:{step.identity()}" for step in (*UNDERSTAND, *ON_LATENTS, *AMONG_RANKS, *LOWER, *PLACE)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _run_one(step: Pass, program: Program, options: PassOptions) -> Program:
    result = step.run(program, options)
    if result.stage != step.leaves:
        raise SpecError(f"{step.name} left stage {result.stage!r}, expected {step.leaves!r}")
    try:
        spec.check(result)
    except SpecError as error:
        raise SpecError(f"after {step.name}: {error}") from error
    return result


def _dump(program: Program, folder: Path | None, label: str) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    graphs = {"body": program.body, "head": program.head, "prefill": program.prefill, "extend": program.extend}
    texts = [f"# {name}\n{module.graph}" for name, module in graphs.items() if module is not None]
    (folder / f"{label}.txt").write_text("\n\n".join(texts) + "\n")
