"""Hybrid models under compression, against a naive reference: the model itself, its recurrent modules with their own states, attending to
what `naive_memory` leaves of the text.

    python -m benchmarks.quality.hybrids                        # every family, method and budget: some minutes
    python -m benchmarks.quality.hybrids --families lfm2 --methods quest

For each: three turns of two ragged rows by `generate`, whose tokens are the reference's; a fork that reads something else in between; the
last turn also on the state loaded from its file, and by the model loaded from its artifact; then tokens that are given, whose logits are
compared. The table has the bytes of each tier. Tiny random models; what they answer says nothing of methods.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import semkv
from benchmarks.lib.grids import measured_on, table, write_document
from benchmarks.lib.naive_conversation import Conversation
from benchmarks.lib.places import RESULTS
from benchmarks.lib.tiny_models import VOCAB, sensitise, tiny_config
from semkv.evaluation.environment import describe, now

RECURRENT = ("linear_attention", "full_attention") * 2
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", {"layer_types": [*RECURRENT], "num_hidden_layers": 4}),
    "qwen3_next": ("qwen3_next", {"layer_types": [*RECURRENT], "num_hidden_layers": 4}),
    "nemotron_h": ("nemotron_h", {"layers_block_type": ["linear_attention", "full_attention", "moe"] * 2}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4, "full_attn_idxs": [1, 3]}),
    "granitemoehybrid": ("granitemoehybrid", {"layer_types": [*RECURRENT], "num_hidden_layers": 4}),
    "falcon_h1": ("falcon_h1", {}),
    "kimi_linear": (
        "kimi_linear",
        {"layer_types": [*RECURRENT], "mlp_layer_types": ["dense", *["sparse"] * 3], "num_hidden_layers": 4},
    ),
}
"""By name: the model type of transformers, and the fields of a model with two layers of attention."""

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("streaming_llm", "snapkv", "quest")},
    "sekv": ("sekv", {"router": "coarse"}),
    "sekv, untrained": ("sekv", {"router": "untrained"}),
}
"""By label: a method and its options. `sekv` by its two routers that nobody has to train: mean keys, and random projections of them."""

BUDGETS = (0.5, 0.1)
PROMPTS, TURNS, ANSWER, FORCED = (1043, 1001), ((2, 17), (9, 4)), 8, 24
TOLERANCE = {"streaming_llm": 1e-4, "snapkv": 1e-4, "quest": 1e-3, "sekv": 1e-3, "sekv, untrained": 1e-3}
"""Largest difference of logits from the reference, relative to the largest: folded tokens are codes of 8 bits, and a number that differs in
its last bit may become the next code (`sekv` of `nemotron_h` at 10 %: 1e-4, and 1e-6 with tokens that wait as they are)."""

NOTICED = 1e-2
"""The least by which attention to everything has to differ."""


def hybrid(family: str) -> nn.Module:
    """A tiny random model with a context that holds the rows."""
    kind, fields = FAMILIES[family]
    config = tiny_config(kind)
    own = config.to_dict()
    longer = {name: 4096 for name in ("max_position_embeddings", "model_max_length") if name in own}
    config = type(config)(**(own | fields | longer))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    sensitise(model)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def ids(length: int, seed: int) -> Tensor:
    """Random tokens int64 [1, length]."""
    return torch.randint(5, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


def padded(rows: list[Tensor]) -> dict[str, Tensor]:
    """Rows [1, n] as a batch padded on the left."""
    longest = max(row.shape[1] for row in rows)
    pad = torch.nn.functional.pad
    parts = [(pad(x, (longest - x.shape[1], 0)), pad(torch.ones_like(x), (longest - x.shape[1], 0))) for x in rows]
    return {"input_ids": torch.cat([x for x, _ in parts]), "attention_mask": torch.cat([x for _, x in parts])}


def said(compiled: semkv.CompiledModel, rows: list[Tensor], count: int, state: semkv.State | None = None) -> Any:
    """(tokens of each row, state) of a turn."""
    made = compiled.generate(
        **padded(rows),
        state=state,
        max_new_tokens=count,
        do_sample=False,
        return_dict_in_generate=state is None,
    )
    if state is None:
        return made.sequences[:, -count:].tolist(), made["cache"]
    return made[:, -count:].tolist(), state


def apart(mine: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest number of `theirs`."""
    return float((mine - theirs).abs().max() / theirs.abs().max())


