"""Methods that bring tokens back: budget held, states saved, and full attention where all comes back."""

from __future__ import annotations

import pytest
import torch

from semkv import bundled
from semkv.api import compile as compile_model
from semkv.api import load
from semkv.errors import ArtifactError, BudgetError, ConfigError
from semkv.methods import find_method
from semkv.profiles.schema import Profile
from semkv.runtime.budgets.budget import Budget
from semkv.runtime.store.quantization import dequantize, quantize
from tests.conftest import quick_ones

RETRIEVING = ("quest", "shadowkv", "infllm", "clusterkv", "sketch", "mixed")
SMALL = {"infllm": {"block": 8}, "clusterkv": {"tokens_per_cluster": 12, "sinks": 4, "fold_chunk": 8}}


@pytest.mark.parametrize("name", quick_ones(RETRIEVING, ("shadowkv", "clusterkv", "mixed")))
def test_the_budget_holds_in_prefill_and_generation(whole, name, grown):
    state = grown(whole.with_method(name, budget=0.25, **SMALL.get(name, {})), 400, 6, 30)
    assert state.stats.moved_bytes_per_step > 0
    assert state.nbytes["host"] <= 0.6 * state.full_bytes


@pytest.mark.parametrize("name", quick_ones(RETRIEVING, ("quest", "infllm", "sketch")))
def test_far_beyond_a_budget_in_tokens(whole, name, prompt):
    """Units merge, or the oldest leave the device; the host keeps every token."""
    compiled = whole.with_method(name, budget=100, **SMALL.get(name, {}))
    state = compiled.prefill(prompt(200, 1))
    for seed in range(5):
        compiled.extend(state, prompt(100, seed))
    assert state.stats.peak_share <= 1
    for memory in state.rows[0].budgeted():
        if memory.spans is not None:
            assert memory.kept.length + memory.recent.length + memory.spans.host_tokens.length == 700


@pytest.mark.parametrize("name", RETRIEVING)
def test_saved_states_go_on(whole, name, tmp_path, prompt):
    compiled = whole.with_method(name, budget=0.6, **SMALL.get(name, {}))
    state = compiled.prefill(prompt(300, 300))
    compiled.extend(state, prompt(9, 3))
    state.save(tmp_path / "state")
    again = compiled.load_state(tmp_path / "state")
    more = prompt(20, 4)
    assert torch.equal(compiled.extend(state, more, all_logits=True), compiled.extend(again, more, all_logits=True))


@pytest.mark.parametrize(("name", "budget"), [("quest", 48), ("infllm", 100), ("clusterkv", 100)])
def test_a_budget_in_which_little_can_come_back_is_refused(whole, name, budget, prompt):
    """Where the index of more units does not fit, units are so long that they do not fit either."""
    compiled = whole.with_method(name, budget=budget)
    with pytest.raises(
        BudgetError,
        match=rf"budget {budget} is too small for '{name}' in a sequence of 3000 tokens: it leaves \d+ tokens",
    ):
        compiled.prefill(prompt(3000, 1))
    whole.with_method(name, budget=400).prefill(prompt(3000, 1))


@pytest.mark.parametrize(
    ("name", "options", "tensors"),
    [("sketch", {}, "sketch.mean."), ("sekv", {"router": "trained"}, "sekv.router.")],
)
def test_a_state_of_another_calibration_is_refused(whole, name, options, tensors, tmp_path, prompt):
    """What units keep for routing is read with the maps that it was made with."""
    model, profile = bundled.load()[0], bundled.profile()
    changed = {key: 2 * x if key.startswith(tensors) else x for key, x in profile.tensors.items()}
    settings = whole.settings.model_copy(update={"method_options": options})
    compiled = whole.with_method(name, budget=0.6, config=settings)
    compiled.prefill(prompt(300, 300)).save(tmp_path / "state")
    other = compile_model(model, Profile(profile.info, changed), method=name, budget=0.6, config=settings)
    with pytest.raises(
        ArtifactError, match=r"compiled otherwise: another profile; compile with the same settings and profile"
    ):
        other.load_state(tmp_path / "state")
    same = compile_model(model, profile, method=name, budget=0.6, config=settings)
    assert same.load_state(tmp_path / "state").lengths == [300]


