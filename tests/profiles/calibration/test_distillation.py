"""The retrieval head's distillation: its target, that it learns, that a run goes on to the bit; EAGLE-3 checkpoints."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch

from semkv.artifact.fingerprint import model_fingerprint
from semkv.compiled import CompiledModel
from semkv.compiler.pipeline import captured_program
from semkv.config import CompileConfig
from semkv.errors import ConfigError, ProfileError
from semkv.methods import find_method
from semkv.methods.speculation import KEYS, RANKING, UNREAD, Speculation
from semkv.passes.assign_budgets import AssignBudgets
from semkv.passes.base import PassOptions
from semkv.passes.retrieval_graph import head_graph
from semkv.profiles.calibration import MeasureData, MeasureSettings, import_eagle
from semkv.profiles.calibration.calibrate import model_facts
from semkv.profiles.calibration.measure import Subject, Sums, run_measure
from semkv.profiles.calibration.retrieval_head import SINKS, Distillation
from semkv.profiles.calibration.samples import SampleSet
from semkv.profiles.schema import Profile, ProfileInfo
from semkv.profiles.schema.retrieval_head import PREFIX, RetrievalHead, group_scores
from tests.eager_steps import eagerly
from tests.methods.naive_retrieval import assert_best, naive_weights

LENGTH, STEPS, NEAR = 80, 12, 10


def repeated(seed: int) -> torch.Tensor:
    """Random tokens whose end repeats a stretch of the context: what a head can learn to look for."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 40, (LENGTH + STEPS,), generator=generator)
    ids[LENGTH:] = ids[20 : 20 + STEPS]
    return ids


@pytest.fixture
def subject(program):
    def make(held_out=9, **changes):
        settings = MeasureSettings.checked(
            **{
                "length": LENGTH,
                "steps": STEPS,
                "samples": 3,
                "held_out": 1,
                "head_near": NEAR,
                "head_rounds": 2,
                "head_steps": 2,
                "head_dim": 8,
                "head_floor": 0.0,
                "keep": 16,
                "observation": 8,
                "sketch_share": 0.1,
            }
            | changes
        )
        sets = (SampleSet("random", tuple(repeated(seed) for seed in range(3)), (repeated(held_out),)),)
        return Subject(program, MeasureData(sets, (), "random tokens"), settings)

    return make


def quiet(*_):
    return None


def test_the_target_is_the_largest_weight_over_layers_and_groups(subject, model, dense_weights):
    step = Distillation(subject(block=5))
    ids = repeated(0)
    target, features = step._teach(ids)
    with torch.no_grad():
        out = model(ids[None], output_hidden_states=True)
    weights = torch.stack([layer[:, LENGTH:] for layer in dense_weights(model, ids)])  # [layers, Hq, steps, T]
    for head in range(2):
        for query in range(STEPS):
            wanted = weights[:, 2 * head : 2 * head + 2, query].amax((0, 1))
            wanted[:SINKS] = 0
            wanted[LENGTH + query - NEAR + 1 :] = 0
            torch.testing.assert_close(target[head, query], wanted, rtol=1e-4, atol=1e-6)
    assert not features[0].any()
    torch.testing.assert_close(features[1:], out.hidden_states[1][0, :-1], rtol=1e-4, atol=1e-5)


def test_the_head_learns_what_is_attended(subject):
    before = Distillation(subject(held_out=0, head_rate=1e-9))
    after = Distillation(subject(held_out=0, head_rounds=25, head_rate=2e-2))
    caught = [run_measure(step, identity="x", path=None, report=quiet).section.caught for step in (before, after)]
    assert caught[1] > caught[0] + 0.1


