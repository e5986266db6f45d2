"""Say for each site from which length of the sequence on what is folded there waits on the host (SpeContext Alg. 1-2)."""

from __future__ import annotations

from dataclasses import replace

from semkv.errors import ConfigError
from semkv.ir.program import Program
from semkv.passes.base import Pass, PassOptions

REASON = "{reason}; on the host from {tokens} tokens on"


class PlaceMemory(Pass):
    """Give every site of a counted store the length from which it waits on the host: the last store leaves the device first."""

    name = "place_memory"
    needs = "lowered"
    leaves = "lowered"
    after = ("lower_kernels",)

    def applies(self, program: Program, options: PassOptions) -> bool:
        return options.thresholds is not None

    def run(self, program: Program, options: PassOptions) -> Program:
        """Annotate the sites.

        Raises
        ------
        ConfigError: `options.thresholds` are not one more than there are counted stores, or they fall.
        """
        limits = options.thresholds or ()
        stores = sorted({site.store for site in program.sites if site.treatment == "method"})
        if len(limits) != len(stores) + 1 or list(limits) != sorted(limits):
            raise ConfigError(f"thresholds {limits}: expected {len(stores) + 1} lengths, none below the one before")
        begins = {store: limit + 1 for store, limit in zip(reversed(stores), limits)}
        sites = tuple(
            replace(
                site, host_from=begins[site.store], reason=REASON.format(reason=site.reason, tokens=begins[site.store])
            )
            if site.treatment == "method"
            else site
            for site in program.sites
        )
        listed = ", ".join(f"store {store} from {begins[store]}" for store in stores)
        return program.evolve(f"place_memory: on the host {listed} tokens on; at most {limits[-1]} tokens", sites=sites)
