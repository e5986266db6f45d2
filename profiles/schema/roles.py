"""From stability and overlap to roles: HeteroCache's taxonomy (Sec. 4.1, App. C.2), for any thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .facts import Role


def similarity_graph(overlap: Sequence[Sequence[float]], tau_similar: float) -> Any:
    """The `networkx.Graph` of one layer's KV heads: an edge where two heads' `overlap` reaches `tau_similar`.

    Edges carry the overlap as `overlap`.
    """
    import networkx

    graph = networkx.Graph()
    graph.add_nodes_from(range(len(overlap)))
    for head, row in enumerate(overlap):
        for other in range(head + 1, len(row)):
            if row[other] >= tau_similar:
                graph.add_edge(head, other, overlap=float(row[other]))
    return graph


def star_clusters(graph: Any) -> dict[int, int]:
    """Greedy star clustering: which pivot each clustered head follows, a pivot itself; other heads are left out.

    The head with most neighbours among those that are still free becomes a pivot (of equals the first), its free
    neighbours become its satellites, until no two free heads are neighbours: no pivot is alone.
    """
    free = graph.copy()
    follows: dict[int, int] = {}
    while free.number_of_edges():
        pivot = max(sorted(free.nodes), key=free.degree)
        members = [pivot, *free.neighbors(pivot)]
        follows |= dict.fromkeys(members, pivot)
        free.remove_nodes_from(members)
    return follows


def head_roles(
    stability: Sequence[float], overlap: Sequence[Sequence[float]], tau_stable: float, tau_similar: float
) -> tuple[tuple[Role, ...], tuple[int, ...]]:
    """Role of each KV head of a layer, and the head whose cluster it is in (its own where it is in none).

    Clusters come first (App. C.2); heads outside them are anchors where stability reaches `tau_stable`, else volatile.
    """
    follows = star_clusters(similarity_graph(overlap, tau_similar))
    roles: list[Role] = []
    for head, stable in enumerate(stability):
        if head in follows:
            roles.append("pivot" if follows[head] == head else "satellite")
        else:
            roles.append("anchor" if stable >= tau_stable else "volatile")
    return tuple(roles), tuple(follows.get(head, head) for head in range(len(stability)))
