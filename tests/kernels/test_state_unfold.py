"""`semkv::unfold_` against loops, bit for bit: what is wanted stays or comes, what is not goes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from semkv.errors import InputError
from semkv.ir import state_ops
from semkv.ir.state_ops import EMPTY
from semkv.kernels import calls
from semkv.kernels.cpp import compiler
from semkv.kernels.state import IN_CPP, REFERENCES
from semkv.kernels.state.reference import unfold_by
from semkv.kernels.state.unfold import waits_in_file
from semkv.runtime.store.quantization import quantize

NEEDS_COMPILER = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
FORMS = ["reference", pytest.param("cpp", marks=NEEDS_COMPILER)]
WRITTEN = ("k", "v", "positions", "slots", "k_scale", "v_scale")
FEW_SLOTS = {"units": 500, "places": 4000, "capacity": 13, "longest": 7}
"""So few that only what is looked at of the map of places is cleared."""
OPTIONAL = ("k_scale", "v_scale", "host_k_scale", "host_v_scale", "bounds", "order", "where")
KINDS = ["float32", "float16", "bfloat16", "codes", "codes to float32", "codes to float16", "codes to bfloat16"]


def unfolded(form, arguments) -> torch.Tensor:
    """Unfold by a form, in place: its name, or what does it."""
    if callable(form):
        return form(**arguments)
    if form == "reference":
        return REFERENCES["unfold_"](**arguments)
    asked = dict.fromkeys(OPTIONAL) | arguments
    call = IN_CPP["unfold_"].call(asked)
    assert call is not None
    return calls.run(call, asked)[0]


class Memory:
    """Slots and what waits, for B rows of H heads, M units and N places, C slots: `units[row]` of `tokens[row]` tokens are there, and
    behind them stand NaN and arbitrary bytes. table: "even", "bounds" or "order", per head or (`shared`) for all."""

    def __init__(
        self,
        rows=2,
        heads=2,
        units=9,
        places=40,
        capacity=12,
        dims=(8, 5),
        kind="float32",
        table="even",
        shared=False,
        where=False,
        longest=3,
        seed=0,
    ):
        self.generator = torch.Generator().manual_seed(seed)
        self.rows, self.heads, self.units, self.places, self.capacity = rows, heads, units, places, capacity
        self.tables = [[[] for _ in range(heads)] for _ in range(rows)]
        """Places of the tokens of each unit."""
        self.arguments = {"length": longest if table == "even" else 0}
        self._lay_out(table, 1 if shared else heads, longest)
        self._fill(kind, dims)
        self.arguments["shift"] = self._draw(0, 1000, rows)
        if where:
            self.arguments["where"] = self._draw(0, 1 << 30, rows, places).int()

    def _draw(self, low, high, *shape):
        return torch.randint(low, high, shape, generator=self.generator)

    def _lay_out(self, table, sharing, longest) -> None:
        start = self._draw(0, 4, self.rows) if table == "even" else torch.zeros(self.rows, dtype=torch.int64)
        bounds = self._draw(-(1 << 31), 1 << 31, self.rows, sharing, self.units + 1).int()
        order = self._draw(-(1 << 31), 1 << 31, self.rows, sharing, self.places).int()
        for row in range(self.rows):
            most = self.units if row == 0 else int(self._draw(0, self.units + 1, 1)) * (row != 1)
            for own in range(sharing):
                if table == "even":
                    there = range(max(0, min(most, (self.places - int(start[row])) // longest)))
                    lists = [[int(start[row]) + unit * longest + i for i in range(longest)] for unit in there]
                else:
                    lengths = self._draw(0, longest + 1, most)
                    edges = [0, *lengths.cumsum(0).clamp(max=max(0, self.places - 1)).tolist()]
                    edges = [
                        edge + int(table == "bounds" and self.places > 0) for edge in edges
                    ]  # there may be others before the first
                    bounds[row, own, : len(edges)] = torch.tensor(edges)
                    token = torch.randperm(self.places, generator=self.generator)
                    order[row, own, : edges[-1]] = token[: edges[-1]].int()
                    tokens = token.tolist() if table == "order" else list(range(self.places))
                    lists = [tokens[edges[unit] : edges[unit + 1]] for unit in range(most)]
                for head in range(self.heads) if sharing == 1 else [own]:
                    self.tables[row][head] = lists
        self.arguments["start"] = start
        if table != "even":
            self.arguments["bounds"] = bounds
        if table == "order":
            self.arguments["order"] = order

    def _fill(self, kind, dims) -> None:
        waits, _, stays = kind.partition(" to ")
        used = torch.zeros(self.rows, self.heads, self.places, 1, dtype=torch.bool)
        for row in range(self.rows):
            for head in range(self.heads):
                used[row, head, [place for unit in self.tables[row][head] for place in unit]] = True
        for name, width in zip("kv", dims):
            x = torch.randn(self.rows, self.heads, self.places, width, generator=self.generator) * 5
            shape = (self.rows, self.heads, self.capacity, width)
            if waits == "codes":
                packed = quantize(x, 8)
                wild = self._draw(0, 256, *x.shape).byte()
                self.arguments[f"host_{name}"] = torch.where(used, packed.codes, wild)
                self.arguments[f"host_{name}_scale"] = torch.where(used, packed.scale, torch.nan)
            else:
                self.arguments[f"host_{name}"] = torch.where(used, x, torch.nan).to(getattr(torch, waits))
            self.arguments[name] = torch.zeros(
                shape, dtype=torch.uint8 if kind == "codes" else getattr(torch, stays or waits)
            )
            if kind == "codes":
                self.arguments[f"{name}_scale"] = torch.zeros(*shape[:3], 1, dtype=torch.float16)
        shape = (self.rows, self.heads, self.capacity)
        self.arguments["positions"] = torch.full(shape, EMPTY, dtype=torch.int32)
        self.arguments["slots"] = torch.full(shape, -1, dtype=torch.int32)

    def choice(self, full=0.7) -> torch.Tensor:
        """Units that fit the slots, at random; nothing of what does not exist."""
        chosen = torch.zeros(self.rows, self.heads, self.units, dtype=torch.bool)
        for row in range(self.rows):
            for head in range(self.heads):
                lists, left = self.tables[row][head], self.capacity
                for unit in torch.randperm(len(lists), generator=self.generator).tolist():
                    if len(lists[unit]) <= left and torch.rand((), generator=self.generator) < full:
                        chosen[row, head, unit] = True
                        left -= len(lists[unit])
        return chosen

    def copy(self) -> dict:
        return {name: x.clone() if name in WRITTEN else x for name, x in self.arguments.items()}

    def by_loops(self, arguments, chosen) -> torch.Tensor:
        """`unfold_`, in place."""
        counts = torch.zeros(self.rows, 2, dtype=torch.int64)
        slots, positions = arguments["slots"], arguments["positions"]
        for row in range(self.rows):
            for head in range(self.heads):
                lists = self.tables[row][head]
                wanted = [place for unit in range(len(lists)) if chosen[row, head, unit] for place in lists[unit]]
                held = slots[row, head].tolist()
                free = [slot for slot, place in enumerate(held) if place not in wanted]
                missing = [place for place in wanted if place not in held]
                for slot in free:
                    slots[row, head, slot], positions[row, head, slot] = -1, EMPTY
                counts[row] += torch.tensor([len(missing), self.capacity - len(free)])
                for slot, place in zip(free, missing):
                    slots[row, head, slot] = place
                    own = place + int(arguments["shift"][row])
                    positions[row, head, slot] = int(arguments["where"][row, place]) if "where" in arguments else own
                    for name in "kv":
                        x, scale = arguments[f"host_{name}"][row, head, place], arguments.get(f"host_{name}_scale")
                        if f"{name}_scale" in arguments:
                            arguments[f"{name}_scale"][row, head, slot] = scale[row, head, place]
                        elif scale is not None:
                            x = (x.float() - 128) * scale[row, head, place].float()
                        arguments[name][row, head, slot] = x
        return counts


def same(one, other) -> None:
    for name in WRITTEN:
        if name in one:
            assert torch.equal(one[name], other[name]), name
            assert not one[name].is_floating_point() or one[name].isfinite().all()


def check(memory: Memory, form: str, steps: int = 4) -> None:
    """Several choices one after the other; the last two are alike."""
    own, twin = memory.copy(), memory.copy()
    chosen = memory.choice()
    for step in range(steps):
        if step + 1 < steps:
            new = memory.choice()
            chosen = torch.where(torch.rand(new.shape[:2], generator=memory.generator)[..., None] < 0.2, chosen, new)
        counts = unfolded(form, own | {"chosen": chosen})
        assert torch.equal(counts, memory.by_loops(twin, chosen))
        same(twin, own)
    assert counts[:, 0].sum() == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("table", ["even", "bounds", "order"])
def test_slots_hold_what_is_chosen(table, kind, form):
    for shared, where in ((False, False), (True, True)):
        check(Memory(rows=3, kind=kind, table=table, shared=shared, where=where, dims=(16, 35)), form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("table", ["even", "bounds", "order"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"units": 1, "places": 1, "capacity": 1, "longest": 1, "heads": 1, "rows": 1},
        {"units": 63, "places": 64, "capacity": 64, "longest": 1},
        {"units": 111, "places": 129, "capacity": 63, "longest": 1, "dims": (60, 1)},
        {"units": 5, "places": 700, "capacity": 400, "longest": 130, "rows": 3},
        {"units": 70, "places": 333, "capacity": 111, "longest": 5, "heads": 3},
        {"units": 4, "places": 5, "capacity": 9, "longest": 6},
        FEW_SLOTS,
        {"units": 120, "places": 9001, "capacity": 69, "longest": 67},
        {"units": 0, "places": 5, "capacity": 3},
        {"units": 3, "places": 0, "capacity": 3},
        {"units": 3, "places": 20, "capacity": 0},
        {"units": 3, "places": 20, "capacity": 4, "heads": 0},
    ],
    ids=str,
)
def test_odd_sizes(sizes, table, form):
    check(Memory(table=table, **sizes), form)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    sizes=st.fixed_dictionaries(
        {
            "rows": st.integers(1, 3),
            "heads": st.integers(1, 2),
            "units": st.integers(1, 80),
            "places": st.integers(2, 90),
            "capacity": st.integers(0, 30),
            "longest": st.integers(1, 7),
            "table": st.sampled_from(["even", "bounds", "order"]),
            "shared": st.booleans(),
            "where": st.booleans(),
            "kind": st.sampled_from(KINDS),
            "dims": st.tuples(st.integers(1, 20), st.integers(1, 20)),
        }
    ),
)
def test_any_sizes(seed, sizes):
    for form in ("reference", "cpp") if compiler() is not None else ("reference",):
        check(Memory(seed=seed, **sizes), form, steps=3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("table", "where"), [("even", False), ("order", True)])
def test_a_gpu_copies_what_comes_and_reads_nothing_else(on_device, table, where, kind):
    """Places that are not wanted hold NaN; slots keep what they held."""
    pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')
    from semkv.kernels.state.there import copy_there

    def copy(host, host_scale, into, scale, source, copied):
        written = on_device(copy_there, host, host_scale, into, scale, source, copied)
        for x, there in zip((into, scale), written, strict=True):
            assert x is None or x.copy_(there) is x

    memory = Memory(rows=2, kind=kind, table=table, where=where, dims=(16, 35), capacity=37, places=90, units=21)
    own, twin = memory.copy(), memory.copy()
    for _ in range(3):
        chosen = memory.choice()
        counts = unfold_by(copy, **own, chosen=chosen)
        assert torch.equal(counts, memory.by_loops(twin, chosen))
        same(twin, own)


@pytest.mark.parametrize("form", FORMS)
def test_what_stays_stays_where_it_is(form):
    memory = Memory(rows=1, heads=1, units=6, places=12, capacity=6, longest=2)
    own, at = memory.copy(), int(memory.arguments["start"][0])
    for chosen, slots, counts in (
        ([0, 3], [0, 1, 6, 7, -1, -1], [4, 0]),
        ([3], [-1, -1, 6, 7, -1, -1], [0, 2]),
        ([1, 3, 4], [2, 3, 6, 7, 8, 9], [4, 2]),
        ([0, 1, 4], [2, 3, 0, 1, 8, 9], [2, 4]),
        ([], [-1] * 6, [0, 0]),
    ):
        mask = torch.zeros(1, 1, 6, dtype=torch.bool)
        mask[..., chosen] = True
        assert unfolded(form, own | {"chosen": mask}).tolist() == [counts]
        expected = [place + at if place >= 0 else -1 for place in slots]
        assert own["slots"].flatten().tolist() == expected


@pytest.mark.parametrize("form", FORMS)
def test_tensors_may_be_parts_of_larger_ones(form):
    for kind in ("float32", "codes", "codes to bfloat16"):
        memory = Memory(kind=kind, table="order", where=True)
        own = {}
        for name, x in memory.arguments.items():
            own[name] = x
            if isinstance(x, torch.Tensor) and x.dim() > 1:
                wide = torch.zeros([size + 2 for size in x.shape], dtype=x.dtype)
                own[name] = wide[tuple(slice(1, -1) for _ in x.shape)]
                own[name].copy_(x)
        memory.arguments = own
        twin, chosen = memory.copy(), memory.choice()
        counts = unfolded(form, own | {"chosen": chosen})
        assert torch.equal(counts, memory.by_loops(twin, chosen))
        same(twin, own)


@pytest.mark.parametrize("form", FORMS)
def test_where_there_are_too_few_slots_the_last_tokens_are_left_out(form):
    for table in ("even", "bounds", "order"):
        memory = Memory(capacity=5, table=table, rows=1)
        chosen = torch.zeros(1, 2, 9, dtype=torch.bool)
        for head in range(2):
            chosen[0, head, : len(memory.tables[0][head])] = True
        own, twin = memory.copy(), memory.copy()
        counts = unfolded(form, own | {"chosen": chosen})
        memory.by_loops(twin, chosen)
        same(twin, own)
        assert counts.tolist() == [[10, 0]]


@NEEDS_COMPILER
def test_threads_change_nothing():
    for table in ("even", "order"):
        memory = Memory(units=3000, places=9000, capacity=4500, table=table, dims=(64, 32), kind="codes to float32")
        choices = [memory.choice(0.5) for _ in range(3)]
        before, results = torch.get_num_threads(), []
        for form, threads in (("reference", 1), ("cpp", 1), ("cpp", 2)):
            torch.set_num_threads(threads)
            own = memory.copy()
            counts = [unfolded(form, own | {"chosen": chosen}) for chosen in choices]
            results.append([*counts, *(own[name] for name in WRITTEN if name in own)])
        torch.set_num_threads(before)
        assert all(map(torch.equal, results[0], results[1]))
        assert all(map(torch.equal, results[1], results[2]))


@NEEDS_COMPILER
def test_what_stands_in_results_and_scratch_before_does_not_matter(monkeypatch):
    def filled(*shape, dtype, device):
        x = torch.zeros(*shape, dtype=dtype, device=device)
        x.view(torch.uint8).fill_(255)
        return x

    monkeypatch.setattr(calls, "torch", SimpleNamespace(**(vars(torch) | {"empty": filled})))
    for table in ("even", "bounds", "order"):
        check(Memory(units=70, places=333, capacity=111, longest=5, table=table), "cpp")
        check(Memory(**FEW_SLOTS, table=table), "cpp", steps=8)


@NEEDS_COMPILER
@pytest.mark.parametrize("kind", ["float32", "codes"])
def test_what_waits_may_wait_in_a_file(kind, tmp_path):
    memory = Memory(units=300, places=900, capacity=200, kind=kind, dims=(128, 64))
    for name in ("host_k", "host_v", "host_k_scale", "host_v_scale"):
        if name in memory.arguments:
            x = memory.arguments[name]
            stored = torch.from_file(
                str(tmp_path / name), shared=True, size=x.numel(), dtype=x.dtype, device="cpu"
            ).view(x.shape)
            memory.arguments[name] = stored.copy_(x)
    assert waits_in_file(memory.arguments) == {"in_file": True}
    check(memory, "cpp")


@pytest.mark.parametrize("kind", ["float32", "codes", "codes to float16"])
def test_the_operator_is_as_its_schema_says(kind):
    memory = Memory(kind=kind, table="order", where=True)
    own, twin, chosen = memory.copy(), memory.copy(), memory.choice()
    whole = {name: x.nan_to_num() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in own.items()}
    asked = whole | {"chosen": chosen}
    torch.library.opcheck(state_ops.unfold_, (), asked, test_utils=("test_schema", "test_faketensor"))
    assert torch.equal(state_ops.unfold_(**own, chosen=chosen), memory.by_loops(twin, chosen))
    same(twin, own)


@pytest.mark.parametrize("table", ["even", "bounds", "order"])
@pytest.mark.parametrize("kind", ["float32", "codes", "codes to float16"])
def test_the_reference_is_traced_without_numbers(table, kind):
    memory = Memory(table=table, kind=kind, where=table == "order")
    own = memory.copy() | {"chosen": memory.choice()}
    length = own.pop("length")
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) for name, x in own.items()}
        assert REFERENCES["unfold_"](**fake, length=length).shape == (2, 2)

    graph = make_fx(lambda asked: REFERENCES["unfold_"](**asked, length=length), tracing_mode="fake")(own)
    twin = memory.copy()
    own = {name: x for name, x in memory.copy().items() if name != "length"}
    for _ in range(3):
        chosen = memory.choice()
        assert torch.equal(graph(own | {"chosen": chosen}), memory.by_loops(twin, chosen))
        same(twin, own)


@pytest.mark.parametrize("change", [{"k": torch.float16}, {"host_v": torch.uint8}])
def test_numbers_of_another_dtype_are_refused(change):
    memory = Memory()
    (name, dtype), *_ = change.items()
    own = memory.copy() | {"chosen": memory.choice()}
    own[name] = own[name].nan_to_num().to(dtype)
    with pytest.raises(InputError, match="expected the same dtype, or codes uint8 with scales"):
        state_ops.unfold_(**own)
