"""`semkv plan`: the memory plan of a model on a machine as tables, JSON and a picture."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from semkv.cli.common import output_console, parse_size, quiet_libraries
from semkv.cli.gguf import gguf_config, gguf_file
from semkv.errors import BudgetError, ConfigError

if TYPE_CHECKING:
    from semkv.planning.deployment import Deployment, Fleet
    from semkv.planning.plan import MemoryPlan, Way, Workload

CONTEXTS = tuple(1024 * 4**power for power in range(1, 6))
"""Lengths of the table of batches, beside the one that is asked for."""
SHOWN = 10
"""Thresholds that are shown; of a deeper model some of them."""
LABELS = {
    "full": "full, on the device",
    "full-offload": "full, on the host",
    "budget": "semkv, folded on the host",
    "progressive": "semkv, progressive offload",
}


@dataclass(frozen=True)
class PlanRequest:
    """What the command was asked for. weights: bytes of a quantised checkpoint. fleet: of a deployment, None for one machine. method: whose
    measured steps an estimate is made from."""

    model: str
    gpu: str
    workload: Workload
    dtype: str | None = None
    weights: int | None = None
    json: Path | None = None
    report: Path | None = None
    latents: bool = False
    fleet: Fleet | None = None
    method: str | None = None


def fleet_of(
    users: int | None,
    gpus: int | None,
    gpus_per_host: int,
    host_memory: str | None,
    network: str,
    method: str | None,
    batch: int,
    budget: float | int | None,
) -> Fleet | None:
    """What `--users` asks for, None without it; `ConfigError` where options contradict each other or a method is unknown."""
    if users is None:
        if gpus is not None or method is not None:
            name = "--gpus" if gpus is not None else "--method"
            raise ConfigError(f"{name} is for the plan of a deployment: add --users, how many answer at once")
        return None
    from semkv.methods import find_method
    from semkv.planning.deployment import Fleet

    if batch != 1:
        raise ConfigError(f"--batch {batch}: rows of a step follow from --users; leave one of them out")
    if method is not None and find_method(method).compresses != (budget is not None):
        wanted = "a --budget below `full`" if budget is None else "--budget full"
        raise ConfigError(f"--method {method} needs {wanted}")
    speed = parse_size(network.removesuffix("/s"), "--network")
    assert speed is not None
    return Fleet(users, gpus, gpus_per_host, parse_size(host_memory, "--host-memory"), speed)


def run_plan(request: PlanRequest) -> None:
    """Print the plan; write it where that was asked for."""
    from semkv.planning.machine import parse_machine

    machine = parse_machine(request.gpu)
    quiet_libraries()
    from semkv import bundled
    from semkv.planning.decoder import decoder_of, load_config
    from semkv.planning.plan import plan_memory

    _check_budget(request.workload.budget)
    source = str(bundled.folder() / "model") if request.model == "bundled" else request.model
    weights = gguf_file(Path(source).expanduser())
    config = load_config(source) if weights is None else gguf_config(weights)
    dtype = request.dtype or ("float32" if weights is not None else None)  # in which `load_gguf` has its weights
    decoder = decoder_of(config, dtype=dtype, weights=request.weights)
    if request.latents:
        decoder = decoder.on_latents()
    plan = plan_memory(decoder, machine, request.workload)
    deployments: tuple[Deployment, ...] = ()
    if request.fleet is not None:
        from semkv.planning.deployment import deploy

        deployments = deploy(decoder, machine, request.workload, request.fleet, request.method)
    console = output_console()
    if request.fleet is None:
        print_plan(console, plan)
    else:
        print_deployments(console, plan, request.fleet, deployments, request.method)
    if request.json is not None:
        request.json.parent.mkdir(parents=True, exist_ok=True)
        values = plan_values(plan)
        if request.fleet is not None:
            values |= {"fleet": asdict(request.fleet), "deployments": [deployment_values(one) for one in deployments]}
        request.json.write_text(json_module.dumps(values, indent=1) + "\n")
        console.print(f"\nplan: {request.json}")
    if request.report is not None:
        console.print(f"picture: {write_picture(request.report, plan)}")


def _check_budget(budget: float | int | None) -> None:
    """Raise `BudgetError` for a number of tokens in which no method can live."""
    from semkv.methods import METHODS

    least = min(method.minimum_tokens for method in METHODS.values() if method.compresses)
    if isinstance(budget, int) and budget < least:
        raise BudgetError(f"--budget {budget}: no method can live in fewer than {least} tokens per KV head and layer")


def plan_values(plan: MemoryPlan) -> dict[str, Any]:
    """The plan as JSON values; bytes, seconds and tokens."""
    values = asdict(plan)
    for value, way in zip(values["ways"], plan.ways):
        value |= {"floor_seconds": way.floor_seconds, "tokens_per_second": tokens_per_second(plan, way)}
    return values


def deployment_values(one: Deployment) -> dict[str, Any]:
    """A deployment as JSON values; bytes, seconds and tokens."""
    own = ("floor_tokens", "estimated_tokens", "estimated_tokens_per_user")
    return asdict(one) | {name: getattr(one, name) for name in own}


def tokens_per_second(plan: MemoryPlan, way: Way) -> float:
    """Of all rows together, at the floor."""
    return plan.workload.rows / way.floor_seconds


def print_plan(console: Console, plan: MemoryPlan) -> None:
    """What the model is, each way to run it, batches by length, and thresholds."""
    _describe(console, plan)
    _ways(console, plan)
    _batches(console, plan)
    if plan.thresholds:
        _thresholds(console, plan)
    console.print(
        "\nFloors: each byte crosses its bus once, at the nominal bandwidth; arithmetic, launches and real transfers come on top."
    )


def print_deployments(
    console: Console, plan: MemoryPlan, fleet: Fleet, found: tuple[Deployment, ...], method: str | None
) -> None:
    """The model, and a column for each way to hold the users."""
    from semkv.cli.tables import simple_table
    from semkv.evaluation.tables import size
    from semkv.planning.deployment import slowdown

    _describe(console, plan)
    table = simple_table(f"{fleet.users:,} users at once", "", *(LABELS[one.way] for one in found))
    table.columns[0].justify = "left"
    lines = {
        "GPUs of a replica": [str(one.replica_gpus) for one in found],
        "GPUs that the users need": [f"{one.needed_gpus:,}" for one in found],
        "GPUs in use": [f"{one.gpus:,} on {one.hosts:,} host(s)" for one in found],
        "users that they hold": [f"{one.capacity:,}" for one in found],
        "all users held": ["yes" if one.served == fleet.users else f"no, {one.served:,}" for one in found],
        "what binds": [one.binds for one in found],
        "users of a replica": [f"{one.users_per_replica:,}" for one in found],
        "device, each GPU": [size(one.device) for one in found],
        "host, each": [size(one.host) for one in found],
        "host link, each GPU": [f"{one.link / 1e9:.2f} GB/s" for one in found],
        "between GPUs, each": [f"{one.peer / 1e9:.2f} GB/s" if one.replica_gpus > 1 else "-" for one in found],
        "a user's memory": [size(one.session) for one in found],
        "to another host": [f"{one.session_seconds:.1f} s" for one in found],
        "step, floor": [f"{1e3 * one.step_floor:.2f} ms ({one.step_binds})" for one in found],
        "tokens/s, floor": [f"{one.floor_tokens:,.0f}" for one in found],
        "tokens/s, estimate": [f"{one.estimated_tokens:,.0f}" for one in found],
        "a user's, estimate": [f"{one.estimated_tokens_per_user:.1f}" for one in found],
    }
    for name, values in lines.items():
        table.add_row(name, *values)
    console.print(table)
    measured = {name: times for times, name in (slowdown(method, one.way) for one in found)}
    console.print(
        "\nFloors: no step can be shorter. Estimates: steps as many times longer as was measured on one H200, one row of 131,072 tokens: "
        + ", ".join(f"{name} {times:.1f}" for name, times in measured.items())
        + ". Prompts, queues and failures are not counted; docs/serving.md says what is."
    )


def _describe(console: Console, plan: MemoryPlan) -> None:
    from semkv.evaluation.tables import size

    decoder, machine, workload = plan.decoder, plan.machine, plan.workload
    counted = [layer for layer in decoder.layers if not layer.window]
    cached = sum(layer.cached for layer in counted) * decoder.itemsize
    held = sum(layer.exact_bytes(decoder.itemsize) for layer in counted)
    layers = f"{len(decoder.layers)} layers"
    if windows := sorted({layer.window for layer in decoder.layers if layer.window}):
        listed = ", ".join(map(str, windows))
        layers += f", {len(decoder.layers) - len(counted)} of them with a window of {listed} tokens"
    console.print(
        f"{decoder.name}: {_count(decoder.parameters)} parameters, weights {size(decoder.weights)}, {layers}; KV {size(cached)} per "
        f"token"
    )
    if any(layer.latent for layer in counted):
        console.print(
            f"Its cache is latent (MLA); semkv holds {size(held)} per token, "
            + (
                "the latent as key and as value, of which its budget is a part."
                if all(layer.kv_heads == 1 for layer in counted if layer.latent)
                else "each head's keys and values, of which its budget is a part; --latents plans for latents instead."
            )
        )
    if decoder.context is not None and workload.tokens > decoder.context:
        console.print(
            f"The model declares {decoder.context:,} positions, fewer than the {workload.tokens:,} planned for."
        )
    console.print(
        f"{machine.name}: {size(machine.memory)} at {machine.bandwidth / 1e9:,.0f} GB/s, link {machine.link / 1e9:,.0f} GB/s"
    )
    asked = (
        "" if workload.budget is None else f", budget {workload.budget:g} with {workload.overlap:.0%} overlap of steps"
    )
    working = size(workload.runtime) if workload.runtime is not None else "0.3 of the weights"
    console.print(f"{workload.rows} row(s) of {workload.tokens:,} tokens{asked}; working memory {working}\n")


def _ways(console: Console, plan: MemoryPlan) -> None:
    from semkv.cli.tables import simple_table
    from semkv.evaluation.tables import size

    table = simple_table(
        "a decode step",
        "",
        "device",
        "host",
        "fits",
        "read/step",
        "link/step",
        "device ms",
        "link ms",
        "tokens/s",
        "longest",
    )
    table.columns[0].justify = "left"
    for way in plan.ways:
        table.add_row(
            LABELS[way.name],
            size(way.device),
            size(way.host),
            "yes" if way.fits else "no",
            size(way.read),
            size(way.moved),
            f"{1e3 * way.device_seconds:.2f}",
            f"{1e3 * way.link_seconds:.2f}",
            f"{tokens_per_second(plan, way):,.0f}" if way.fits else "-",
            _tokens(way.longest),
        )
    console.print(table)


def _batches(console: Console, plan: MemoryPlan) -> None:
    from semkv.cli.tables import simple_table
    from semkv.planning.plan import Estimator

    lengths = sorted({*CONTEXTS, plan.workload.tokens})
    table = simple_table("rows that fit, by length", "", *(_tokens(n) for n in lengths))
    table.columns[0].justify = "left"
    estimator = Estimator(plan.decoder, plan.machine, plan.workload)
    for way in plan.ways:
        table.add_row(LABELS[way.name], *(f"{estimator.most_rows(way.name, n):,}" for n in lengths))
    console.print()
    console.print(table)


def _thresholds(console: Console, plan: MemoryPlan) -> None:
    from semkv.cli.tables import simple_table

    last = len(plan.thresholds) - 1
    shown = sorted({round(last * i / (SHOWN - 1)) for i in range(SHOWN)})
    table = simple_table("progressive offload: tokens at most (Alg. 1)", "layers on the host", *map(str, shown))
    table.add_row("tokens", *(_tokens(plan.thresholds[layers]) for layers in shown))
    console.print()
    console.print(table)


def _count(parameters: int) -> str:
    """A number of parameters as people write it."""
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"


def _tokens(count: int) -> str:
    """A number of tokens as people write it."""
    from semkv.profiles.schema.memory import UNBOUNDED

    if count >= UNBOUNDED:
        return "no limit"
    return f"{count // 1024}K" if count >= 1024 and count % 1024 == 0 else f"{count:,}"


def write_picture(folder: Path, plan: MemoryPlan) -> Path:
    """Device memory and floor of a step by length, a line for each way; returns the file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from semkv.planning.plan import Estimator

    folder.mkdir(parents=True, exist_ok=True)
    estimator, machine, rows = Estimator(plan.decoder, plan.machine, plan.workload), plan.machine, plan.workload.rows
    lengths = [round(1024 * 2 ** (step / 4)) for step in range(41)]
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    for way in plan.ways:
        points = [(n, found) for n in lengths if (found := estimator.bytes_of(way.name, n, rows)) is not None]
        if not points:
            continue
        shown = [n for n, _ in points]
        axes[0].plot(shown, [found.device / 1e9 for _, found in points], label=LABELS[way.name])
        floors = [1e3 * max(x.read / machine.bandwidth, x.moved / machine.link) for _, x in points]
        axes[1].plot(shown, floors, label=LABELS[way.name])
    axes[0].axhline(machine.memory / 1e9, color="black", lw=0.8, ls="--", label="device memory")
    axes[0].set(ylabel="device memory (GB)", ylim=(0, 2 * machine.memory / 1e9))
    axes[1].set(ylabel="floor of a decode step (ms)", yscale="log")
    for axis in axes:
        axis.axvline(plan.workload.tokens, color="grey", lw=0.6, ls=":")
        axis.set_xlabel("tokens per row")
        axis.set_xscale("log", base=2)
        axis.legend(fontsize=8)
    figure.suptitle(f"{plan.decoder.name} on {machine.name}, {rows} row(s), budget {plan.workload.budget or 'full'}")
    path = folder / "plan.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
