"""From which lengths on layers wait on the host: SpeContext's memory model for one program, method and device."""

from __future__ import annotations

from torch import nn

from semkv.config import CompileConfig
from semkv.errors import ConfigError
from semkv.ir.program import Program
from semkv.profiles.schema import Profile
from semkv.profiles.schema.memory import RUNTIME_SHARE, MemoryDemand, thresholds
from semkv.runtime.budgets.budget import Budget
from semkv.runtime.budgets.costs import waiting_cost_bytes
from semkv.runtime.components import Plan
from semkv.runtime.host.pool import AHEAD


def offload_thresholds(
    program: Program, plan: Plan, profile: Profile | None, budget: Budget, settings: CompileConfig
) -> tuple[int, ...]:
    """Alg. 1 for a lowered program: lengths in tokens, one more than it has counted stores; none without progressive offload.

    The working memory is what the profile measured, where it has a memory model, else 0.3 of the weights. Unlike in Eq. 7, a
    layer on the device holds its budget beside the tokens that wait there, and no buffer of repeated heads exists.

    Raises
    ------
    ConfigError: the method folds nothing, so that nothing waits. BudgetError: the device does not hold the weights.
    """
    if settings.offload != "progressive":
        return ()
    if not plan.unfolds or budget.value is None:
        raise ConfigError(
            "offload='progressive' moves what a step did not select: the method keeps or drops tokens for good, use "
            "offload='budget'"
        )
    assert settings.device_memory is not None
    return thresholds(
        offload_demand(program, plan, profile, budget, settings), settings.device_memory, settings.host_memory
    )


def offload_demand(
    program: Program, plan: Plan, profile: Profile | None, budget: Budget, settings: CompileConfig
) -> MemoryDemand:
    """What this program under this plan asks of the device."""
    stores = [store for store in program.stores if store.treatment == "method"]
    waiting = [
        sum(waiting_cost_bytes(part.site(store), part.components, budget.dtype) for part in plan.parts[store.store])
        for store in stores
    ]
    weights = weight_bytes(program)
    known = profile.info.memory_model if profile is not None else None
    assert budget.value is not None
    runtime = known.runtime_bytes if known is not None else int(RUNTIME_SHARE * weights)
    return MemoryDemand(
        weights=weights,
        runtime=runtime + settings.rows * AHEAD * sum(waiting),  # what stores on the device are ahead of their tokens
        waiting=tuple(waiting),
        exact=tuple(store.values_per_token * budget.dtype.itemsize for store in stores),
        budget=budget.value,
        rows=settings.rows,
        beside=True,
        floor=budget.floor,
    )


def weight_bytes(program: Program) -> int:
    """Bytes of the parameters and buffers of all of a program's graphs, each storage once."""
    modules = [part for part in vars(program).values() if isinstance(part, nn.Module)]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())
