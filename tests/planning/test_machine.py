"""Accelerators by name and by numbers."""

from __future__ import annotations

import pytest

from semkv.errors import ConfigError
from semkv.planning.machine import MACHINES, Machine, parse_machine


def test_names():
    assert parse_machine("H100") == Machine("h100", 80 * 10**9, 3350 * 10**9, 64 * 10**9)
    for name, machine in MACHINES.items():
        assert parse_machine(name) == machine
        assert machine.memory < machine.bandwidth
        assert machine.link < machine.bandwidth


def test_numbers_and_what_changes_a_name():
    found = parse_machine("memory=80GB, bandwidth=3.35TB/s,link=64GB/s")
    assert (found.memory, found.bandwidth, found.link) == (80 * 10**9, 3350 * 10**9, 64 * 10**9)
    slower = parse_machine("h100,link=25GiB/s")
    assert slower.link == 25 << 30
    assert (slower.memory, slower.name) == (80 * 10**9, "h100,link=25GiB/s")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h1000", "gpu 'h1000' is not known: give one of t4, v100"),
        ("memory=80GB,bandwidth=1TB/s", "lacks link: expected memory=80GB"),
        ("", "lacks memory, bandwidth, link"),
        ("h100,memory=much", "gpu memory=much: 'much' is no size"),
        ("h100,speed=1GB", "'speed=1GB' is not understood; expected a name, then memory, bandwidth, link once each"),
        ("memory=1GB,memory=2GB", "'memory=2GB' is not understood"),
        ("memory=1GB,h100", "'h100' is not understood"),
    ],
)
def test_refusals(text, said):
    with pytest.raises(ConfigError, match=said):
        parse_machine(text)