@pytest.mark.parametrize("name", RETRIEVING)
def test_with_room_for_everything_it_is_full_attention(whole, name, prompt):
    """What stays folded is nothing: only the 8 bits of folded tokens are left of the approximation."""
    own = {"sketch": {"code_share": 0.1}, "mixed": {"all_heads": True, "code_share": 0.1}}.get(name, {})
    options = SMALL.get(name, {}) | own | {"fixed_share": 0.15 if own else 0.3}
    compiled = whole.with_method(name, budget=2000, **options)
    ids, question = prompt(900, 5), prompt(4, 6)
    state, reference = compiled.prefill(ids), whole.prefill(ids)
    assert any(memory.spans.count > 3 for memory in state.rows[0].budgeted())
    got, expected = compiled.extend(state, question), whole.extend(reference, question)
    assert float((got.softmax(-1) - expected.softmax(-1)).abs().max()) < 0.03


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("quest", {"bits": 5}, "option 'bits' of method 'quest' is 5; expected 4, 8 or 16"),
        ("shadowkv", {"chunk": 0}, "option 'chunk' of method 'shadowkv' is 0; expected at least 1"),
        ("infllm", {"representatives": 0}, "option 'representatives' of method 'infllm' is 0"),
        ("clusterkv", {"rounds": 0}, "option 'rounds' of method 'clusterkv' is 0"),
        (
            "sketch",
            {"code_share": 0.7},
            r"option 'code_share' of method 'sketch' is 0.7; expected a share in \(0, fixed_share \(0.667\)\]",
        ),
        ("mixed", {"idle_share": 0.0}, "option 'idle_share' of method 'mixed' is 0.0; expected a share"),
        ("mixed", {"errors": 3.0}, "option 'errors' of method 'mixed' is 3.0; expected a power from 0 to 2"),
        ("mixed", {"sentence": 0.6, "prior": 0.6}, "option 'sentence' of method 'mixed' is 0.6; expected a share"),
    ],
)
def test_options_are_checked(name, options, message):
    with pytest.raises(ConfigError, match=message):
        find_method(name, options)


def test_a_sketch_needs_its_profile(whole):
    model, _ = bundled.load()
    with pytest.raises(ConfigError, match="needs a profile with a token sketch: make one with `semkv-profile"):
        compile_model(model, method="sketch", budget=0.1)


@pytest.mark.parametrize("name", RETRIEVING)
def test_a_budget_below_the_smallest_names_it(whole, name, prompt):
    with pytest.raises(BudgetError, match=f"'{name}' needs at least {find_method(name).minimum_tokens}"):
        whole.with_method(name, budget=0.01).prefill(prompt(300, 1))


@pytest.mark.parametrize(
    ("budget", "stages", "coarse"),
    [(0.01, 1, False), (0.02, 2, False), (0.03, 3, True), (0.05, 4, True), (0.5, 4, True)],
)
def test_a_small_budget_gets_short_codes(whole, budget, stages, coarse):
    """Two fifths of a head's bytes per token or a little more: of 256; the profile has four codebooks for keys, one for values."""
    program = whole.with_method("sketch", budget=0.5).program
    store = program.stores[1]
    assert 2 * (store.key_dim + store.value_dim) == 256
    decided = find_method("sketch").for_budget(program, whole.profile, Budget(budget, torch.float16))
    assert (decided.stages, decided.coarse) == (stages, coarse)
    router = decided.plan(program, whole.profile).parts[1][0].components.router
    held = sum(part.unit_nbytes for part in router.index(store, None).values())
    assert held == (stages + coarse) * store.kv_heads
    assert held / store.kv_heads <= max(1, decided.code_share * budget * 256 + 1e-6)


