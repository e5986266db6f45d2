"""Docstrings as they are written here, for the reference: sections over lines of `name: what it is` become lists."""

from __future__ import annotations

import re
from typing import Any

import griffe

SECTION = re.compile(r"^(Parameters|Returns|Raises|Attributes)\n-{3,}\n", re.MULTILINE)
ENTRY = re.compile(r"^((?:`?[\w.*/]+`?(?:, )?)+): ", re.MULTILINE)


def as_markdown(text: str) -> str:
    """Sections with bold titles, and each of their entries as an item."""
    first, *rest = SECTION.split(text)
    out = [first.rstrip()]
    for title, body in zip(rest[::2], rest[1::2]):
        lines: list[str] = []
        for line in body.strip().splitlines():
            begins = not line.startswith(" ") and ENTRY.match(line)
            lines.append(
                ENTRY.sub(r"- **\1**: ", line, count=1)
                if begins
                else f"  {line.strip()}"
                if lines and line.strip()
                else line
            )
        out.append(f"**{title}**\n\n" + "\n".join(lines))
    return "\n\n".join(out)


class Docstrings(griffe.Extension):
    """Rewrites each docstring before it is shown."""

    def on_instance(self, *, obj: griffe.Object, **others: Any) -> None:
        """See `griffe.Extension.on_instance`."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
