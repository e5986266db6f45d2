"""What scripts share whose results are a JSON file and a page made from it: their options, and the writing of both."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Report = dict[str, Any]


class Output:
    """Where results go: `results` is the committed file, the only one that a page is made from, by `page`."""

    def __init__(self, parser: argparse.ArgumentParser, results: Path, page: Callable[[Report], Path]) -> None:
        self.results, self.page = results, page
        parser.add_argument("--out", type=Path, default=results, help="the JSON file")
        parser.add_argument("--page", action="store_true", help="write the page alone, from the results that are there")

    def page_alone(self, arguments: argparse.Namespace) -> bool:
        """Whether that is all that was asked for; then it is done."""
        if arguments.page:
            self._write_page()
        return arguments.page

    def save(self, report: Report, out: Path) -> None:
        """Write the results, of a run that may go on."""
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    def finish(self, out: Path) -> None:
        """Write the page where `out` is the committed file."""
        if out == self.results:
            self._write_page()

    def _write_page(self) -> None:
        print(f"wrote {self.page(json.loads(self.results.read_text(encoding='utf-8')))}")
