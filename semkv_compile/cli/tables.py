"""The form of tables that commands print."""

from __future__ import annotations

from rich.table import Table


def simple_table(title: str, *columns: str) -> Table:
    """A table without rules, its columns right-aligned."""
    table = Table(title=title, box=None, padding=(0, 1), pad_edge=False, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


__all__ = ["simple_table"]
