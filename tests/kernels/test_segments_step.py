"""A whole decode step as one call: layers with memories that they write, beside their nodes one by one."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from semkv.ir import ops, state_ops
from semkv.ir.state_ops import EMPTY
from semkv.kernels.cpp import compiler
from semkv.kernels.segments import whole
from semkv.runtime.store.quantization import quantize

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.usefixtures("nothing_is_written_by_luck"),
]
LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, VOCABULARY = 3, 136, 6, 2, 24, 211
LENGTH, WINDOW, SLOTS, STAGES = 4, 16, 24, 2
NONE = float("-inf")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- state -------------------------------------------------------------------------------------------------------------


def state_of(rows: int, units: int, seed: int, *, garbage: float = math.nan) -> dict[str, Tensor]:
    """One layer's: a window of codes, slots of codes, `units` that wait as codes with an index of codes; then as many places without a
    unit, which hold garbage."""
    places = 2 * units
    k, v = (quantize(drawn(rows, KV_HEADS, places * LENGTH, DIM, seed=seed + n), 8) for n in range(2))
    index = quantize(drawn(rows, KV_HEADS, places, DIM, seed=seed + 2), 8)
    index.scale[:, :, units:] = garbage

    def room(tokens: int) -> dict[str, Tensor]:
        codes = torch.full((rows, KV_HEADS, tokens, DIM), 128, dtype=torch.uint8)
        scale = torch.ones(rows, KV_HEADS, tokens, 1, dtype=torch.float16)
        return {"k": codes, "v": codes.clone(), "k_scale": scale, "v_scale": scale.clone()}

    return {
        **{f"recent.{name}": x for name, x in room(WINDOW).items()},
        "recent.positions": torch.full((rows, 1, WINDOW), EMPTY, dtype=torch.int32),
        **{f"slots.{name}": x for name, x in room(SLOTS).items()},
        "slots.positions": torch.full((rows, KV_HEADS, SLOTS), EMPTY, dtype=torch.int32),
        "slots.places": torch.full((rows, KV_HEADS, SLOTS), -1, dtype=torch.int32),
        "waiting.k": k.codes,
        "waiting.v": v.codes,
        "waiting.k_scale": k.scale,
        "waiting.v_scale": v.scale,
        "index.codes": index.codes,
        "index.scale": index.scale,
        "rest.codes": torch.randint(
            0, 256, (rows, KV_HEADS, places, STAGES), generator=torch.Generator().manual_seed(seed)
        ).byte(),
        "mean.k": drawn(rows, KV_HEADS, places, DIM, seed=seed + 3).half(),
        "mean.v": drawn(rows, KV_HEADS, places, DIM, seed=seed + 4).half(),
        "mean.positions": torch.arange(places, dtype=torch.int32).expand(rows, 1, places).contiguous() * LENGTH,
        "sizes": torch.full((rows, places), LENGTH, dtype=torch.int32),
    }


NAMES = tuple(state_of(1, 1, 0))
WRITTEN = [name for name in NAMES if name.startswith(("recent", "slots"))]


def grown(state: dict[str, Tensor], more: int) -> dict[str, Tensor]:
    """The same with room for more units and their tokens."""
    made = {}
    for name, x in state.items():
        along = -1 if name in ("mean.positions", "sizes") else 2
        room = list(x.shape)
        room[along] = more * LENGTH if name.startswith("waiting") else more
        own = name.startswith(("waiting", "index", "rest", "mean")) or name == "sizes"
        made[name] = torch.cat([x, x.new_zeros(room)], along) if own else x
    return made


# -- a step ------------------------------------------------------------------------------------------------------------


def look(layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, numbers: Tensor, own: dict[str, Tensor]):
    """A layer's part in a step, of operators on its memory alone. q [B, Hq, 1, D] -> [B, Hq, 1, D], and what they found."""
    at, count, room, start = numbers.unbind(0)
    parts = ("k", "v", "positions", "k_scale", "v_scale")
    recent, slots = ([own[f"{name}.{part}"] for part in parts] for name in ("recent", "slots"))
    state_ops.append_(*recent[:3], k, v, positions, at, *recent[3:])
    asked = q.view(q.shape[0], KV_HEADS, HEADS // KV_HEADS, DIM)
    logits = state_ops.products(asked, own["index.codes"], own["index.scale"], 8)
    score, mass = state_ops.scores(logits, count)
    chosen, each = state_ops.choose_each(score, count, room)
    waiting = [own[f"waiting.{part}"] for part in ("k", "v", "k_scale", "v_scale")]
    moved = state_ops.unfold_(
        *slots[:3], own["slots.places"], chosen, *waiting[:2], start, start * 0, LENGTH, *slots[3:], *waiting[2:]
    )
    found = state_ops.look_up(layer.tables.expand(q.shape[0], -1, -1, -1, -1), own["rest.codes"])
    value, rest = state_ops.coarse_attention(
        found, mass, chosen, count, own["rest.codes"], layer.books, layer.average, 0.0, each
    )
    number = torch.ones_like(own["sizes"], dtype=torch.int64).cumsum(-1)
    hidden = (number > count[:, None]) | chosen.any(1)
    bias = own["sizes"].float().log().masked_fill(hidden, NONE)[:, None, None]
    return (
        ops.mixed_attention(
            q,
            positions,
            [recent[0], slots[0], own["mean.k"]],
            [recent[1], slots[1], own["mean.v"]],
            [recent[2], slots[2], own["mean.positions"]],
            [None, None, bias],
            None,
            [recent[3], slots[3], None],
            [recent[4], slots[4], None],
            scale=DIM**-0.5,
        ),
        (moved, value, rest, chosen.sum(-1)),
    )


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = HEADS * DIM
        self.q, self.k, self.v = (nn.Linear(HIDDEN, n) for n in (width, KV_HEADS * DIM, KV_HEADS * DIM))
        self.out, self.up, self.gate = (
            nn.Linear(n, m, bias=False) for n, m in ((width, HIDDEN), (HIDDEN, 192), (HIDDEN, 192))
        )
        self.down = nn.Linear(192, HIDDEN)
        self.before, self.after = (nn.Parameter(1 + 0.1 * drawn(HIDDEN, seed=n)) for n in (5, 6))
        group = HEADS // KV_HEADS
        self.tables = nn.Parameter(drawn(1, KV_HEADS, group, STAGES, 256, seed=7))
        self.books, self.average = (
            nn.Parameter(drawn(KV_HEADS, STAGES, 256, DIM, seed=8)),
            nn.Parameter(drawn(KV_HEADS, DIM, seed=9)),
        )

    def forward(self, x, turned, positions, numbers, own):
        def heads(y: Tensor) -> Tensor:
            return y.view(*y.shape[:2], -1, DIM).transpose(1, 2)

        def rotated(y: Tensor) -> Tensor:
            return y * turned[0] + torch.cat([-y[..., DIM // 2 :], y[..., : DIM // 2]], -1) * turned[1]

        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.before
        q, k, v = (heads(ops.linear(y, own_.weight, own_.bias)) for own_ in (self.q, self.k, self.v))
        seen, told = look(self, rotated(q), rotated(k), v, positions, numbers, own)
        x = x + ops.linear(seen.transpose(1, 2).flatten(2), self.out.weight)
        y = F.layer_norm(x, (HIDDEN,), self.after)
        gated = F.silu(ops.linear(y, self.gate.weight)) * ops.linear(y, self.up.weight)
        return x + ops.linear(gated, self.down.weight, self.down.bias), told


class Model(nn.Module):
    """(ids int64 [B, 1], positions int64 [B, 1], numbers int64 [layers, 4, B], *state) -> (logits, *what each layer found)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.register_buffer("speeds", 100.0 ** (-torch.arange(0, DIM, 2) / DIM))

    def forward(self, ids, positions, numbers, *state):
        x = self.embedding(ids)
        angles = (positions[:, None, :, None].float() * self.speeds).repeat(1, 1, 1, 2)
        turned, told = (angles.cos(), angles.sin()), []
        for n, layer in enumerate(self.layers):
            own = dict(zip(NAMES, state[n * len(NAMES) : (n + 1) * len(NAMES)]))
            x, more = layer(x, turned, positions, numbers[n], own)
            told += more
        return self.head(F.layer_norm(x, (HIDDEN,))), torch.stack(told[::4]), *told


class Conversation:
    """Rows of a batch that take one token after the other."""

    def __init__(self, rows: int, units: int = 9) -> None:
        self.rows, self.units, self.steps = rows, units, 0
        self.state = [state_of(rows, units, 10 * n) for n in range(LAYERS)]

    def inputs(self) -> list[Tensor]:
        row = torch.arange(self.rows)
        count = torch.clamp(self.units - 3 - 2 * row, min=0) + self.steps // 7
        step = torch.stack([row + self.steps, count, torch.full_like(row, SLOTS // LENGTH - 1) - row, row * 0])
        ids = (7 * self.steps + 13 * row[:, None] + 5) % VOCABULARY
        state = [x for own in self.state for x in own.values()]
        return [ids, 1000 + self.steps + row[:, None], step.expand(LAYERS, -1, -1).contiguous(), *state]

    def run(self, step, steps: int) -> list[tuple[Tensor, ...]]:
        made = []
        with torch.no_grad():
            for _ in range(steps):
                made.append(step(*self.inputs()))
                self.steps += 1
        return made

    def grow(self, more: int) -> None:
        self.state = [grown(own, more) for own in self.state]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model().eval()


def traced(model: nn.Module, rows: int) -> GraphModule:
    with torch.no_grad():
        return make_fx(model, tracing_mode="fake", _allow_non_fake_inputs=True)(*Conversation(rows).inputs())


@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_is_one_call(model, rows):
    """Twenty steps, between which units come and room is made: outputs and what is written as node by node."""
    module = traced(model, rows)
    step, plain, own = whole(module), Conversation(rows), Conversation(rows)
    for more in (0, 5, 0, 3):
        for conversation in (plain, own):
            conversation.grow(more)
        for expected, found in zip(plain.run(module, 5), own.run(step, 5)):
            assert step.reason is None
            for one, other in zip(found, expected, strict=True):
                assert one.dtype == other.dtype
                torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)
    assert int(expected[1].sum()) > 0
    for one, other in zip(own.state, plain.state):
        for name in WRITTEN:
            if one[name].dtype == torch.uint8:  # a number between two codes may be either
                assert int((one[name].int() - other[name].int()).abs().max()) <= 1
            else:
                torch.testing.assert_close(one[name], other[name], rtol=2e-3, atol=1e-6)
    assert len(step._known.tapes) == 3


def test_threads_change_no_bit(model):
    step, before, made = whole(traced(model, 3)), torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        own = Conversation(3, units=40)
        made.append([x for found in own.run(step, 6) for x in found] + [x for part in own.state for x in part.values()])
    torch.set_num_threads(before)
    assert step.reason is None
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


class Looking(nn.Module):
    """Operators on memories alone, which are the same functions within a graph and without one."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.layers = model.layers

    def forward(self, q, positions, numbers, *state):
        found = []
        for n, layer in enumerate(self.layers):
            own = dict(zip(NAMES, state[n * len(NAMES) : (n + 1) * len(NAMES)]))
            q, told = look(layer, q, q[:, :KV_HEADS], q[:, KV_HEADS : 2 * KV_HEADS], positions, numbers[n], own)
            found += [q, *told]
        return found


@pytest.mark.parametrize("rows", [1, 3])
def test_the_same_functions_give_the_same_bits(model, rows):
    asked = drawn(rows, HEADS, 1, DIM, seed=3)

    def inputs(conversation: Conversation) -> list[Tensor]:
        _, *rest = conversation.inputs()
        return [asked + conversation.steps, *rest]

    looking = Looking(model)
    with torch.no_grad():
        module = make_fx(looking, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs(Conversation(rows)))
        step, plain, own = whole(module), Conversation(rows), Conversation(rows)
        for _ in range(8):
            expected, found = module(*inputs(plain)), step(*inputs(own))
            assert step.reason is None
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
            plain.steps, own.steps = plain.steps + 1, own.steps + 1
    for one, other in zip(own.state, plain.state):
        assert all(torch.equal(one[name], other[name]) for name in WRITTEN)


def test_inputs_are_looked_at_again_where_they_changed(model):
    """Other tensors, the same ones with other numbers behind them, and of another size or dtype."""
    step, own = whole(traced(model, 1)), Conversation(1)
    own.run(step, 1)
    tape = step._last.tape
    state = own.state[0]
    state["mean.k"] = state["mean.k"].clone()
    state["mean.v"].data = state["mean.v"].clone()
    expected = Conversation(1)
    expected.run(step, 1)
    for one, other in zip(own.run(step, 2)[-1], expected.run(step, 2)[-1], strict=True):
        assert torch.equal(one, other)
    assert step._last.tape is tape
    state["mean.k"].data = torch.cat([state["mean.k"]] * 2, 2)[
        :, :, : state["mean.k"].shape[2]
    ]  # the same size, other strides
    state["mean.v"].data = state["mean.v"].float()
    own.run(step, 1)
    assert step._last.tape is not tape
    assert step.reason is None


def test_state_is_not_kept_alive(model):
    step, own = whole(traced(model, 1)), Conversation(1)
    own.run(step, 1)
    seen = weakref.ref(own.state[0]["waiting.k"])
    del own
    assert seen() is None


def test_a_node_that_is_not_known_is_named(model):
    class Sorted(nn.Module):
        def forward(self, *inputs):
            logits, *rest = model(*inputs)
            return logits.sort(-1)[0], *rest

    module = traced(Sorted(), 1)
    step = whole(module)
    expected, found = Conversation(1).run(module, 1)[0], Conversation(1).run(step, 1)[0]
    assert "aten.sort.default" in step.reason
    for one, other in zip(found, expected, strict=True):  # what lies before it is a call all the same
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)


def test_a_call_that_is_not_described_says_why(model):
    step, own = whole(traced(model, 1)), Conversation(1)
    for state in own.state:
        state["recent.positions"] = state["recent.positions"].long()
    own.run(step, 1)
    assert "append_" in step.reason
    assert "expected torch.int32" in step.reason
