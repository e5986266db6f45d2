"""Profiles: round trip, refusals of every kind of damage, the fingerprint, the table of methods, the Hub."""

import hashlib
import json
import struct

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semkv.errors import ProfileError
from semkv.profiles.schema import (
    Choice,
    HeadTaxonomy,
    LayerErrors,
    ModelFacts,
    Profile,
    ProfileInfo,
    Provenance,
    RetrievalHeads,
    SekvSection,
    SiteFacts,
    SketchSection,
)
from semkv.profiles.schema.storage import canonical


def build(**changes) -> Profile:
    """A small valid profile: two sites, two query heads on one KV head, d' 4, D 8."""
    sites = tuple(
        SiteFacts(index=i, name=f"layers.{i}.attn", store=i, q_heads=2, kv_heads=1, key_dim=8, value_dim=8)
        for i in range(2)
    )
    model = ModelFacts(name="tiny", dtype="float32", vocab_size=50, max_positions=128, sites=sites)
    sekv = SekvSection(routing_dims=(4, 4), max_rank=6, gate_hidden=5, gate_summary_dim=4)
    content = {
        "fingerprint": "f" * 64,
        "model": model,
        "sekv": sekv,
        "sketch": SketchSection(stages=2, caught=((0.95,), (0.5,))),
        "head_taxonomy": HeadTaxonomy(
            roles=(("anchor",), ("volatile",)),
            clusters=((0,), (0,)),
            stability=((0.7,), (0.2,)),
            similarity=((0.0,), (0.0,)),
            tau_stable=0.5,
            tau_similar=0.5,
        ),
        "retrieval_heads": RetrievalHeads(
            semantic=((0.5, 0.1), (0.0, 0.0)),
            classic=((0.4, 0.0), (0.0, 0.0)),
            classic_top_k=((0.6, 0.0), (0.0, 0.0)),
            tests=4,
            passed=3,
        ),
        "layer_errors": LayerErrors(errors=(0.25, 0.75), relative=(0.1, 0.3), sets={"text": (0.25, 0.75)}),
        "provenance": Provenance(
            created="2026-01-01T00:00:00Z",
            command="semkv-profile tiny -o tiny.profile",
            data="text",
            tokens=1000,
            seed=1,
            steps=5,
            data_digest="0" * 64,
            wall_minutes=0.1,
            versions={"torch": "2"},
            losses={"total": 1.25},
        ),
    } | changes
    info = ProfileInfo(**content)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        if "books" in name
        else torch.randn(shape, generator=generator)
        for name, shape in info.tensor_shapes().items()
    }
    return Profile(info, tensors)


@pytest.fixture
def folder(tmp_path):
    return build().save(tmp_path / "tiny.profile")


def test_round_trip_keeps_everything(folder):
    original, loaded = build(), Profile.load(folder)
    assert loaded.tensors.keys() == original.tensors.keys()
    for name, tensor in original.tensors.items():
        assert torch.equal(loaded.tensors[name], tensor)
    ignored = {"tensors", "tensors_digest"}
    assert loaded.info.model_dump(exclude=ignored) == original.info.model_dump(exclude=ignored)
    assert loaded.info.tensors["sekv.router.0"].shape == (2, 4, 8)
    assert sorted(path.name for path in folder.iterdir()) == ["profile.json", "tensors.safetensors"]


def test_saving_again_replaces_and_leaves_no_debris(folder):
    build(choices=(Choice(method="full", budget=0.1, length=64, score=1.0, samples=3),)).save(folder)
    assert Profile.load(folder).info.choices[0].method == "full"
    assert [path.name for path in folder.parent.iterdir()] == ["tiny.profile"]


def test_half_precision_tensors_round_trip(tmp_path):
    profile = build()
    halves = {name: x.to(torch.bfloat16) if x.is_floating_point() else x for name, x in profile.tensors.items()}
    Profile(profile.info, halves).save(tmp_path / "p")
    assert Profile.load(tmp_path / "p").tensors["sekv.router.1"].dtype == torch.bfloat16


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "p").write_text("x")
    with pytest.raises(ProfileError, match=r"is a file: a profile is written to a folder"):
        build().save(tmp_path / "p")


def test_another_model_is_refused():
    build().check_model("f" * 64)
    with pytest.raises(ProfileError, match=r"belongs to another model: it was calibrated for 'tiny'.*semkv-profile"):
        build().check_model("e" * 64)


def edit(folder, change, *, rehash=True):
    """Apply `change` to the parsed profile.json; with `rehash`, as someone would who also fixes the digest."""
    path = folder / "profile.json"
    content = json.loads(path.read_text())
    change(content)
    if rehash:
        content.pop("digest")
        content["digest"] = hashlib.sha256(canonical(content).encode()).hexdigest()
    path.write_text(json.dumps(content))