@pytest.mark.parametrize("group", [1, 3])
def test_what_is_trained_is_what_chooses_at_run_time(subject, group):
    """Scores of the distillation against the ranking of a step that reads the same tokens: the largest weight of a group."""
    step = Distillation(subject(head_group=group, head_input="embedding"))
    step._start(Sums())
    ids = repeated(0)
    rows = torch.arange(LENGTH, LENGTH + STEPS)
    trained = step._scores(ids, None, rows).detach()

    head = RetrievalHead(step.section, {name: tensor.detach() for name, tensor in step._trained.items()})
    selector = head_graph(head, step.embedding.detach(), "embedding")
    empty = {KEYS: torch.zeros(2, 0, 8, dtype=torch.float16), UNREAD: torch.zeros(0, dtype=torch.int64)}
    passing = {}
    Speculation(selector, step.section).begin(ids, 0, empty, passing, lambda tokens: float("inf"))
    ranking = passing[RANKING].logs[:, rows]
    reached = ranking > float("-inf")
    assert reached.sum() == 2 * sum(range(LENGTH + 1, LENGTH + STEPS + 1))
    assert (trained[~reached] < -1e6).all()
    # keys are kept in half precision
    torch.testing.assert_close(trained[reached], ranking[reached], rtol=1e-3, atol=5e-3)


def test_scores_are_the_largest_weights_of_a_group():
    logits = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(group_scores(logits), logits.softmax(-1).amax(1).log())
    assert torch.equal(group_scores(logits[:, :1]), logits[:, 0].log_softmax(-1))


@pytest.mark.parametrize("kind", ["features", "embedding"])
def test_a_run_goes_on_to_the_same_bits(subject, tmp_path, kind):
    whole = run_measure(Distillation(subject(head_input=kind)), identity="x", path=None, report=quiet)
    path = tmp_path / "part.safetensors"

    class Stop(Exception):
        pass

    def stop(name, done, *_):
        if done == 4:
            raise Stop

    with pytest.raises(Stop):
        run_measure(Distillation(subject(head_input=kind)), identity="x", path=path, report=stop, save_seconds=0.0)
    resumed = run_measure(Distillation(subject(head_input=kind)), identity="x", path=path, report=quiet)
    assert resumed.section == whole.section
    for name, tensor in whole.tensors.items():
        assert torch.equal(resumed.tensors[name], tensor)
    assert bool(whole.section.features) == (kind == "features")


def test_the_section_counts_what_it_has(subject, model, program):
    outcome = run_measure(Distillation(subject()), identity="x", path=None, report=quiet)
    section = outcome.section
    assert section.parameters == sum(tensor.numel() for tensor in outcome.tensors.values())
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    norm = sum(p.numel() for p in model.model.norm.parameters())
    outer = sum(p.numel() for p in (model.model.embed_tokens.weight, model.lm_head.weight))
    assert section.whole == pytest.approx(layer + outer, abs=norm)
    assert (section.q_heads, section.kv_heads, section.head_dim) == (4, 2, 8)
    assert section.steps == 3 * 2 * 2
    assert section.yarn.factor == pytest.approx(1024 / (LENGTH + STEPS))
    info = ProfileInfo(fingerprint=model_fingerprint(model), model=model_facts(program, "tiny"), retrieval_head=section)
    Profile(info, outcome.tensors)
    assert f"{section.parameters:,} parameters" in outcome.note


def test_a_site_without_a_stream_is_refused(subject):
    with pytest.raises(ConfigError, match="enters site 7: set head_input='embedding'"):
        Distillation(subject(head_sites=(7,)))


# -- EAGLE-3 -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep(make_llama):
    model = make_llama(num_hidden_layers=7)
    source = captured_program(model)
    annotated = AssignBudgets().run(source, PassOptions(method="specontext"))
    info = ProfileInfo(fingerprint=model_fingerprint(model), model=model_facts(annotated, "deep"))
    return model, Profile(info), source