@pytest.mark.parametrize(
    ("budget", "code_share", "fixed_share", "form"),
    [
        (0.01, 0.55, 0.75, "int4"),
        (0.03, 4 / 7.68, 4 / 7.68 + 0.2, "int4"),
        (0.05, 0.4, 2 / 3, "int8"),
        (60, 0, 2 / 3, "int8"),
    ],
)
def test_a_small_budget_gives_codes_more_and_tokens_4_bits(whole, budget, code_share, fixed_share, form):
    """A token of the bundled model takes 256 bytes per KV head."""
    decided = find_method("sketch").for_budget(whole.program, whole.profile, Budget(budget, torch.float16))
    assert (decided.code_share, decided.fixed_share) == pytest.approx((code_share, fixed_share))
    assert decided.exact_form == form
    asked = find_method("sketch", {"code_share": 0.3, "exact_form": "raw"})
    told = asked.for_budget(whole.program, whole.profile, Budget(budget, torch.float16))
    assert (told.code_share, told.fixed_share, told.exact_form) == (0.3, 2 / 3, "raw")


def test_named_stages_of_a_sketch_hold_at_any_budget(whole):
    asked = find_method("sketch", {"stages": 3})
    assert asked.for_budget(whole.program, whole.profile, Budget(0.01, torch.float16)).stages == 3
    assert find_method("sketch").for_budget(whole.program, whole.profile, Budget(200, torch.float16)).stages == 2
    with pytest.raises(
        ConfigError, match="option 'stages' of method 'sketch' is 5; expected at most 4, which the profile has"
    ):
        whole.with_method("sketch", budget=0.1, stages=5)


def test_heads_of_a_mixture_that_retrieve_have_codes(whole):
    """By the best semantic score of a group against the bar; the others have spans, and a smaller share."""
    method, profile, program = find_method("mixed"), whole.profile, whole.with_method("mixed", budget=0.5).program
    semantic = profile.info.retrieval_heads.semantic
    bar, coded = min(0.1, 0.5 * max(map(max, semantic))), 0
    plan = method.plan(program, profile)
    for store in program.stores:
        groups = torch.tensor(semantic[store.index]).view(store.kv_heads, -1).amax(1)
        order = list(store.head_order or range(store.kv_heads))
        for part in plan.parts[store.store]:
            for head in range(part.first, part.last):
                assert (part.components.summary is None) == bool(groups[order[head]] >= bar)
                coded += part.components.summary is None
    assert coded == 4
    shares = method.layer_shares(program, profile)
    assert shares == pytest.approx([0.3, 1.0, 0.3, 0.3])


def test_the_ceiling_finds_what_true_attention_finds(whole, prompt):
    """The oracle's choice is that of the exact scores, and it is charged no codes."""
    ceiling, sketch = whole.with_method("sketch", budget=0.25, oracle=True), whole.with_method("sketch", budget=0.25)
    for compiled, codes in ((ceiling, False), (sketch, True)):
        state = compiled.prefill(prompt(400, 1))
        found = [memory.spans for memory in state.rows[0].budgeted() if memory.spans is not None]
        assert found
        assert all(bool(spans.index) == codes for spans in found)


@pytest.mark.parametrize("option", [{"others": "window"}, {"others": "votes"}, {"errors": 0.5}, {"sentence": 0.3}])
def test_a_mixture_of_other_parts_keeps_its_budget_and_its_rows(whole, option, prompt):
    compiled = whole.with_method("mixed", budget=0.15, **option)
    default = whole.with_method("mixed", budget=0.15)
    state, plain = compiled.prefill(prompt(400, 1)), default.prefill(prompt(400, 1))
    for seed in range(3):
        other, same = compiled.extend(state, prompt(20, seed)), default.extend(plain, prompt(20, seed))
    assert state.stats.peak_share <= 1
    assert not torch.equal(other, same), "the option changes nothing"


