"""What a run of `semkv-profile` will take, before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from semkv.cli.profile_choice import CHOICE, choice_seconds, choice_workers
from semkv.io.ranks import ALONE, Ranks


def print_estimate(
    console: Console, job: Any, steps: Sequence[str], workers: int | None = None, ranks: Ranks = ALONE
) -> None:
    """Time pieces of the work, and print how long each step will take and the most memory. workers: of `choice`, as in `run_choice`.
    ranks: processes that share the work."""
    from semkv.cli.tables import simple_table
    from semkv.profiles.calibration.estimate import estimate

    with console.status("timing") as status:
        own = tuple(step for step in steps if step != CHOICE)
        made = estimate(job, own, lambda what: status.update(f"timing {what}"), processes=ranks.count)
    seconds = dict(made.seconds)
    if CHOICE in steps:
        workers = choice_workers(job.model, next(job.model.parameters()).device, workers, ranks)
        length = job.measure_settings.length
        whole = choice_seconds(made.passes, bundled=job.name == "bundled", length=length, workers=workers)
        seconds[CHOICE] = whole / ranks.count
    table = simple_table("time at most", "step", "time")
    for step, spent in seconds.items():
        table.add_row(step, duration(spent))
    console.print(table)
    memory = f", {made.peak_bytes / 2**30:.1f} GiB of memory" if made.peak_bytes else ""
    console.print(f"together {duration(sum(seconds.values()))}{memory}", highlight=False)


def duration(seconds: float) -> str:
    """Two figures in the unit that suits."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
