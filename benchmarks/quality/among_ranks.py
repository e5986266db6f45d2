"""Processes that share a model, against one that has it alone: every architecture of the sweep and every method, on gloo.

For each architecture that `architecture_sweep.py` passes, a tiny random model is compiled by several processes with `group=` and by one
without. They read a prompt and decode; a row holds whether all tokens are equal, by how much logits differ, whether all processes have the
same bits, and per process the weights and the KV that it holds, as shares of one process's. KV is summed over the tensors that are there.

    python -m benchmarks.quality.among_ranks                                   # all that have no result yet
    python -m benchmarks.quality.among_ranks llama gpt2 --methods full snapkv  # these
    python -m benchmarks.quality.among_ranks --for 600                         # for at most ten minutes: what is missing is run next time
    python -m benchmarks.quality.among_ranks --table                           # only the page

Results: `benchmarks/results/among_ranks.json`, and from it `docs/results/among_ranks.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import tempfile
import time
import warnings
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers

from benchmarks.lib.places import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "among_ranks.json"
SWEEP = ROOT / "benchmarks" / "results" / "architecture_sweep.json"

METHODS = {
    "full": None,
    **dict.fromkeys(
        ("snapkv", "h2o", "pyramidkv", "streaming_llm", "chunkkv", "cake", "quest", "shadowkv", "infllm"), 0.4
    ),
    **dict.fromkeys(("semanticache", "sekv"), 0.4),
    **dict.fromkeys(("clusterkv", "omnikv"), 0.75),
    "sketch": 0.1,
    "mixed": 0.2,
    **dict.fromkeys(("compresskv", "specontext", "indexer"), 0.3),
    **dict.fromkeys(("sentencekv", "heterocache"), 0.4),
}
"""Methods, and a budget at which a prompt of 300 tokens is compressed by each."""
OPTIONS: dict[str, dict[str, Any]] = {"heterocache": {"strict": True, "tau_stable": 0.2, "tau_similar": 0.15}}
"""Roles of all kinds in random models, at a budget that whole heads would not leave."""
PROFILED = ("sketch", "compresskv", "sentencekv", "specontext", "mixed", "heterocache")
"""Those that need a profile."""

PROMPT, STEPS, TOLERANCE = 300, 24, 1e-5
NOISE, DRAWS = 3e-8, 12
"""Relative noise on weights in float32, less than their last bit is worth; how often it is drawn, at most."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def held(state: Any) -> list[list[float]]:
    """Bytes of the exact tokens, indexes and slots of a state's row by store and KV head, summed over the tensors that are there."""
    made = []
    for memories in state.rows[0].stores.values():
        made.append([])
        for memory in memories:
            tensors = [*memory.kept.buffers, *memory.recent.buffers]
            tensors += [] if memory.spans is None else memory.spans.device_tensors()
            tensors += [] if memory.slots is None else list(memory.slots.tensors.values())
            heads = memory.site.kv_heads
            made[-1] += [sum(x.nbytes for x in tensors) / heads] * heads
    return made


def total(heads: list[list[float]]) -> float:
    return sum(map(sum, heads))