JSON_DAMAGE = {
    "unknown field": (lambda c: c.update(extra=1), "extra: Extra inputs are not permitted"),
    "unknown section field": (lambda c: c["sekv"].update(code="x"), "sekv.code"),
    "rank out of range": (lambda c: c["sekv"].update(max_rank=100000), "sekv.max_rank"),
    "huge site list": (lambda c: c["model"].update(sites=c["model"]["sites"] * 600), "model.sites"),
    "heads do not divide": (lambda c: c["model"]["sites"][0].update(q_heads=3, kv_heads=2), "no multiple of 2"),
    "no router for a site": (lambda c: c["sekv"].update(routing_dims=[4, 0]), "gives site 1 no router"),
    "other shape needed": (lambda c: c["sekv"].update(max_rank=7), "expected"),
    "section dropped": (lambda c: c.update(sketch=None), "which no section uses"),
    "tensors of a section dropped": (lambda c: c.update(head_taxonomy=None), "which no section uses"),
    "fingerprint missing": (lambda c: c.pop("fingerprint"), "fingerprint: Field required"),
    "roles of another model": (
        lambda c: c["head_taxonomy"].update(roles=[["anchor", "anchor"], ["volatile"]]),
        "KV store 0 has 2 entries, expected 1",
    ),
    "a pivot without a satellite": (
        lambda c: c["head_taxonomy"].update(roles=[["pivot"], ["volatile"]]),
        "head 0 is a pivot without a satellite",
    ),
    "a satellite of itself": (
        lambda c: c["head_taxonomy"].update(roles=[["satellite"], ["volatile"]]),
        "of head 0, which is no pivot",
    ),
    "scores of too few sites": (lambda c: c["retrieval_heads"].update(semantic=[[0.5, 0.1]]), "has 1 rows for 2 sites"),
    "more tests passed than asked": (lambda c: c["retrieval_heads"].update(passed=9), "9 tests passed of 4"),
    "errors that are no shares": (
        lambda c: c["layer_errors"].update(errors=[0.5, 0.75]),
        "errors sum to 1.25, expected 1",
    ),
    "errors of too few layers": (
        lambda c: c["layer_errors"]["sets"].update(text=[1.0]),
        "sets.text has 1 entries for 2",
    ),
    "codebooks of other heads": (
        lambda c: c["sketch"].update(caught=[[0.5, 0.5], [0.5]]),
        "sketch.caught: site 0 has 2 entries, expected 1",
    ),
    "no stages": (lambda c: c["sketch"].update(stages=0), "sketch.stages"),
    "tensor undeclared": (lambda c: c["tensors"].pop("sekv.router.0"), "first difference: 'sekv.router.0'"),
    "huge tensor": (lambda c: c["tensors"]["sekv.router.0"].update(shape=[1 << 24, 1 << 24]), "first difference"),
}


@pytest.mark.parametrize("kind", JSON_DAMAGE)
def test_altered_json_is_refused_by_name(folder, kind):
    change, text = JSON_DAMAGE[kind]
    edit(folder, change)
    with pytest.raises(ProfileError) as caught:
        Profile.load(folder)
    assert text in str(caught.value)
    assert "profile.json" in str(caught.value) or "tensors.safetensors" in str(caught.value)
    assert "semkv-profile" in str(caught.value)


def test_a_changed_number_is_noticed(folder):
    edit(folder, lambda c: c["provenance"].update(seed=2), rehash=False)
    with pytest.raises(ProfileError, match=r"profile\.json was altered or damaged.*make a new one with semkv-profile"):
        Profile.load(folder)


def test_another_schema_version_is_refused(folder):
    edit(folder, lambda c: c.update(schema_version=3))
    with pytest.raises(ProfileError, match=r"schema version 3, this version of semkv reads 1 and 2"):
        Profile.load(folder)


def test_of_an_earlier_version_all_but_the_sketch_is_read(folder):
    """Its sketch had other tensors; the rest is what it was, and can be saved again."""
    before = Profile.load(folder)

    def earlier(content):
        content["schema_version"] = 1
        content["sketch"] = {"rank": 3, "candidates": [[2, 2]], "ranks": [[2], [0]], "bits": [[2], [0]]}

    edit(folder, earlier)
    with pytest.warns(UserWarning, match=r"whose token sketch is not read any more.*--steps sketch"):
        read = Profile.load(folder)
    assert read.info.sketch is None
    assert read.info.sekv == before.info.sekv
    assert set(read.tensors) == {name for name in before.tensors if not name.startswith("sketch.")}
    read.save(folder.parent / "again")
    assert Profile.load(folder.parent / "again").info == read.info.model_copy(
        update={"tensors_digest": Profile.load(folder.parent / "again").info.tensors_digest}
    )


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": NaN}', "[" * 100_000, "null", "\x00\xff"])
def test_broken_json_is_refused(folder, text):
    (folder / "profile.json").write_text(text, encoding="latin-1")
    with pytest.raises(ProfileError, match=r"profile\.json .*(damaged|schema version)"):
        Profile.load(folder)


@pytest.mark.parametrize("name", ["profile.json", "tensors.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(ProfileError, match=f"{name} is missing: get the profile again"):
        Profile.load(folder)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ProfileError, match=r"is no profile folder: expected a folder with profile.json"):
        Profile.load(tmp_path / "none")


def test_altered_tensor_bytes_are_noticed(folder):
    path = folder / "tensors.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ProfileError, match=r"its digest does not match the one in profile.json"):
        Profile.load(folder)


def test_tensors_of_another_profile_are_refused(folder):
    safetensors.torch.save_file({"a": torch.zeros(3)}, folder / "tensors.safetensors")
    with pytest.raises(ProfileError, match=r"does not hold the tensors that profile.json declares"):
        Profile.load(folder)


def test_a_header_that_claims_too_much_is_refused(folder):
    path = folder / "tensors.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])
    with pytest.raises(ProfileError, match=r"its header is truncated or too large"):
        Profile.load(folder)


def test_values_that_are_not_finite_are_refused():
    profile = build()
    broken = profile.tensors | {"sekv.offset.1": torch.tensor([0.0, float("nan")])}
    with pytest.raises(ProfileError, match=r"'sekv\.offset\.1' holds values that are not finite"):
        Profile(profile.info, broken)


def test_a_pickle_in_place_of_the_tensors_is_not_run(folder, tmp_path):
    target = tmp_path / "ran"

    class Attack:
        def __reduce__(self):
            return (target.write_text, ("x",))

    torch.save(Attack(), folder / "tensors.safetensors")
    with pytest.raises(ProfileError, match=r"tensors\.safetensors is damaged"):
        Profile.load(folder)
    assert not target.exists()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["profile.json", "tensors.safetensors"]), st.floats(0, 1), st.integers(1, 255), st.booleans())