def examine(
    family: str,
    full: semkv.CompiledModel,
    model: nn.Module,
    label: str,
    budget: float,
    *,
    prompts: tuple[int, ...] = PROMPTS,
    answer: int = ANSWER,
    forced: int = FORCED,
) -> dict[str, Any]:
    """One line of the table: what differs from the reference, and the bytes of each tier. `full`: of `model`, at method="full"; `label`: of
    METHODS."""
    began = time.perf_counter()
    method, options = METHODS[label]
    compiled = full.with_method(method, budget, config=full.settings.model_copy(update={"floor": 0}), **options)
    naive = [Conversation(model, label, budget) for _ in prompts]
    whole = Conversation(model, None, 1.0)
    wrong: list[str] = []

    def compare(made: list[list[int]], wanted: list[list[int]], what: str) -> None:
        if made != wanted:
            wrong.append(f"{what}: tokens {made} instead of {wanted}")

    def turn(state: semkv.State | None, own: list[Conversation], rows: list[Tensor], what: str) -> semkv.State:
        made, state = said(compiled, rows, answer, state)
        compare(made, [one.answer(row, answer) for one, row in zip(own, rows)], what)
        return state

    rows = [ids(length, seed) for seed, length in enumerate(prompts)]
    state = turn(None, naive, rows, "prompts")
    whole.read(torch.cat([rows[0], torch.tensor([state.ids[0][prompts[0] :].tolist()])], 1))
    after_prompt = dict(state.nbytes)
    forked = [one.fork() for one in naive]
    turn(state.fork(), forked, [ids(n, 50 + n) for n in (3, 6)[: len(naive)]], "fork")
    turn(state, naive, [ids(n, 60 + n) for n in TURNS[0][: len(naive)]], "second turn")
    last = [ids(n, 70 + n) for n in TURNS[1][: len(naive)]]
    with tempfile.TemporaryDirectory() as folder:
        state.save(Path(folder) / "state")
        compiled.save(Path(folder) / "model")
        loaded = semkv.load(Path(folder) / "model")
        others = [(at, at.load_state(Path(folder) / "state")) for at in (compiled, loaded)]
        wanted = [one.answer(row, answer) for one, row in zip(naive, last)]
        for (at, own), what in zip((*others, (compiled, state)), ("loaded state", "artifact", "third turn")):
            compare(said(at, last, answer, own)[0], wanted, what)
    whole.read(state.ids[0][None, whole.length :])
    differences, changes = [], []
    for place in range(forced):
        token = ids(1, 80 + place)
        mine = compiled.extend(state, token.expand(len(rows), 1))
        theirs = torch.cat([one.go_on(token)[:, -1:] for one in naive])
        differences.append(max(apart(x, y) for x, y in zip(mine, theirs)))
        changes.append(apart(theirs[:1], whole.read(token)))
    if not max(differences) <= TOLERANCE[label]:
        place = next(i for i, x in enumerate(differences) if not x <= TOLERANCE[label])
        wrong.append(f"logits differ by {max(differences):.1e}, first after {place + 1} given tokens")
    if not max(changes) > NOTICED:
        wrong.append("attention to everything gives the same: the comparison proves nothing")
    return {
        "family": family,
        "method": label,
        "budget": budget,
        "wrong": wrong,
        "difference": max(differences),
        "change": max(changes),
        "full_bytes": state.full_bytes,
        "after_prompt": after_prompt,
        "nbytes": dict(state.nbytes),
        "seconds": round(time.perf_counter() - began, 1),
    }


def publish(content: dict[str, Any]) -> Path:
    """docs/results/hybrids.md."""
    lines = []
    for row in content["rows"]:
        held = row["nbytes"]
        lines.append(
            [
                row["family"],
                row["method"],
                f"{row['budget']:.0%}".replace("%", " %"),
                "equal" if not row["wrong"] else "; ".join(row["wrong"]),
                f"{row['difference']:.0e}",
                f"{row['change']:.0e}",
                *(f"{number:,}" for number in (row["full_bytes"], held["peak"], held["host"], held["recurrent"])),
            ]
        )
    columns = ["family", "method", "budget", "tokens", "logits differ by", "full differs by"]
    columns += ["full KV", "device, at most", "host", "recurrent"]
    return write_document(
        "hybrids",
        "# Hybrid models under compression",
        "Made by `benchmarks/quality/hybrids.py`; do not edit.",
        "Tiny random models with two layers of attention among recurrent ones, in float32, against a naive reference: the model of "
        "transformers with its own recurrent states, attending to what a plain implementation of the method leaves of all keys and "
        f"values. Three turns of two ragged rows (prompts of {' and '.join(f'{n:,}' for n in PROMPTS)} tokens, {ANSWER} greedy tokens a "
        "turn), a fork in between, and the last turn again from a saved state and by a saved model: *equal* where all tokens are the "
        f"reference's. Then {FORCED} given tokens: the largest difference of logits from the reference, and that of attention to "
        "everything from the reference, both relative to the largest logit. Bytes are of both rows, at the end: a budget is a share of the "
        "*full KV*; *recurrent* states are beside it, and do not grow. `sekv` is routed by the directions of mean keys; *untrained*: by "
        'random projections of them (`router="untrained"`).',
        table(columns, lines),
        "## Provenance",
        measured_on(content["environment"]),
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--families", nargs="+", choices=FAMILIES, default=[*FAMILIES])
    options.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    options.add_argument(
        "--out", type=Path, help="write the figures here, in place of benchmarks/results and docs/results"
    )
    asked, started = options.parse_args(), now()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    path, failed = asked.out or RESULTS / "hybrids.json", False
    for family in asked.families:
        model = hybrid(family)
        full = semkv.compile(model, method="full", config=semkv.CompileConfig(cache=True))
        for method in asked.methods:
            for budget in BUDGETS:
                row = examine(family, full, model, method, budget)
                failed = failed or bool(row["wrong"])
                keep(path, row, started)
                print(
                    f"{family} {method} {budget:.0%}: {'; '.join(row['wrong']) or 'equal'}, logits within {row['difference']:.1e}, "
                    f"full differs by {row['change']:.1e}, device {row['nbytes']['peak']}, host {row['nbytes']['host']}, "
                    f"recurrent {row['nbytes']['recurrent']} ({row['seconds']} s)",
                    flush=True,
                )
    if not asked.out:
        print(publish(json.loads(path.read_text(encoding="utf-8"))))
    if failed:
        raise SystemExit("some differ")


def keep(path: Path, row: dict[str, Any], started: Any) -> None:
    """Put a line into the figures, in the place of the one of before."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    order = [(family, method, budget) for family in FAMILIES for method in METHODS for budget in BUDGETS]
    known = {(one["family"], one["method"], one["budget"]): one for one in (*rows, row)}
    environment = describe(started).model_dump(mode="json") | {"command": "python -m benchmarks.quality.hybrids"}
    content = {"rows": [known[key] for key in order if key in known], "environment": environment}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