def fairest(heads: list[list[float]]) -> float:
    """The least share of all bytes that the larger of two processes can have, over all ways to give each half of every store's heads."""
    sums = {0}
    for store in heads:
        sizes = {len(store) // 2, -(-len(store) // 2)}
        halves = {round(sum(own)) for size in sizes for own in combinations(store, size)}
        sums = {before + own for before in sums for own in halves}
    return min(max(own, total(heads) - own) for own in sums) / total(heads)


def weights(program: Any) -> int:
    """Bytes of the parameters and buffers of a program, each once."""
    seen = {}
    for module in (program.body, program.head):
        for tensor in () if module is None else module.state_dict(keep_vars=True).values():
            seen[id(tensor)] = tensor.nbytes
    return sum(seen.values())


def work(rank: int, world: int, port: int, jobs: list[tuple[str, str]], folder: str) -> None:
    """Run `jobs` as process `rank` of `world` (alone: 1) and write what came of each."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    group = None
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=world)
        group = dist.group.WORLD
    from benchmarks.lib.tiny_models import tiny_model
    from semkv.errors import ProfileError
    from semkv.profiles.schema import Profile

    compiled: dict[tuple[str, bool, str], Any] = {}
    for name, method in jobs:
        try:
            reason = Path(folder) / f"{name}.no_profile"
            if method in PROFILED and reason.exists():
                raise ProfileError(reason.read_text(encoding="utf-8"))
            key = (name, method in PROFILED, dealt_by(method))
            if key not in compiled:
                compiled.clear()
                profile = Profile.load(Path(folder) / f"{name}.profile") if method in PROFILED else None
                compiled[key] = compiled_model(tiny_model(name, dtype=dtype_of(name)), profile, method, group)
            made = answer(compiled[key], method)
        except Exception as error:  # a refusal is a result as well
            made = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
        torch.save(made, Path(folder) / f"{world}.{rank}.{name}.{method}")
    if world > 1:
        dist.destroy_process_group()


def dealt_by(method: str) -> str:
    """The method that a model is compiled with to run `method`: itself where the heads of a process follow from it, else `full`."""
    from semkv.methods import find_method

    return method if find_method(method, {}).divides_heads else "full"


def compiled_model(model: Any, profile: Any, method: str, group: Any = None) -> Any:
    """`model` with `dealt_by(method)`."""
    import semkv
    from semkv.config import CompileConfig

    method = dealt_by(method)
    settings = CompileConfig(floor=0, kernels="torch", cache=True, method_options=OPTIONS.get(method, {}))
    return semkv.compile(model, profile, method=method, budget=METHODS[method], config=settings, group=group)


def answer(whole: Any, method: str) -> dict[str, Any]:
    """Greedy tokens after a prompt by `method`, logits, and what the process holds."""
    from benchmarks.lib.tiny_models import VOCAB

    own = whole if method == whole.method.name else whole.with_method(method, METHODS[method])
    ids = torch.randint(5, VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    state = own.prefill(ids)
    logits, tokens = [state.logits.clone()], []
    for _ in range(STEPS):
        new = state.logits.argmax(-1)
        tokens.append(int(new))
        own.extend(state, new[:, None])
        logits.append(state.logits.clone())
    return {
        "tokens": tokens,
        "logits": torch.cat(logits),
        "weights": weights(own.program),
        "kv": held(state),
        "heads": sorted({site.kv_heads for site in own.program.sites}),
    }


def rounding(name: str, method: str, profile: Any, enough: float) -> float:
    """By how much the logits of one process differ where noise changes the last bits of its weights, float32: the largest of `DRAWS`, or
    the first that is `enough`. A number that falls on the other side may become another code, expert or cluster."""
    from benchmarks.lib.tiny_models import tiny_model
    from semkv.artifact.fingerprint import model_fingerprint

    found: list[dict[str, Any]] = []
    largest = 0.0
    for draw in range(DRAWS + 1):
        model, generator = tiny_model(name, dtype=dtype_of(name)), torch.Generator().manual_seed(draw)
        with torch.no_grad():
            for weight in model.parameters() if draw else ():
                weight.mul_(1 + NOISE * torch.randn(weight.shape, generator=generator))
        own = profile
        if profile is not None:  # the noise is no other model to it
            info = profile.info.model_copy(update={"fingerprint": model_fingerprint(model)})
            own = replace(profile, info=info)
        found.append(answer(compiled_model(model, own, method), method))
        first = found[0]["logits"]
        largest = max(largest, float((found[-1]["logits"] - first).abs().max() / first.abs().max()))
        if largest >= enough:
            break
    return largest


def explained(name: str, method: str, row: dict[str, Any], folder: str) -> dict[str, Any]:
    """`row`; one of numbers in float32 that differs says by how much one process differs from itself by rounding, and has the status
    `rounding` where that is as much, within a tenth."""
    if row["status"] != "differs" or not is_single(name) or not row["ranks_bit_equal"]:
        return row
    from semkv.profiles.schema import Profile

    path = Path(folder) / f"{name}.profile"
    own = rounding(name, method, Profile.load(path) if method in PROFILED else None, row["difference"] / 1.1)
    return row | {"rounding": own, "status": "rounding" if 1.1 * own >= row["difference"] else "differs"}


def dtype_of(name: str) -> torch.dtype:
    """What the sweep ran the architecture in: some have code that float64 does not run."""
    return getattr(torch, json.loads(SWEEP.read_text())["rows"][name]["dtype"])


def is_single(name: str) -> bool:
    """Whether the architecture computes in float32, if only in some modules, as norms."""
    from benchmarks.lib.tiny_models import tiny_model
    from semkv.compiler.pipeline import captured_program

    found = captured_program(tiny_model(name, dtype=dtype_of(name))).body.graph.nodes
    return any(getattr(node.meta.get("val"), "dtype", None) == torch.float32 for node in found)


def profiles(names: list[str], folder: str) -> None:
    """Make a profile of each architecture in `folder`; one that cannot be made is said when it is missing."""
    from benchmarks.lib.tiny_models import VOCAB, tiny_model
    from benchmarks.lib.tiny_profiles import tiny_profile

    torch.set_num_threads(1)
    for name in names:
        try:
            made, left_out = tiny_profile(tiny_model(name, dtype=dtype_of(name)), VOCAB)
        except Exception as error:  # its methods are refused then, which is a result as well
            print(f"{name}: no profile: {type(error).__name__}: {error}", flush=True)
            (Path(folder) / f"{name}.no_profile").write_text(f"none can be made: {error}", encoding="utf-8")
            continue
        made.save(Path(folder) / f"{name}.profile")
        for step, reason in left_out.items():
            print(f"{name}: profile without {step}: {reason}", flush=True)


def run(jobs: list[tuple[str, str]], world: int, timeout: float) -> dict[tuple[str, str], dict[str, Any]]:
    """What came of `jobs`, by `world` processes together and by one alone. The first one without a result, as processes ended or hung in
    it, has failed; those behind it were not begun, and have no row."""
    context, port = mp.get_context("spawn"), free_port()
    with tempfile.TemporaryDirectory() as folder:
        profiles(sorted({name for name, method in jobs if method in PROFILED}), folder)
        os.environ["SEMKV_CACHE"] = str(Path(folder) / "programs")  # a model is captured once
        places = [(rank, world, port) for rank in range(world)] + [(0, 1, port)]
        processes = [context.Process(target=work, args=(*place, jobs, folder)) for place in places]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.1, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
        rows = {}
        for name, method in jobs:
            files = [Path(folder) / f"{size}.{rank}.{name}.{method}" for rank, size, _ in places]
            if not all(file.exists() for file in files):
                rows[name, method] = {"status": "failed", "reason": f"no result within {timeout:g} s"}
                break
            rows[name, method] = explained(name, method, compare([torch.load(file) for file in files]), folder)
        return rows


def compare(made: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of a job: the last of `made` is of the process that is alone."""
    *shared, alone = made
    errors = [each.get("error") for each in made]
    if any(errors):
        same = all(errors)
        return {"status": "refused" if same else "failed", "reason": errors[-1] if same else next(filter(None, errors))}
    largest = float(alone["logits"].abs().max())
    difference = max(float((each["logits"] - alone["logits"]).abs().max()) for each in shared) / largest
    equal = all(each["tokens"] == alone["tokens"] for each in shared)
    bits = all(torch.equal(each["logits"], shared[0]["logits"]) for each in shared)
    return {
        "status": "pass" if equal and bits and difference < TOLERANCE else "differs",
        "tokens_equal": equal,
        "ranks_bit_equal": bits,
        "difference": difference,
        "distinct_tokens": len(set(alone["tokens"])),
        "weights": [round(each["weights"] / alone["weights"], 3) for each in shared],
        "kv": [round(total(each["kv"]) / total(alone["kv"]), 3) for each in shared],
        "fairest": round(fairest(alone["kv"]), 3),
        "kv_heads": alone["heads"],
    }


def load() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": {}}


def save(results: dict[str, Any]) -> None:
    """A line for each row."""
    rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in sorted(results["rows"].items()))
    RESULTS.write_text(f'{{\n "rows": {{\n{rows}\n }},\n "versions": {json.dumps(results["versions"])}\n}}\n')


