"""Lines of records: identifiers, numbers, dates and addresses among a text's own words, as logs, tables and settings have them.

Prose has few of them, and keys of tokens that calibration never saw are far from every vector of a codebook.
"""

from __future__ import annotations

import json
import string
import uuid
from collections.abc import Callable, Iterator, Sequence
from random import Random

HEX = string.hexdigits[:16]
LEVELS = ("INFO", "WARN", "ERROR")


class Records:
    """Lines without end. own: words of the text that they stand beside; seed: the same one gives the same lines."""

    def __init__(self, own: Sequence[str], seed: int) -> None:
        self.own = list(own)
        self.random = Random(seed)
        self.kinds: tuple[Callable[[], str], ...] = (
            self.log,
            self.settings,
            self.table,
            self.measure,
            self.address,
            self.person,
            self.stock,
            self.change,
            self.machine,
            self.code,
            self.sentence,
        )

    def __iter__(self) -> Iterator[str]:
        while True:
            yield self.random.choice(self.kinds)()

    def log(self) -> str:
        return f"{self.date()} {self.random.choice(LEVELS)} {self.words(2)} id={self.identifier()} took {self.number(4)} ms"

    def settings(self) -> str:
        return json.dumps(
            {self.words(1): self.number(8), self.words(1): self.identifier(), self.words(1): self.words(3)}
        )

    def table(self) -> str:
        return ",".join(str(self.number(7)) for _ in range(8))

    def measure(self) -> str:
        return f"{self.words(4)}: {self.random.random() * 10 ** self.random.randrange(6):.3f}"

    def address(self) -> str:
        name, path = self.words(1).lower(), self.words(1).lower()
        return f"https://{name}.com/{path}/{self.symbols(HEX, self.random.choice((8, 16, 32, 40)))}"

    def person(self) -> str:
        name = self.words(2)
        mail = f"{name.split()[0].lower()}{self.number(2)}@{self.words(1).lower()}.org"
        return f"+{self.number(2)} {self.number(3)} {self.number(7)}  {name.title()} <{mail}>"

    def stock(self) -> str:
        kind = f"{self.words(1).upper()}-{self.number(4)}{self.random.choice(string.ascii_uppercase)}{self.number(2)}"
        return f"{kind} | {self.number(6)} | {self.words(3)} | {self.random.choice(('yes', 'no'))}"

    def change(self) -> str:
        return f"commit {self.symbols(HEX, 40)}\nAuthor: {self.words(2).title()}\n    {self.words(9)}"

    def machine(self) -> str:
        parts = ".".join(str(self.random.randrange(256)) for _ in range(4))
        return f"{parts} {self.identifier()} {self.symbols(HEX, 12)}"

    def code(self) -> str:
        return self.symbols(string.ascii_letters + string.digits + "+/", self.random.randrange(20, 70))

    def sentence(self) -> str:
        return f"{self.words(6)} {self.number(7)} {self.words(5)} {self.identifier()} {self.words(4)}."

    def words(self, count: int) -> str:
        return " ".join(self.random.choice(self.own) for _ in range(count))

    def number(self, most: int) -> int:
        """Of up to `most` digits, short ones as often as long ones."""
        return self.random.randrange(10 ** self.random.randint(1, most))

    def symbols(self, of: str, count: int) -> str:
        return "".join(self.random.choice(of) for _ in range(count))

    def identifier(self) -> str:
        return str(uuid.UUID(int=self.random.getrandbits(128)))

    def date(self) -> str:
        day = (
            f"{self.random.randrange(1990, 2040)}-{self.random.randrange(1, 13):02d}-{self.random.randrange(1, 29):02d}"
        )
        return f"{day}T{self.random.randrange(24):02d}:{self.random.randrange(60):02d}:{self.random.randrange(60):02d}Z"


__all__ = ["Records"]
