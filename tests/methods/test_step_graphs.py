"""A decode step as one graph of tensors: it answers like steps that ask the memory, calls no Python object, and never leaves its device."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from semkv.compiled import CompiledModel
from semkv.config import CompileConfig
from semkv.runtime.state import State
from tests.conftest import quick_ones
from tests.eager_steps import eagerly

CASES = {
    "full": ("full", None, {}),
    "streaming_llm": ("streaming_llm", 0.2, {}),
    "snapkv": ("snapkv", 0.2, {}),
    "h2o": ("h2o", 0.2, {}),
    "pyramidkv": ("pyramidkv", 0.2, {}),
    "chunkkv": ("chunkkv", 0.2, {}),
    "cake": ("cake", 0.2, {}),
    "semanticache": ("semanticache", 0.2, {}),
    "compresskv": ("compresskv", 0.2, {}),
    "compresskv, recoverable": ("compresskv", 0.2, {"recoverable": True}),
    "quest": ("quest", 0.3, {}),
    "quest, small": ("quest", 72, {"page": 4}),
    "shadowkv": ("shadowkv", 0.2, {}),
    "infllm": ("infllm", 0.4, {}),
    "clusterkv": ("clusterkv", 0.5, {}),
    "sketch": ("sketch", 0.1, {}),
    "sketch, raw": ("sketch", 0.1, {"exact_form": "raw", "coarse": False}),
    "sketch, oracle": ("sketch", 0.1, {"oracle": True}),
    "sekv": ("sekv", 0.2, {"forms": "int8"}),
    "sekv, thresholds": ("sekv", 0.2, {"router": "trained", "fill": False, "forms": "int8", "coarse": True}),
    "sekv, pooled": ("sekv", 0.2, {"router": "trained", "routing": "mean", "forms": "raw"}),
    "sentencekv": ("sentencekv", 0.2, {}),
    "heterocache": ("heterocache", 0.3, {"strict": True, "every": 3, "tau_drift": 0.9}),
    "omnikv": ("omnikv", 0.7, {}),
    "omnikv, strict": ("omnikv", 0.3, {"strict": True}),
    "specontext": ("specontext", 0.4, {}),
    "specontext, strict": ("specontext", 0.3, {"strict": True}),
    "mixed": ("mixed", 0.3, {}),
    "mixed, all": ("mixed", 0.4, {"sentence": 0.2, "prior": 0.2, "others": "window"}),
}
QUICK = (
    "full",
    "h2o",
    "quest, small",
    "sketch",
    "sekv, thresholds",
    "sentencekv",
    "heterocache",
    "omnikv, strict",
    "specontext",
    "mixed",
)
EXACT = ("sketch, oracle",)
"""Where KV is in float32: a token alone is chosen by its true attention, and halves round neighbours in that order past each other."""
PROMPT, STEPS = 330, 40


def made(whole: CompiledModel, case: str) -> CompiledModel:
    method, budget, options = CASES[case]
    config = CompileConfig(floor=0, kv_dtype="float32" if case in EXACT else "float16")
    return whole.with_method(method, budget=budget, config=config, **options)


def stepped(compiled: CompiledModel, state: State, ids: Tensor) -> Tensor:
    """Logits [T, vocab] after each of ids [1, T]."""
    return torch.cat([compiled.extend(state, one)[:, 0] for one in ids.split(1, 1)])


@pytest.mark.parametrize("case", quick_ones(CASES, QUICK))
def test_a_graph_answers_like_steps_that_ask(whole, prompt, case):
    """Logits, traffic and shares of a prompt and steps over which windows fold, budgets grow and units merge."""
    graphed, asking = made(whole, case), eagerly(made(whole, case))
    assert graphed.placement.steps is not None
    record = graphed.prefill_record(prompt(PROMPT, 1))
    states = [compiled.compress(record) for compiled in (graphed, asking)]
    ids = prompt(STEPS, 2)
    got, wanted = (stepped(compiled, state, ids) for compiled, state in zip((graphed, asking), states))
    apart = (got - wanted).abs().amax(1)  # where two scores are equal but for their rounding, either may be chosen
    assert float((apart < 2e-3).float().mean()) >= 0.9
    assert torch.equal(got.argmax(1), wanted.argmax(1))
    stats = [state.stats for state in states]
    for name in ("moved_bytes_per_step", "overlap", "peak_share", "device_share", "attended_share", "excess_share"):
        assert getattr(stats[0], name) == pytest.approx(getattr(stats[1], name), rel=2e-2, abs=1e-6), name
    assert states[0].nbytes["device"] == states[1].nbytes["device"]


@pytest.mark.parametrize("case", quick_ones(CASES, QUICK))
def test_a_graph_is_of_tensors_and_asks_the_host_nothing(whole, prompt, case):
    """It holds operators alone, and runs on tensors without numbers of another device: what asks for a number, makes a size of one, or
    brings tensors of two devices together fails there."""
    compiled = made(whole, case)
    state = compiled.prefill(prompt(PROMPT, 1))
    given = []
    steps = compiled.placement.steps
    plain, runs = steps.graphs.prepare, []

    def run(*inputs, behind):
        given.append((*inputs, *behind))
        return runs[0](*inputs, behind=behind)

    def prepare(module: GraphModule, anew: frozenset[int]):
        runs[:] = [plain(module, anew)]
        return run

    steps.graphs.prepare = prepare
    compiled.extend(state, prompt(1, 2))
    ((module, inputs),) = [(graph.module, given[0]) for graph in steps.graphs._graphs.values()]
    for node in module.graph.nodes:
        assert node.op in ("placeholder", "get_attr", "output", "call_function")
        if node.op == "call_function":
            assert isinstance(node.target, torch._ops.OpOverload) or node.target in (operator.getitem, mixed()), node
    check_on_another_device(module, inputs)


def mixed():
    from semkv.kernels.mixed_attention.dispatch import mixed_attention

    return mixed_attention


def check_on_another_device(module: GraphModule, inputs: tuple[Tensor, ...]) -> None:
    """Run `module` on tensors of a device that has no numbers."""
    with FakeTensorMode(allow_non_fake_inputs=False):
        there = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in inputs]
        held = {name: torch.empty(x.shape, dtype=x.dtype, device="cuda") for name, x in attributes(module).items()}
        for x in torch.fx.node.map_arg(
            torch.func.functional_call(plain_module(module), held, tuple(there)), lambda n: n
        ):
            assert x.device.type == "cuda"


def attributes(module: GraphModule) -> dict[str, Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def plain_module(module: GraphModule) -> GraphModule:
    """`module` with the operator in place of the function that answers it on a CPU."""
    from semkv.ir.graph import copy_graph_module
    from semkv.ir.ops import mixed_attention

    copy = copy_graph_module(module)
    for node in copy.graph.nodes:
        if node.target == mixed():
            node.target = mixed_attention
    copy.recompile()
    return copy


MISTAKES = {
    "asks for a number": lambda x: x * float(x.sum()),
    "a size of data": lambda x: x[x > 0],
    "a branch on data": lambda x: x if bool((x > 0).any()) else -x,
    "leaves the device": lambda x: x + torch.ones(1, dtype=torch.float32, device="cpu").expand(x.shape),
    "comes from the host": lambda x: x.cpu(),
    "counts what is there": lambda x: x[: int((x > 0).sum())],
    "nonzero": lambda x: torch.nonzero(x),
    "a list": lambda x: torch.tensor(x.tolist(), dtype=torch.float32, device="cuda"),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: torch.unique(x),
    "repeats by data": lambda x: x.repeat_interleave((x > 0).long()),
    "item of an index": lambda x: x[x.argmax().item()],
}


def stays(step, x):
    """`step` of x, on its device and of its size."""
    out = step(x)
    assert out.device.type == "cuda", "it left the device"
    assert out.shape == x.shape, "its size is another"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_caught(mistake):
    """Each would be a question to the host, or tensors of two devices, in a step on a GPU."""
    with FakeTensorMode(allow_non_fake_inputs=False):
        x = torch.empty(8, dtype=torch.float32, device="cuda")
        assert (x * 2).device.type == "cuda"
        with pytest.raises((RuntimeError, AssertionError)):
            stays(MISTAKES[mistake], x)


def test_traces_know_no_size_of_what_grows(whole, prompt):
    """A graph that was made of a short row serves a longer one."""
    compiled = made(whole, "sketch")
    long = compiled.prefill(prompt(1200, 3))
    short = compiled.prefill(prompt(PROMPT, 1))
    ids = prompt(4, 2)
    stepped(compiled, short, ids)
    count = len(compiled.placement.steps.graphs._graphs)
    got = stepped(compiled, long, ids)
    assert len(compiled.placement.steps.graphs._graphs) == count
    asking = eagerly(made(whole, "sketch"))
    wanted = stepped(asking, asking.prefill(prompt(1200, 3)), ids)
    torch.testing.assert_close(got, wanted, rtol=2e-3, atol=2e-3)


def test_a_trace_serves_every_size():
    """The control of the test above: a size in a trace is seen."""
    trace = make_fx(lambda x: x.flatten(0, 1) + 1, tracing_mode="fake")(torch.zeros(2, 3))
    with pytest.raises(RuntimeError):
        trace(torch.zeros(2, 4))
