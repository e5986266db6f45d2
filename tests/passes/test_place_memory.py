"""Where sites wait: the last store leaves the device first, and graphs stay as they are."""

from __future__ import annotations

import pytest

from semkv.compiler.pipeline import lower, place
from semkv.errors import ConfigError
from semkv.passes.base import PassOptions
from semkv.passes.place_memory import PlaceMemory
from semkv.passes.surprisal_head import SurprisalHead


@pytest.fixture
def program(decoder_program):
    return lower(SurprisalHead().run(decoder_program, PassOptions()), PassOptions(method="sekv"))


def test_the_last_store_leaves_first(program):
    placed = place(program, PassOptions(thresholds=(100, 250, 400)))
    assert [site.host_from for site in placed.sites] == [251, None, 101]
    assert placed.sites[2].reason == "50.0% of the device budget; on the host from 101 tokens on"
    assert placed.sites[1].reason == program.sites[1].reason
    assert (
        placed.notes[-1] == "place_memory: on the host store 0 from 251, store 2 from 101 tokens on; at most 400 tokens"
    )


def test_graphs_are_not_touched(program):
    placed = place(program, PassOptions(thresholds=(1, 2, 3)))
    for name in ("body", "head", "prefill", "extend", "decode"):
        assert getattr(placed, name) is getattr(program, name)
    assert placed.stage == "lowered"


def test_without_thresholds_all_wait_on_the_host(program):
    assert not PlaceMemory().applies(program, PassOptions())
    assert place(program, PassOptions()) is program


def test_sites_that_share_a_store_leave_together(program):
    first, window, last = program.sites
    shared = program.evolve(sites=(first, window, last.__class__(**vars(last) | {"store": first.store})))
    placed = PlaceMemory().run(shared, PassOptions(thresholds=(100, 250)))
    assert [site.host_from for site in placed.sites] == [101, None, 101]


@pytest.mark.parametrize("limits", [(100, 250), (100, 250, 300, 400), (250, 100, 300)])
def test_thresholds_that_do_not_fit_are_refused(program, limits):
    with pytest.raises(ConfigError, match=r"expected 3 lengths, none below the one before"):
        place(program, PassOptions(thresholds=limits))
