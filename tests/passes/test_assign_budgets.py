"""Treatments, reasons and shares of sites."""

from __future__ import annotations

from dataclasses import replace

import pytest

from semkv.errors import ConfigError
from semkv.passes.assign_budgets import AssignBudgets
from semkv.passes.base import PassOptions
from semkv.passes.surprisal_head import SurprisalHead


@pytest.fixture
def program(decoder_program):
    return SurprisalHead().run(decoder_program, PassOptions())


def assign(program, **options):
    return AssignBudgets().run(program, PassOptions(**options))


def test_full_counts_nothing_and_says_why(program):
    result = assign(program, method="full")
    assert [site.treatment for site in result.sites] == ["exact", "window", "exact"]
    assert result.sites[0].reason == "method full: all tokens stay exact"
    assert result.sites[1].reason == "keeps its window of 8 tokens; not counted"
    assert [site.budget_share for site in result.sites] == [0.0, 0.0, 0.0]
    assert result.notes[-1] == "assign_budgets: 3 sites over 3 stores: 1 window, 2 exact"


def test_uniform_shares_over_counted_stores(program):
    result = assign(program, method="sekv")
    assert [site.treatment for site in result.sites] == ["method", "window", "method"]
    assert [site.budget_share for site in result.sites] == [0.5, 0.0, 0.5]
    assert result.stage == "annotated"


def test_layer_shares_are_normalised_over_counted_stores(program):
    result = assign(program, method="sekv", layer_shares=(1.0, 100.0, 3.0))
    assert [site.budget_share for site in result.sites] == [0.25, 0.0, 0.75]


def test_a_shared_store_is_charged_once(program):
    sites = (program.sites[0], program.sites[1], replace(program.sites[2], store=0))
    result = assign(program.evolve(sites=sites), method="sekv")
    assert [site.budget_share for site in result.sites] == [1.0, 0.0, 1.0]
    assert sum(site.budget_share for site in result.stores) == 1.0
    assert result.sites[2].reason == "reads the store of site 0 (layers.0); charged once, there"


def test_a_store_that_one_reader_sees_in_full_is_counted(program):
    sites = (program.sites[0], replace(program.sites[1], store=0), replace(program.sites[2], store=1))
    result = assign(program.evolve(sites=sites), method="sekv")
    assert [site.treatment for site in result.sites] == ["method"] * 3


def test_roles_follow_the_store(program):
    result = assign(program, method="sekv", head_roles=(("a", "b"), ("a", "a"), ("b", "a")))
    assert [site.roles for site in result.sites] == [("a", "b"), ("a", "a"), ("b", "a")]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"layer_shares": (1.0,)}, "layer_shares has 1 weights, expected 3: one per KV store"),
        ({"layer_shares": (1.0, 0.0, 1.0)}, "layer_shares holds 0.0, expected positive finite weights"),
        ({"layer_shares": (1.0, float("nan"), 1.0)}, "layer_shares holds nan, expected positive finite weights"),
        ({"head_roles": (("a", "b"),)}, "head_roles has 1 rows, expected 3: one per KV store"),
        ({"head_roles": (("a",), ("a", "b"), ("a", "b"))}, "head_roles of store 0 has 1 roles, expected 2"),
    ],
)
def test_options_of_another_model_are_refused(program, options, text):
    with pytest.raises(ConfigError, match=text):
        assign(program, method="sekv", **options)


def test_input_is_not_changed(program):
    before = program.sites
    assign(program, method="sekv")
    assert program.sites == before
    assert program.stage == "found"