STATUSES = {
    "pass": "equal",
    "rounding": "equal but for rounding",
    "differs": "differ",
    "refused": "refused",
    "failed": "failed",
}


def counted(rows: list[dict[str, Any]]) -> str:
    """How many rows came out how."""
    counts = {word: sum(row["status"] == status for row in rows) for status, word in STATUSES.items()}
    return ", ".join(f"{count} {word}" for word, count in counts.items())


def publish(results: dict[str, Any], architectures: int) -> Path:
    """docs/results/among_ranks.md: a line for each of the `architectures` of the sweep that were run."""
    from benchmarks.lib.grids import table, write_document

    by_name: dict[str, dict[str, dict[str, Any]]] = {}
    for key, row in results["rows"].items():
        name, method, world = key.split(" ")
        if world == "2" and (method, row["status"]) != ("indexer", "refused"):  # most models have none
            by_name.setdefault(name, {})[method] = row
    lines, reasons = [], []
    for name, rows in by_name.items():
        ran = {method: row for method, row in rows.items() if "kv" in row}
        uneven = {method: max(row["kv"]) for method, row in ran.items() if max(row["kv"]) > 0.52}
        held = [max(row["kv"]) for method, row in ran.items() if method not in uneven]
        lines.append(
            [
                name,
                str(sum(row["status"] == "pass" for row in rows.values())),
                *(
                    ", ".join(method for method, row in rows.items() if row["status"] in statuses) or "-"
                    for statuses in (("rounding",), ("differs", "failed"), ("refused",))
                ),
                f"{max((row['difference'] for row in ran.values()), default=0):.0e}",
                ", ".join(f"{x:.3f}" for x in next(iter(ran.values()))["weights"]) if ran else "-",
                ", ".join(
                    [f"{max(held):.3f}" if held else "-", *(f"`{m}` {x:.3f}{best(ran[m])}" for m, x in uneven.items())]
                ),
            ]
        )
        reasons += [f"- {name}, `{method}`: {row['reason']}" for method, row in rows.items() if "reason" in row]
    shown = counted([row for rows in by_name.values() for row in rows.values()])
    columns = [
        "architecture",
        "equal",
        "but for rounding",
        "differ or failed",
        "refused",
        "logits differ by",
        "weights",
        "KV, most",
    ]
    profiled = sum(not set(PROFILED).isdisjoint(rows) for rows in by_name.values())
    commits = sorted({row["commit"] for row in results["rows"].values() if "commit" in row})
    versions = ", ".join(f"{name} {value}" for name, value in results["versions"].items())
    return write_document(
        "among_ranks",
        "# Processes that share a model",
        "Made by `benchmarks/quality/among_ranks.py`; do not edit.",
        f"Tiny random models on two gloo processes, against one process that has the model alone: a prompt of {PROMPT} tokens and {STEPS} "
        "greedy ones. *Equal*: methods of which all tokens are equal, all processes have the same bits, and logits differ by less than "
        f"{TOLERANCE:.0e} of the largest. *But for rounding*: numbers in float32 (norms are, in models of float64) that fall on the other "
        "side become another code, expert or cluster, and one process differs from itself by as much when noise changes the last bits of "
        "its weights. *Weights*, *KV*: what each process holds of one process's; *most* is over both processes and all methods, those "
        "above 0.52 by name. "
        f"{len(by_name)} of the {architectures} architectures of [the sweep](../architectures.md) were run, {profiled} of them with the "
        f"methods that need a profile: {shown}. Above 0.52 are models with one KV head, which both processes have, and `heterocache` and "
        "`mixed` in models of few heads, as these take different shares of the budget: in brackets the least that any way to give each "
        "process half of every layer's heads leaves the larger of the two. "
        "[parallel.md](../parallel.md) says what each process has.",
        table(columns, lines),
        *real_model(),
        "## Refused",
        "\n".join(reasons) or "Nothing.",
        "## Provenance",
        f"{versions}; commits {', '.join(commits)}. Command: `python -m benchmarks.quality.among_ranks`.",
    )


