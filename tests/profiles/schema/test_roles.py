"""Greedy star clustering and roles against a naive reference without a graph library."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semkv.profiles.schema.roles import head_roles, similarity_graph, star_clusters


def naive_roles(stability, overlap, tau_stable, tau_similar):
    """App. C.2 in loops over a list of neighbours."""
    heads = range(len(stability))
    near = {h: {o for o in heads if o != h and overlap[h][o] >= tau_similar} for h in heads}
    free, roles, clusters = set(heads), ["?"] * len(stability), list(heads)
    while True:
        degree = {h: len(near[h] & free) for h in sorted(free)}
        if not degree or max(degree.values()) == 0:
            break
        pivot = next(h for h in sorted(free) if degree[h] == max(degree.values()))
        roles[pivot] = "pivot"
        for other in near[pivot] & free:
            roles[other], clusters[other] = "satellite", pivot
            free.discard(other)
        free.discard(pivot)
    for head in free:
        roles[head] = "anchor" if stability[head] >= tau_stable else "volatile"
    return tuple(roles), tuple(clusters)


@st.composite
def layers(draw):
    heads = draw(st.integers(1, 9))
    upper = {(i, j): draw(st.floats(0, 1)) for i in range(heads) for j in range(i + 1, heads)}
    overlap = [[1.0 if i == j else upper[min(i, j), max(i, j)] for j in range(heads)] for i in range(heads)]
    return [draw(st.floats(0, 1)) for _ in range(heads)], overlap


@settings(max_examples=200, deadline=None)
@given(layers(), st.floats(0, 1), st.floats(0, 1))
def test_roles_are_the_naive_ones(layer, tau_stable, tau_similar):
    stability, overlap = layer
    roles, clusters = head_roles(stability, overlap, tau_stable, tau_similar)
    assert (roles, clusters) == naive_roles(stability, overlap, tau_stable, tau_similar)
    for head, role in enumerate(roles):
        followers = [other for other, to in enumerate(clusters) if to == head and other != head]
        assert bool(followers) == (role == "pivot"), "no pivot is alone, and only pivots are followed"
        if role == "satellite":
            assert overlap[head][clusters[head]] >= tau_similar


def test_a_chain_is_cut_at_its_middle():
    overlap = [[1, 0.9, 0.1, 0.1], [0.9, 1, 0.8, 0.1], [0.1, 0.8, 1, 0.1], [0.1, 0.1, 0.1, 1]]
    assert head_roles([0.9, 0.1, 0.1, 0.6], overlap, 0.5, 0.5) == (
        ("satellite", "pivot", "satellite", "anchor"),
        (1, 1, 1, 3),
    )
    assert head_roles([0.9, 0.1, 0.1, 0.4], overlap, 0.5, 0.85)[0] == ("pivot", "satellite", "volatile", "volatile")


def test_the_graph_is_left_whole():
    graph = similarity_graph([[1, 0.7], [0.7, 1]], 0.7)
    assert star_clusters(graph) == {0: 0, 1: 0}
    assert graph.edges[0, 1]["overlap"] == pytest.approx(0.7)