def test_any_damaged_byte_or_truncation_is_refused(tmp_path, name, place, mask, truncate):
    folder = build().save(tmp_path / "p")
    data = bytearray((folder / name).read_bytes())
    at = min(int(place * len(data)), len(data) - 1)
    if truncate:
        del data[at:]
    else:
        data[at] ^= mask
    if name == "profile.json" and _same_json(bytes(data), (folder / name).read_bytes()):
        return
    (folder / name).write_bytes(data)
    with pytest.raises(ProfileError):
        Profile.load(folder)


def _same_json(data: bytes, original: bytes) -> bool:
    try:
        return json.loads(data) == json.loads(original)
    except ValueError:
        return False


def cell(method, budget, score, length=1024):
    return Choice(method=method, budget=budget, length=length, score=score, samples=50)


def test_best_method_reads_the_nearest_budget():
    table = (cell("sekv", 0.1, 0.9), cell("snapkv", 0.1, 0.4), cell("sekv", 0.5, 0.9), cell("snapkv", 0.5, 0.95))
    profile = build(choices=table)
    assert profile.best_method(0.08) == "sekv"
    assert profile.best_method(0.6) == "snapkv"


def test_equal_scores_go_to_more_questions_then_to_fewer_bytes():
    table = [cell("a", 0.1, 1.0), cell("b", 0.1, 1.0).model_copy(update={"samples": 90}), cell("c", 0.1, 1.0)]
    assert build(choices=tuple(table)).best_method(0.1) == "b"
    moving = [one.model_copy(update={"samples": 9, "moved": moved}) for one, moved in zip(table, (0.3, 0.2, 0.1))]
    assert build(choices=tuple(moving)).best_method(0.1) == "c"


def test_best_method_compares_on_shared_lengths_only():
    table = (cell("sekv", 0.1, 0.8, 4096), cell("sekv", 0.1, 0.9, 1024), cell("snapkv", 0.1, 0.85, 1024))
    assert build(choices=table).best_method(0.1) == "sekv"


def test_what_is_best_where_nothing_was_measured():
    assert build().best_method(0.1) == "sketch"
    assert build(sketch=None).best_method(0.1) == "sekv"


def test_pretrained_round_trip_is_local(tmp_path):
    build().save_pretrained(tmp_path / "p")
    assert Profile.from_pretrained(tmp_path / "p").fingerprint == "f" * 64


def test_an_unreachable_hub_says_what_to_do(tmp_path):
    with pytest.raises(ProfileError, match=r"'someone/none' is neither a local profile folder nor a Hub repository"):
        Profile.from_pretrained("someone/none", local_files_only=True, cache_dir=tmp_path)


def test_upload_sends_the_two_files(monkeypatch):
    sent = {}

    class Api:
        def __init__(self, token=None):
            sent["token"] = token

        def create_repo(self, repo_id, private, exist_ok):
            return type("Repo", (), {"repo_id": repo_id})

        def upload_folder(self, *, folder_path, **options):
            sent["fingerprint"] = Profile.load(folder_path).fingerprint
            return type("Commit", (), {"commit_url": "https://hub/commit/1"})

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    assert build().push_to_hub("me/tiny", token="t") == "https://hub/commit/1"
    assert sent == {"token": "t", "fingerprint": "f" * 64}


def test_a_failed_upload_says_what_to_do(monkeypatch):
    class Api:
        def __init__(self, token=None):
            raise ConnectionError("offline")

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    with pytest.raises(ProfileError, match=r"could not be uploaded to 'me/tiny' .*offline.*hf auth login"):
        build().push_to_hub("me/tiny")