def best(row: dict[str, Any]) -> str:
    """The share that the fairest division would leave, where a row has it and its heads can be divided."""
    return f" ({row['fairest']:.3f})" if "fairest" in row and row["kv_heads"] != [1] else ""


def real_model() -> list[str]:
    """What `real_ranks.py` measured."""
    from benchmarks.lib.grids import measured_on, table

    path = RESULTS.with_name("real_ranks.json")
    if not path.is_file():
        return []
    content = json.loads(path.read_text(encoding="utf-8"))
    lines = [
        [
            f"`{row['method']}`",
            "-" if row["budget"] is None else f"{row['budget']:.0%}".replace("%", " %"),
            "equal" if row["equal"] else "differ",
            f"{row['difference']:.0e}",
            ", ".join(f"{share:.3f}" for share in row["peak"]),
        ]
        for row in content["rows"]
    ]
    return [
        "## A real model",
        "SmolLM2-135M, in float32, 1,500 tokens of Python's manual and 24 greedy ones: one of its three KV heads in each process, against "
        "one process with all. Sums in another order round to other codes here and there, so that logits of methods that keep codes "
        "differ by more.",
        table(["method", "budget", "tokens", "logits differ by", "most bytes held, of one process's"], lines),
        f"*{content['cut']}*",
        measured_on(content["environment"]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="architectures; default: all that the sweep passes")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="run what has a result too")
    parser.add_argument(
        "--for", dest="seconds", type=float, default=float("inf"), help="begin nothing after so many seconds"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one group of architectures")
    parser.add_argument(
        "--together", type=int, default=4, help="architectures of one group, which start processes once"
    )
    parser.add_argument("--table", action="store_true", help="only write docs/results/among_ranks.md")
    arguments = parser.parse_args()
    from benchmarks.lib.plain_decoders import DECODERS

    rows = json.loads(SWEEP.read_text())["rows"].items()
    passed = [name for name, row in rows if row["status"] == "pass" and name not in DECODERS]
    unknown = [name for name in arguments.names if name not in passed]
    if unknown:
        parser.error(f"{unknown[0]!r} is no architecture that the sweep passes")
    names = arguments.names or passed
    from semkv.evaluation.environment import describe, now

    began, results, commit = time.monotonic(), load(), describe(now()).commit
    if arguments.table:
        names = []
    for start in range(0, len(names), arguments.together):
        group = names[start : start + arguments.together]
        jobs = [(name, method) for name in group for method in arguments.methods]
        if not arguments.again:
            jobs = [(n, m) for n, m in jobs if f"{n} {m} {arguments.world}" not in results["rows"]]
        if not jobs or time.monotonic() - began > arguments.seconds:
            continue
        for (name, method), row in run(jobs, arguments.world, arguments.timeout).items():
            results["rows"][f"{name} {method} {arguments.world}"] = row | {"commit": commit}
            print(f"{name:20} {method:14} {row}", flush=True)
        results["versions"] = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores, gloo",
        }
        save(results)
    print(publish(results, len(passed)))
    print(counted(list(results["rows"].values())))


if __name__ == "__main__":
    main()
