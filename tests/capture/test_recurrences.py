"""Modules with recurrent states: how they are found, what is proven of them, and the graphs of what they compute."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers.cache_utils import DynamicCache

import semkv
from semkv.capture.export import capture
from semkv.capture.recurrence import find_recurrences
from semkv.capture.recurrent_bodies import same_pieces, trace_pieces
from semkv.capture.recurrent_proof import LENGTH, ROWS, check_pieces, prove
from semkv.capture.recurrent_sites import CACHE, Site, find_sites
from semkv.capture.state_cache import Key, StateCache, cache_kind, keeps_states
from semkv.errors import CaptureError
from semkv.ir.recurrence import TOKENS, Form
from tests.hybrids import Alone, difference, hybrid, ids

WIDTH = 6


class Decaying(nn.Module):
    """A running sum that forgets, and what it makes of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.read, self.write = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def decay(self, state, x):
        return 0.9 * state + x

    def forward(self, x, cache=None):
        state = None if cache is None else cache.get_recurrent_state(0)
        state = x.new_zeros(x.shape[0], WIDTH) if state is None else state
        made = []
        for token in self.read(x).unbind(1):
            state = self.decay(state, token)
            made.append(state)
        if cache is not None:
            cache.update_recurrent_state(state, 0)
        return self.write(torch.stack(made, 1))


class LooksAhead(Decaying):
    def forward(self, x, cache=None):
        return super().forward(x, cache) + x.mean(1, keepdim=True)


class MixesRows(Decaying):
    def forward(self, x, cache=None):
        return super().forward(x + 0.1 * x.sum(0), cache)


class Forgets(Decaying):
    """It ignores the state that it is given, whatever the number of tokens."""

    def forward(self, x, cache=None):
        if cache is not None:
            cache.given = None
        return super().forward(x, cache)


class ForgetsBetweenTurns(Decaying):
    """It reads its state where one token follows others, and begins anew where several do."""

    def forward(self, x, cache=None):
        if cache is not None and x.shape[1] > 1:
            cache.given = None
        return super().forward(x, cache)


class Random(Decaying):
    def forward(self, x, cache=None):
        return super().forward(x, cache) + torch.rand(x.shape)


class BeginsElsewhere(Decaying):
    """Its first state is not zero."""

    def forward(self, x, cache=None):
        if cache is not None and not cache.has_previous_state(0):
            x = torch.cat([x[:, :1] + 1, x[:, 1:]], 1)
        return super().forward(x, cache)


class OtherForOne(Decaying):
    """One token behind others goes through other code, which rounds much more."""

    def forward(self, x, cache=None):
        made = super().forward(x, cache)
        return made * 1.01 if x.shape[1] == 1 and cache is not None and cache.has_previous_state(0) else made


class FarOffForOne(OtherForOne):
    def forward(self, x, cache=None):
        made = super().forward(x, cache)
        return made * 2 if x.shape[1] == 1 else made


class BranchesOnValues(Decaying):
    def forward(self, x, cache=None):
        made = super().forward(x, cache)
        return made if float(made.sum()) > 0 else -made


def site_of(module: nn.Module) -> Site:
    leaves, spec = pytree.tree_flatten(((None,), {"cache": CACHE}))
    _, out_spec = pytree.tree_flatten(torch.zeros(1))
    form = Form((WIDTH,), torch.float32)
    return Site(
        name="layer.mixer",
        module=module.eval(),
        config=None,
        kind=StateCache,
        keys=[Key(0, "recurrent", 0)],
        inputs=(form,),
        states=(form,),
        outputs=(form,),
        leaves=leaves,
        spec=spec,
        places=[0],
        returned=[True],
        out_spec=out_spec,
        weights=dict(module.named_parameters()),
    )


def text() -> list[torch.Tensor]:
    return [torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2))]


@torch.no_grad()
def test_what_goes_on_from_its_state_is_run_in_pieces():
    site = site_of(Decaying())
    proof = prove(site, text())
    assert (proof.tokens, proof.first) == (TOKENS, False)
    pieces = trace_pieces(site, TOKENS[:5], first=proof.first)
    check_pieces(site, pieces, text())
    for length in (1, 2, 5, 19, 37):
        mine = pieces([x[:, :length] for x in text()], None, list(site.weights.values()))
        for x, y in zip(
            (*mine[0], *mine[1]), (y for made in site.run([x[:, :length] for x in text()], None) for y in made)
        ):
            assert difference(x, y) < 1e-5


@pytest.mark.parametrize("length", range(1, 40))
def test_no_piece_behind_others_is_of_a_single_token(length):
    pieces = trace_pieces(site_of(Decaying()), (1,), first=False)
    pieces.graphs |= dict.fromkeys(TOKENS[1:])
    cut = list(pieces._cut(length))
    assert sum(cut) == length
    assert length == 1 or 1 not in cut


@torch.no_grad()
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (LooksAhead, "is not causal"),
        (MixesRows, "mixes rows"),
        (Forgets, "does not go on from its states"),
        (Random, "gives something else each time"),
        (BeginsElsewhere, "does not begin with states of zeros"),
        (FarOffForOne, "makes of one token after others something else than of several"),
    ],
)
def test_what_cannot_be_run_apart_is_refused(module, reason):
    with pytest.raises(CaptureError, match=f"layer.mixer .{module.__name__}. {reason}"):
        prove(site_of(module()), text())


@torch.no_grad()
def test_what_forgets_between_turns_runs_one_token_at_a_time():
    site = site_of(ForgetsBetweenTurns())
    proof = prove(site, text())
    assert proof.tokens == (1,)
    assert proof.reason == "runs one token at a time: its code for several does not go on from states"
    pieces = trace_pieces(site, proof.tokens, first=proof.first)
    check_pieces(site, pieces, text())