def test_attention_to_folded_tokens_comes_nearer_to_the_full_cache(whole, prompt):
    """At a budget that unfolds few of them."""
    ids, question = prompt(900, 5), prompt(6, 6)
    wanted = whole.extend(whole.prefill(ids), question, all_logits=True).log_softmax(-1)
    apart = {}
    for coarse in (True, False):
        compiled = whole.with_method("sketch", budget=0.08, coarse=coarse)
        got = compiled.extend(compiled.prefill(ids), question, all_logits=True).log_softmax(-1)
        apart[coarse] = float((wanted.exp() * (wanted - got)).sum(-1).mean())
    assert apart[True] < apart[False]


@pytest.mark.parametrize("budget", [0.15, 60])
def test_tokens_in_4_bits_are_more_for_the_same_bytes(whole, budget, prompt, tmp_path):
    """Twice as many exact tokens as in 8 bits, within the budget; they move, fold, and are saved as the codes that they are."""
    ids, more, found = prompt(500, 5), prompt(9, 6), {}
    for form in ("int8", "int4"):
        compiled = whole.with_method("sketch", budget=budget, exact_form=form)
        state = compiled.prefill(ids)
        for seed in range(3):
            compiled.extend(state, prompt(20, seed))
        compiled.generate(more, state=state, max_new_tokens=12, do_sample=False)
        assert state.stats.peak_share <= 1
        held = [memory for memory in state.rows[0].budgeted() if memory.spans is not None]
        found[form] = sum(memory.slots.filled for memory in held)
        if form == "int4":
            assert all(x.spans.host_tokens.parts["k"].stored.shape[-1] == x.site.key_dim // 2 for x in held)
            state.save(tmp_path / "state")
            again, fork = compiled.load_state(tmp_path / "state"), state.fork()
            one, *others = (compiled.extend(x, more, all_logits=True) for x in (state, again, fork))
            assert all(torch.equal(one, x) for x in others)
    assert found["int4"] > 1.5 * found["int8"]


@pytest.mark.parametrize(("form", "bits"), [("int8", 8), ("int4", 4)])
def test_tokens_in_codes_are_the_full_caches_rounded(whole, form, bits, prompt):
    """First ones, in 8 bits always, those that wait, and recent ones, each within half a step of the key and value that the full cache
    holds. In the first layer, whose tokens do not depend on what was attended to."""
    ids, more = prompt(300, 5), prompt(7, 6)
    compiled = whole.with_method("sketch", budget=0.15, exact_form=form)
    full, state = whole.prefill(ids), compiled.prefill(ids)
    whole.extend(full, more)
    compiled.extend(state, more)
    everything, memory = full.rows[0].stores[0][0].recent, state.rows[0].stores[0][0]
    balance, seen = compiled.method.key_balance(compiled.program, compiled.profile), []
    assert bool(balance) == (form == "int4")
    for side in "kv":
        numbers = dequantize(getattr(everything, side))
        if side == "k" and balance:
            numbers = (numbers - balance[0].mean[:, None]) * balance[0].scale[:, None]
        kept, most = (
            0.505 * quantize(numbers, each).scale.float() + 1e-3 * numbers.abs() for each in (8, bits)
        )  # half a step, and that of the KV dtype
        for held, apart in ((memory.kept, kept), (memory.recent, most)):
            places = held.positions[0].long()
            assert bool(((dequantize(getattr(held, side)) - numbers[:, places]).abs() <= apart[:, places]).all())
            seen += places.tolist()
        places, positions = memory.spans.waiting_places()
        waiting = memory.spans.host_tokens.gather(places.expand(numbers.shape[0], -1))["kv".index(side)]
        assert bool(((waiting.float() - numbers[:, positions]).abs() <= most[:, positions]).all())
        seen += positions.tolist()
    assert sorted(seen) == sorted([*range(307)] * 2)


def test_a_record_of_another_program_has_its_keys_balanced(whole, prompt, tmp_path):
    """A prompt that `full` read serves a method whose program balances keys, and the other way round, also one that was loaded."""
    compiled = whole.with_method("sketch", budget=0.3, exact_form="int4")
    compiled.save(tmp_path / "artifact")
    ids, more = prompt(300, 6), prompt(4, 7)
    foreign, own = whole.prefill_record(ids), compiled.prefill_record(ids)
    assert float((foreign.keys[0].float() - own.keys[0].float()).abs().max()) > 1
    for one in (compiled, load(tmp_path / "artifact")):
        got, wanted = (one.extend(one.compress(record), more) for record in (foreign, own))
        assert float((got.softmax(-1) - wanted.softmax(-1)).abs().max()) < 1e-2
    back = own.ordered_for(whole.program)
    assert back.balances == {}
    torch.testing.assert_close(back.keys[0], foreign.keys[0], rtol=1e-2, atol=2e-2)
    torch.testing.assert_close(back.queries[0], foreign.queries[0], rtol=1e-3, atol=1e-3)
    assert own.ordered_for(compiled.program) is own


def test_a_mixture_with_whole_heads_keeps_all_their_tokens(whole, prompt):
    """Volatile heads and pivots are exact, the others share what those leave; a budget that they exceed is refused."""
    compiled = whole.with_method("mixed", budget=0.95, whole=True)
    roles = compiled.profile.info.head_taxonomy.roles
    exact = sum(role in ("volatile", "pivot") for row in roles for role in row)
    assert 0 < exact < 16
    state = compiled.prefill(prompt(400, 1))
    for seed in range(3):
        compiled.extend(state, prompt(20, seed))
    assert state.stats.peak_share <= 1
    held, parts = 0, 0
    for store in compiled.program.stores:
        for part, memory in zip(state.rows[0].placement.parts(store), state.rows[0].stores[store.store], strict=True):
            parts += 1
            if part.components.whole:
                held += part.last - part.first
                assert memory.kept.length + memory.recent.length == 460
                assert set(store.roles[part.first : part.last]) <= {"volatile", "pivot"}
            else:
                assert memory.kept.length + memory.recent.length < 460
    assert held == exact
    assert parts > 4
    with pytest.raises(BudgetError, match=rf"too small for 'mixed': {exact} of 16 KV heads keep all 400 tokens"):
        whole.with_method("mixed", budget=0.3, whole=True).prefill(prompt(400, 1))


def test_a_mixture_with_whole_heads_needs_roles(whole):
    info = whole.profile.info.model_copy(update={"head_taxonomy": None})
    profile = Profile(info, {k: v for k, v in whole.profile.tensors.items() if not k.startswith("taxonomy.")})
    find_method("mixed").check(profile)
    with pytest.raises(ConfigError, match=r"section 'head_taxonomy'.*--steps taxonomy.*whole=False"):
        find_method("mixed", {"whole": True}).check(profile)


def test_a_mixture_says_which_section_it_lacks(whole):
    info = whole.profile.info.model_copy(update={"sekv": None})
    profile = Profile(info, {k: v for k, v in whole.profile.tensors.items() if not k.startswith("sekv.")})
    with pytest.raises(ConfigError, match=r"method 'mixed' needs a profile with the section 'sekv'.*others='window'"):
        find_method("mixed").check(profile)
    find_method("mixed", {"others": "window"}).check(profile)
    info = whole.profile.info.model_copy(update={"retrieval_heads": None})
    profile = Profile(info, whole.profile.tensors)
    with pytest.raises(ConfigError, match=r"section 'retrieval_heads'.*--steps retrieval-heads.*all_heads=True"):
        find_method("mixed").check(profile)
    find_method("mixed", {"all_heads": True}).check(profile)


@pytest.mark.parametrize("name", ["quest", "sekv"])
def test_units_merge_to_what_their_layer_can_unfold(whole, name, prompt):
    """However many layers share the row's budget, of which each has its own part."""
    state = whole.with_method(name, budget=120).prefill(prompt(400, 1))
    row = state.rows[0]
    assert len(row.placement.budgeted) > 1
    for store in row.placement.budgeted:
        (memory,) = row.stores[store.store]
        ((_, limit),) = row._making_room(store, row.tokens)
        slots, _ = memory._slots(memory.site, row.workspace_allowance(store, row.tokens)[0])
        assert 32 < limit // memory.spans.token_nbytes() <= slots
