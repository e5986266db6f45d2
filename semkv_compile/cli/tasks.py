"""What `semkv tasks` does: the list of evaluation tasks."""

from __future__ import annotations

from rich import box
from rich.table import Table

from semkv.cli.common import output_console


def run_tasks(names: list[str] | None) -> None:
    """Print tasks with their options, then groups and sources."""
    from semkv.evaluation.tasks.registry import GROUPS, SOURCES, TASKS, task_names

    console = output_console()
    chosen = tuple(TASKS) if names is None else task_names(names)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for column in ("task", "group", "what is asked", "--source", "--set (default)"):
        table.add_column(column, overflow="fold")
    for name in chosen:
        entry = TASKS[name]
        options = ", ".join(f"{option}={value}" for option, value in entry.options.items())
        table.add_row(name, entry.suite, entry.summary, ", ".join(entry.sources) or "-", options or "-")
    console.print(table)
    used = {key for name in chosen for key in TASKS[name].sources}
    if used:
        data = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
        for column in ("--source KEY=PLACE", "what", "file taken from a Hub data set"):
            data.add_column(column)
        for key, (what, defaults) in SOURCES.items():
            if key in used:
                data.add_row(key, what, ", ".join(defaults) or "name it: owner/name/FILE")
        console.print(data)
    if names is None:
        console.print("groups: " + ", ".join(f"{group} ({len(members)})" for group, members in GROUPS.items()))
