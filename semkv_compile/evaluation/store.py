"""Rows on disk, one JSON line each, so that a run that stops goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from semkv.errors import ConfigError
from semkv.evaluation.schema import Row


class RowStore:
    """An append-only JSON Lines file of rows; kept in memory alone where `path` is None.

    Every row is written as soon as it is measured; several processes may append to one file. A last line that a killed
    process left unfinished is dropped; damage elsewhere is an error, because results would silently be missing.
    """

    def __init__(self, path: str | Path | None):
        self.path = Path(path) if path is not None else None
        self._rows: dict[tuple[str, int], Row] = {}
        if self.path is not None and self.path.exists():
            self._read()

    def _read(self) -> None:
        assert self.path is not None
        text = self.path.read_text(encoding="utf-8")
        lines = text.split("\n")
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            try:
                row = Row.model_validate_json(line)
            except ValidationError as error:
                if number == len(lines):
                    self._drop_tail(len(text.encode()), len(line.encode()))
                    break
                raise ConfigError(
                    f"{self.path}, line {number}: not a row of an evaluation ({error.error_count()} problems); "
                    "name another file, or delete this one to start again"
                ) from error
            self._rows[row.cell, row.context] = row

    def _drop_tail(self, size: int, tail: int) -> None:
        """Cut the last `tail` of the `size` bytes that were read, unless another process has written since."""
        assert self.path is not None
        if self.path.stat().st_size == size:
            os.truncate(self.path, size - tail)

    def has(self, cell: str, context: int, answers: int, *, compared: bool = False, mass: bool = False) -> bool:
        """Whether this context of the cell has at least `answers` questions, each `compared` with the full cache's, and `mass`."""
        row = self._rows.get((cell, context))
        if row is None or len(row.answers) < answers or (mass and row.mass is None):
            return False
        return not compared or all(answer.compared for answer in row.answers[:answers])

    def add(self, row: Row) -> None:
        """Keep a row, and put it on disk."""
        self._rows[row.cell, row.context] = row
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            line = json.dumps(row.model_dump(mode="json", exclude_none=True), separators=(",", ":")) + "\n"
            # One write of one line to a file opened for appending: processes that share a grid do not mix their lines.
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(file, line.encode())
            finally:
                os.close(file)

    def rows(self, cell: str, contexts: Iterable[int]) -> list[Row]:
        """Rows of a cell for those of `contexts` that are measured, in their order."""
        return [self._rows[cell, i] for i in contexts if (cell, i) in self._rows]
