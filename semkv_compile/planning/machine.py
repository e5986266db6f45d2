"""Accelerators by name or by numbers: memory, its bandwidth, and that of the link to the host."""

from __future__ import annotations

from dataclasses import dataclass

from semkv.config import byte_count
from semkv.errors import ConfigError


@dataclass(frozen=True)
class Machine:
    """An accelerator. memory: bytes. bandwidth, link: bytes per second, of its memory and from the host, one direction."""

    name: str
    memory: int
    bandwidth: int
    link: int


def _row(name: str, memory: float, bandwidth: float, link: float) -> Machine:
    """Gigabytes, and gigabytes per second."""
    return Machine(name, int(memory * 1e9), int(bandwidth * 1e9), int(link * 1e9))


MACHINES = {
    machine.name: machine
    for machine in (
        _row("t4", 16, 320, 16),
        _row("v100", 32, 900, 16),
        _row("a10", 24, 600, 32),
        _row("l4", 24, 300, 32),
        _row("l40s", 48, 864, 32),
        _row("a100-40gb", 40, 1555, 32),
        _row("a100-80gb", 80, 2039, 32),
        _row("h100-pcie", 80, 2000, 64),
        _row("h100", 80, 3350, 64),
        _row("h200", 141, 4800, 64),
        _row("gh200", 96, 4000, 450),
        _row("b200", 180, 8000, 64),
        _row("mi300x", 192, 5300, 64),
        _row("rtx3090", 24, 936, 32),
        _row("rtx4090", 24, 1008, 32),
        _row("rtx5090", 32, 1792, 64),
        _row("rtx6000-ada", 48, 960, 32),
    )
}
"""Nominal figures of the makers' data sheets; links are those of the slot (PCIe 3, 4 or 5 x16; NVLink-C2C). Real transfers
reach less, so that times which follow are floors."""

FIELDS = ("memory", "bandwidth", "link")


def parse_machine(text: str) -> Machine:
    """A name of `MACHINES`, or `memory=80GB,bandwidth=3.35TB/s,link=64GB/s`; a name first changes what follows it:
    `h100,link=25GB/s`.

    Raises
    ------
    ConfigError: an unknown name or field, a missing one, or a size that is none.
    """
    base: Machine | None = None
    given: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        field, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals and base is None and not given:
            base = MACHINES.get(field.lower())
            if base is None:
                raise ConfigError(
                    f"gpu {field!r} is not known: give one of {', '.join(MACHINES)}, or memory=80GB,bandwidth=3.35TB/s,link=64GB/s"
                )
            continue
        if field not in FIELDS or field in given or not equals:
            raise ConfigError(
                f"gpu {text!r}: {part!r} is not understood; expected a name, then {', '.join(FIELDS)} once each"
            )
        try:
            given[field] = byte_count(value.removesuffix("/s"))
        except ValueError as error:
            raise ConfigError(f"gpu {field}={value}: {error}") from None
    known = {} if base is None else {field: getattr(base, field) for field in FIELDS}
    if missing := [field for field in FIELDS if field not in known | given]:
        raise ConfigError(
            f"gpu {text!r} lacks {', '.join(missing)}: expected memory=80GB,bandwidth=3.35TB/s,link=64GB/s"
        )
    return Machine(text if base is None or given else base.name, **(known | given))