def write_checkpoint(folder, *, drop=(), **changes):
    """An EAGLE-3 draft as it is published: 4 query heads on 2 KV heads of 8 dims, hidden 32, own vocabulary of 20."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    tensors = {
        "fc.weight": normal(32, 96),
        "midlayer.input_layernorm.weight": normal(32),
        "midlayer.hidden_norm.weight": normal(32),
        "midlayer.self_attn.q_proj.weight": normal(32, 64),
        "midlayer.self_attn.k_proj.weight": normal(16, 64),
        "midlayer.self_attn.v_proj.weight": normal(16, 64),
        "midlayer.self_attn.o_proj.weight": normal(32, 32),
        "midlayer.mlp.up_proj.weight": normal(48, 32),
        "norm.weight": normal(32),
        "lm_head.weight": normal(20, 32),
        "d2t": torch.arange(20),
    }
    tensors |= changes
    config = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500.0,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    kept = {name: tensor for name, tensor in tensors.items() if name not in drop}
    safetensors.torch.save_file(kept, folder / "model.safetensors")
    return kept


def test_an_eagle_checkpoint_becomes_a_retrieval_head(deep, tmp_path):
    _, profile, source = deep
    tensors = write_checkpoint(tmp_path / "draft")
    made = import_eagle(profile, tmp_path / "draft", trained=256)
    section = made.info.retrieval_head
    assert (section.feature_sites, section.features, section.projected) == ((2, 3, 4), 96, 32)
    assert (section.q_heads, section.kv_heads, section.head_dim, section.theta) == (4, 2, 8, 500.0)
    assert (section.yarn.factor, section.yarn.positions, section.source) == (4.0, 256, "eagle-3")
    assert section.whole == sum(x.numel() for name, x in tensors.items() if name != "d2t")
    assert torch.equal(made.tensors[f"{PREFIX}query"], tensors["midlayer.self_attn.q_proj.weight"])
    made.save(tmp_path / "profile")
    loaded = Profile.load(tmp_path / "profile")
    compiled = CompiledModel(source, loaded, find_method("specontext"), 0.6, CompileConfig(floor=0))
    ids = torch.randint(0, 40, (1, 300), generator=torch.Generator().manual_seed(0))
    state = compiled.prefill(ids)
    compiled.extend(state, ids[:, :3])
    assert state.stats.peak_share <= 1


@pytest.mark.parametrize("trained", [1024, 64])
def test_an_imported_head_chooses_what_its_layer_attends_to(deep, tmp_path, trained):
    """The tokens with the highest attention weights of the draft's layer for the newest token: rotary positions (at its own length, and
    extended 16 times), features of the token before, groups, by the formulas; one choice per KV head."""
    model, profile, source = deep
    generator = torch.Generator().manual_seed(5)
    sizes = {"q_proj": 32, "k_proj": 16}
    own = {
        f"midlayer.self_attn.{name}.weight": torch.randn(n, 64, generator=generator) / 8 for name, n in sizes.items()
    }
    tensors = write_checkpoint(tmp_path / "draft", **own)
    made = import_eagle(profile, tmp_path / "draft", trained=trained)
    assert made.info.retrieval_head.yarn.factor == 1024 / trained
    compiled = CompiledModel(source, made, find_method("specontext", {"window": 8}), 0.7, CompileConfig(floor=0))
    compiled = eagerly(compiled)
    ids = torch.randint(0, 40, (1, 161), generator=torch.Generator().manual_seed(0))
    state = compiled.prefill(ids[:, :160])
    compiled.extend(state, ids[:, 160:])
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states
    named = {
        name: tensors[f"midlayer.{place}.weight"]
        for name, place in {
            "input_norm": "input_layernorm",
            "feature_norm": "hidden_norm",
            "query": "self_attn.q_proj",
            "key": "self_attn.k_proj",
        }.items()
    }
    weights = naive_weights(
        made.info.retrieval_head,
        named | {"projection": tensors["fc.weight"]},
        model.model.embed_tokens.weight.detach(),
        ids[0],
        torch.cat([hidden[site][0] for site in (2, 3, 4)], -1),
    )
    for memory in state.rows[0].budgeted():
        folded = set(memory.spans.positions[0].tolist())
        for head in range(memory.site.kv_heads):
            chosen = set(memory.spans.positions[0][memory.zoom.chosen[head]].tolist())
            own = weights if memory.site.kv_heads == 2 else weights.amax(0, keepdim=True)
            assert_best(own[head], chosen, folded)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drop": ("fc.weight",)}, "has no tensor 'fc.weight'"),
        ({"midlayer.self_attn.k_proj.weight": torch.zeros(8, 64)}, r"k_proj.weight' is \(8, 64\), expected \(16, 64\)"),
    ],
)
def test_other_checkpoints_are_refused(deep, tmp_path, changes, message):
    write_checkpoint(tmp_path / "draft", **changes)
    with pytest.raises(ProfileError, match=message):
        import_eagle(deep[1], tmp_path / "draft")
    with pytest.raises(ProfileError, match=r"config\.json cannot be read"):
        import_eagle(deep[1], tmp_path / "nothing")
