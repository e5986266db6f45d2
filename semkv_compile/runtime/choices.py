"""Which methods serve a model that chooses itself what its attention reads."""

from __future__ import annotations

from semkv.errors import ConfigError
from semkv.ir.program import Program
from semkv.runtime.components import Plan


def check_choices(program: Program, plan: Plan, method: str) -> None:
    """Raise `ConfigError` where the model names the tokens that it reads, and the method reads what is no token."""
    if not program.choosers:
        return
    chosen = [site for site in program.sites if site.chooser >= 0]
    for components in plan.all_components():
        rest, summary = components.rest, components.summary
        means = summary is not None and summary.attend
        if means or components.forms is not None or (rest is not None and any(rest.has_rest(site) for site in chosen)):
            raise ConfigError(
                f"method {method!r} attends to means, codes or factors of folded tokens, and {program.choosers[0].name} chooses "
                "which tokens attention reads: no choice names a mean; use 'full', 'indexer', or a method that keeps or fetches tokens "
                "as they are, such as 'snapkv' or 'quest'"
            )


__all__ = ["check_choices"]