@torch.no_grad()
def test_a_models_own_difference_for_one_token_is_kept_and_said():
    site = site_of(OtherForOne())
    proof = prove(site, text())
    assert proof.first
    assert "its own code for one token differs from that for several by 1e-02" in proof.reason
    pieces = trace_pieces(site, TOKENS[:5], first=proof.first)
    first, weights = [x[:, :1] for x in text()], list(site.weights.values())
    (alone,), states = pieces(first, None, weights)
    (behind,), _ = pieces(first, [torch.zeros_like(x) for x in states], weights)
    assert difference(behind, alone) > 5e-3


@torch.no_grad()
def test_graphs_of_code_that_branches_on_values_are_refused():
    with pytest.raises(CaptureError, match=r"layer\.mixer .BranchesOnValues. cannot be captured over 1 tokens"):
        trace_pieces(site_of(BranchesOnValues()), (1,), first=False)


@torch.no_grad()
def test_graphs_that_compute_something_else_are_refused():
    site = site_of(Decaying())
    pieces = trace_pieces(site, TOKENS[:5], first=False)
    site.module.decay = lambda state, x: 0.8 * state + x
    with pytest.raises(CaptureError, match="its graphs do not compute what it does over 150 tokens"):
        check_pieces(site, pieces, text())


@torch.no_grad()
def test_bodies_are_the_same_where_their_graphs_are():
    one, two = (trace_pieces(site_of(Decaying()), (1, 2), first=False) for _ in range(2))
    assert same_pieces(one, two)
    other = Decaying()
    other.decay = lambda state, x: 0.8 * state + x
    assert not same_pieces(one, trace_pieces(site_of(other), (1, 2), first=False))


def test_sites_are_the_innermost_modules_that_touch_states():
    model = hybrid("Lfm2")
    assert keeps_states(model)
    sites = find_sites(model)
    assert [site.name for site in sites] == ["model.layers.0.conv", "model.layers.2.conv"]
    assert sites[0].states == (Form((32, 5), torch.float32),)
    assert not keeps_states(nn.Linear(2, 2))


def test_a_cache_of_a_models_own_gives_its_states():
    class Own(DynamicCache):
        def get_memory(self, layer):
            raise AssertionError("it is replaced")

        def set_memory(self, layer, state):
            raise AssertionError("it is replaced")

    touched: list[Key] = []
    kind = cache_kind(Own)
    assert issubclass(kind, Own)
    cache = kind(None, None, touched.append)
    assert cache.get_memory(3) is None
    cache.set_memory(3, torch.ones(2))
    key = Key(3, "memory", 0)
    assert touched == [key, key]
    assert torch.equal(cache.get_memory(3), torch.ones(2))
    assert torch.equal(kind(None, {key: torch.zeros(2)}).get_memory(3), torch.zeros(2))
    assert cache_kind(DynamicCache) is StateCache is cache_kind(int)


def test_a_model_that_needs_another_cache_is_refused(monkeypatch):
    def fails(self, layer_idx, state_idx=0):
        raise TypeError("it wants a cache of its own")

    model = hybrid("Lfm2")
    monkeypatch.setattr(StateCache, "get_conv_state", fails)
    with pytest.raises(
        CaptureError, match=r"does not run on a cache that watches them .TypeError: it wants a cache of its own"
    ):
        find_sites(model)


def test_states_that_are_kept_elsewhere_are_no_sites():
    """They are left to the dependence analysis, which refuses what mixes tokens."""
    model = hybrid("RecurrentGemma")
    assert keeps_states(model)
    assert find_recurrences(model).sites == ()


def test_layers_of_one_code_share_their_graphs_and_the_model_is_as_it_was():
    model = hybrid("Lfm2")
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    found = find_recurrences(model)
    assert found.bodies[0] is found.bodies[1]
    with found.opaque():
        assert "forward" in vars(model.model.layers[0].conv)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


def test_a_captured_program_is_the_model_and_reads_its_weights():
    model = hybrid("Lfm2")
    program = capture(model)
    text = ids(23, 1)
    places = torch.arange(23)[None]
    with torch.no_grad():
        assert difference(program.body(text, places), model(text, use_cache=False).logits) < 1e-5
        model.model.layers[2].conv.out_proj.weight.mul_(2)
        assert difference(program.body(text, places), model(text, use_cache=False).logits) < 1e-5


def test_packed_weights_of_a_hybrid():
    """Outside of recurrent modules they stay packed; inside they are refused by the name of the module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = pytest.importorskip("torchao.quantization")
    model, packed = hybrid("Lfm2"), hybrid("Lfm2")
    config = library.Int8WeightOnlyConfig()
    library.quantize_(
        packed, config, filter_fn=lambda module, name: isinstance(module, nn.Linear) and ".conv." not in name
    )
    wanted = Alone(packed)
    read = wanted.read(ids(60, 1))
    assert difference(read, Alone(model).read(ids(60, 1))) > 1e-3
    compiled = semkv.compile(packed, config=semkv.CompileConfig(kernels="torch", floor=0))
    assert sum(x.dtype == torch.int8 for x in compiled.program.body.state_dict().values()) >= 9
    state = compiled.prefill(ids(60, 1))
    assert difference(state.logits, read[:, -1]) < 1e-5
    for token in ids(6, 2)[0]:
        assert difference(compiled.extend(state, token.view(1, 1)), wanted.read(token.view(1, 1))) < 1e-5
    library.quantize_(model, config)
    with pytest.raises(
        CaptureError,
        match=r"model\.layers\.0\.conv \(Lfm2ShortConv\): its weight 'in_proj\.weight' wraps others, as quantised",
    ):
        semkv.compile(model)
