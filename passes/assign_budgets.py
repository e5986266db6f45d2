"""Say for each site what the method may do with it, and which share of the device budget its store has."""

from __future__ import annotations

import math
from dataclasses import replace

from semkv.errors import ConfigError
from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.passes.base import Pass, PassOptions

REASON_WINDOW = "keeps its window of {window} tokens; not counted"
REASON_FULL = "method full: all tokens stay exact"
REASON_METHOD = "{share:.1%} of the device budget"
REASON_SHARED = "reads the store of site {owner} ({name}); charged once, there"


class AssignBudgets(Pass):
    """Set treatment, reason, budget share and head roles of every site; shares are per KV store and sum to 1."""

    name = "assign_budgets"
    needs = "found"
    leaves = "annotated"
    after = ("surprisal_head",)

    def run(self, program: Program, options: PassOptions) -> Program:
        """Annotate the sites.

        Raises
        ------
        ConfigError: `options.layer_shares` or `options.head_roles` do not fit the program's stores.
        """
        shares = _store_shares(program, options)
        roles = _store_roles(program, options)
        owners = {site.store: site for site in program.stores}
        sites = tuple(_annotate(site, owners[site.store], shares, roles, options) for site in program.sites)
        counts = {kind: sum(site.treatment == kind for site in sites) for kind in ("method", "window", "exact")}
        listed = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        note = f"assign_budgets: {len(sites)} sites over {len(owners)} stores: {listed or 'none'}"
        return program.evolve(note, stage="annotated", sites=sites)


def _counted(site: AttentionSite, options: PassOptions) -> bool:
    """Whether a method may choose what the site's store keeps."""
    return site.window == 0 and options.method != "full"


def _counted_stores(program: Program, options: PassOptions) -> list[int]:
    """Stores whose tokens the budget counts: a store is counted as soon as one of its readers sees all of the past."""
    return sorted({site.store for site in program.sites if _counted(site, options)})


def _store_shares(program: Program, options: PassOptions) -> dict[int, float]:
    """The share of each counted store; the weights of `layer_shares` follow the order of `program.stores`."""
    stores = [site.store for site in program.stores]
    weights = options.layer_shares
    if weights is None:
        weights = tuple(1.0 for _ in stores)
    if len(weights) != len(stores):
        raise ConfigError(
            f"layer_shares has {len(weights)} weights, expected {len(stores)}: one per KV store of the model; "
            "was the profile made for another model?"
        )
    bad = [weight for weight in weights if not (math.isfinite(weight) and weight > 0)]
    if bad:
        raise ConfigError(f"layer_shares holds {bad[0]}, expected positive finite weights")
    counted = set(_counted_stores(program, options))
    total = sum(weight for store, weight in zip(stores, weights) if store in counted)
    return {store: weight / total for store, weight in zip(stores, weights) if store in counted}


def _store_roles(program: Program, options: PassOptions) -> dict[int, tuple[str, ...]]:
    """Head roles by store; a store's roles hold for every site that reads it."""
    if options.head_roles is None:
        return {}
    if len(options.head_roles) != len(program.stores):
        raise ConfigError(
            f"head_roles has {len(options.head_roles)} rows, expected {len(program.stores)}: one per KV store"
        )
    given = [_own_roles(site, roles) for site, roles in zip(program.stores, options.head_roles)]
    for site, roles in zip(program.stores, given):
        if len(roles) != site.kv_heads:
            raise ConfigError(
                f"head_roles of store {site.store} has {len(roles)} roles, expected {site.kv_heads} (KV heads)"
            )
    return {site.store: tuple(roles) for site, roles in zip(program.stores, given)}


def _own_roles(site: AttentionSite, roles: tuple[str, ...]) -> tuple[str, ...]:
    """Of the roles of the user's model's heads those of the site's, in its order."""
    return (
        tuple(roles[head] for head in site.head_order)
        if site.head_order and max(site.head_order) < len(roles)
        else roles
    )


def _annotate(
    site: AttentionSite,
    owner: AttentionSite,
    shares: dict[int, float],
    roles: dict[int, tuple[str, ...]],
    options: PassOptions,
) -> AttentionSite:
    site = replace(site, roles=roles.get(site.store, ()))
    if site.store in shares:
        share = shares[site.store]
        reason = REASON_METHOD.format(share=share)
        if site.index != owner.index:
            reason = REASON_SHARED.format(owner=owner.index, name=owner.name)
        return replace(site, treatment="method", budget_share=share, reason=reason)
    if site.window:
        return replace(site, treatment="window", budget_share=0.0, reason=REASON_WINDOW.format(window=site.window))
    return replace(site, treatment="exact", budget_share=0.0, reason=REASON_FULL)
