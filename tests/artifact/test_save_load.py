"""A saved program loads as it was, without pickle; anything else is refused, by name."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
from importlib.metadata import version

import pytest
import torch

from semkv.artifact.fingerprint import program_fingerprint
from semkv.artifact.load import load_program
from semkv.artifact.save import save_program
from semkv.config import CompileConfig
from semkv.errors import ArtifactError, BudgetError, ConfigError
from semkv.ir.plain_memory import PlainMemory


@pytest.fixture
def saved(program, tmp_path):
    return save_program(program, tmp_path / "model.semkv", method="full")


def test_round_trip_of_program_and_facts(program, run_program, tmp_path):
    path = save_program(
        program,
        tmp_path / "deep" / "model.semkv",
        method="sekv",
        method_options={"share": 0.3},
        budget=0.1,
        config=CompileConfig(page_size=8),
        model_fingerprint="f" * 64,
        model_config={"model_type": "llama", "rope": {"theta": 1e4}},
        generation_config={"eos_token_id": [1, 2], "temperature": 0.7},
        extra={"note": "from a test"},
    )
    loaded, manifest = load_program(path)
    assert loaded.evolve(body=None, head=None, prefill=None, extend=None, decode=None) == program.evolve(
        body=None, head=None, prefill=None, extend=None, decode=None
    )
    ids = torch.randint(0, program.vocab_size, (2, 12))
    expected = run_program(program, ids, PlainMemory(program.sites))
    assert torch.equal(run_program(loaded, ids, PlainMemory(loaded.sites)), expected)
    assert program_fingerprint(loaded) == program_fingerprint(program) == manifest.program_fingerprint
    assert manifest.compile.method == "sekv"
    assert manifest.compile.method_options == {"share": 0.3}
    assert manifest.compile.budget == 0.1
    assert manifest.compile.config == CompileConfig(page_size=8)
    assert manifest.model.fingerprint == "f" * 64
    assert manifest.model.config == {"model_type": "llama", "rope": {"theta": 1e4}}
    assert manifest.model.generation_config == {"eos_token_id": [1, 2], "temperature": 0.7}
    assert manifest.extra == {"note": "from a test"}
    assert manifest.profile_path is None
    assert manifest.versions.torch == version("torch")  # without the build that `torch.__version__` may add


def test_budget_in_tokens_stays_whole(program, tmp_path):
    path = save_program(program, tmp_path / "a", method="snapkv", budget=64)
    budget = load_program(path)[1].compile.budget
    assert budget == 64
    assert type(budget) is int
    with pytest.raises(BudgetError, match=r"budget 2\.0"):
        save_program(program, tmp_path / "b", method="snapkv", budget=2.0)
    assert not (tmp_path / "b").exists()


def test_tied_and_shared_weights_are_one(saved):
    loaded, manifest = load_program(saved)
    assert loaded.body.get_parameter("embed.weight") is loaded.head.get_parameter("lm_head.weight")
    assert loaded.body.get_parameter("layers.1.q.weight") is loaded.decode.get_parameter("layers.1.q.weight")
    assert manifest.tensors["embed.weight"].stored == manifest.tensors["lm_head.weight"].stored
    values = sum(p.numel() for p in {id(p): p for p in (*loaded.body.parameters(), *loaded.head.parameters())}.values())
    assert (saved / "weights.safetensors").stat().st_size < values * 4 + 4096


def test_equal_names_of_different_tensors_in_two_graphs(program, tmp_path):
    other = program.head.get_parameter("lm_head.weight").detach().clone() * 2
    program.head.lm_head.weight = torch.nn.Parameter(other, requires_grad=False)
    program.head.lm_head.register_buffer("spare", None)
    program.body.register_buffer("shift", torch.ones(1))
    program.head.register_buffer("shift", torch.zeros(1))
    for module in (program.body, program.head):
        output = module.graph.output_node()
        with module.graph.inserting_before(output):
            shift = module.graph.get_attr("shift")
            output.args = (module.graph.call_function(torch.ops.aten.add.Tensor, (output.args[0], shift)),)
        module.recompile()
    loaded, manifest = load_program(save_program(program, tmp_path / "a", method="full"))
    assert loaded.body.get_buffer("shift").item() == 1
    assert loaded.head.get_buffer("shift").item() == 0
    assert set(manifest.tensors) >= {"shift", "shift@head"}


def test_nothing_on_the_way_back_unpickles(saved, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch.export, "load", refuse)
    load_program(saved)


def test_seal_is_what_sha256sum_reads(saved):
    if shutil.which("sha256sum") is None:
        pytest.skip("sha256sum is not installed")
    subprocess.run(["sha256sum", "--check", "--strict", "manifest.sha256"], cwd=saved, check=True, capture_output=True)


def test_saving_again_replaces_and_leaves_nothing_behind(program, saved):
    loaded, _ = load_program(saved)
    save_program(program, saved, method="sekv", budget=0.5)
    assert load_program(saved)[1].compile.method == "sekv"
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
    # The first load maps the file that was replaced: its weights stay readable.
    assert torch.equal(loaded.body.get_parameter("embed.weight"), program.body.get_parameter("embed.weight"))


def test_failed_save_keeps_what_was_there(program, saved):
    class Broken:
        def save(self, path):
            raise RuntimeError("no space")

    with pytest.raises(RuntimeError, match="no space"):
        save_program(program, saved, method="sekv", profile=Broken())
    assert load_program(saved)[1].compile.method == "full"
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_other_folders_and_files_are_not_overwritten(program, saved, tmp_path):
    full = tmp_path / "thesis"
    full.mkdir()
    (full / "chapter.tex").write_text("years of work")
    with pytest.raises(
        ArtifactError, match=r"thesis: a folder that holds chapter\.tex is not overwritten; choose another path"
    ):
        save_program(program, full, method="full")
    (saved / "notes.txt").write_text("mine")
    with pytest.raises(ArtifactError, match=r"holds notes\.txt is not overwritten"):
        save_program(program, saved, method="full")
    with pytest.raises(ArtifactError, match="exists and is not a folder"):
        save_program(program, full / "chapter.tex", method="full")
    assert (full / "chapter.tex").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    save_program(program, tmp_path / "empty", method="full")


def test_profile_travels_inside(program, tmp_path):
    class Profile:
        def save(self, path):
            path.mkdir()
            (path / "profile.json").write_text("{}")

    path = save_program(program, tmp_path / "a", method="sekv", profile=Profile())
    manifest = load_program(path)[1]
    assert manifest.profile_path == path / "profile"
    assert "profile/profile.json" in manifest.files
    again = save_program(program, tmp_path / "b", method="sekv", profile=manifest.profile_path)
    assert (again / "profile" / "profile.json").read_text() == "{}"
    (path / "profile" / "profile.json").write_text("[]")
    with pytest.raises(ArtifactError, match=r"profile/profile\.json: sha256 .* expected"):
        load_program(path)


def test_paths_that_cannot_be_written_and_devices_that_are_not_there(program, saved, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match=r"file/model: cannot be written \(.*\); choose another path or make room"):
        save_program(program, tmp_path / "file" / "model", method="full")
    with pytest.raises(ConfigError, match=r"device 'abacus' cannot be used here \(.*\); pass another"):
        load_program(saved, "abacus")


def rewrite(folder, change):
    """Change the manifest and seal it again, as its author could."""
    import hashlib

    value = json.loads((folder / "manifest.json").read_text())
    change(value)
    data = json.dumps(value).encode()
    (folder / "manifest.json").write_bytes(data)
    (folder / "manifest.sha256").write_text(f"{hashlib.sha256(data).hexdigest()}  manifest.json\n")


REFUSED = {
    "another schema": (lambda m: m.update(schema=99), r"schema 99, expected 3; compile and save the model again"),
    "another format": (lambda m: m.update(format="other"), "not the manifest of a semkv-artifact"),
    "an unknown field": (lambda m: m.update(run="code"), "run = 'code': Extra inputs are not permitted"),
    "a method budget": (lambda m: m["compile"].update(budget=7.5), r"compile\.budget"),
    "an unknown setting": (
        lambda m: m["compile"]["config"].update(fetch=True),
        r"setting fetch = True: there is no such",
    ),
    "a page of 1000": (lambda m: m["compile"]["config"].update(page_size=1000), r"page_size"),
    "a file outside": (
        lambda m: m["files"].update({"../x": {"bytes": 1, "sha256": "0" * 64}}),
        "not a plain relative one",
    ),
    "an absolute file": (
        lambda m: m["files"].update({"/etc/x": {"bytes": 1, "sha256": "0" * 64}}),
        "not a plain relative",
    ),
    "a missing file": (lambda m: m["files"].pop("weights.safetensors"), "does not list weights.safetensors"),
    "a graph less": (lambda m: m["program"]["graphs"].remove("extend"), "extend: missing at stage lowered"),
    "a graph twice": (lambda m: m["program"]["graphs"].__setitem__(2, "head"), "once each"),
    "a site less": (
        lambda m: m["program"]["sites"].pop(),
        r"record is called for sites \[0, 1\], expected \[0\]",
    ),
    "a site's heads": (lambda m: m["program"]["sites"][0].update(q_heads=3), "site 0 has q_heads"),
    "a site's scale": (lambda m: m["program"]["sites"][0].update(scale="x"), "site 0: scale"),
    "a tensor less": (lambda m: m["tensors"].pop("embed.weight"), "'embed.weight' is not among the stored ones"),
    "a tensor of another shape": (
        lambda m: m["tensors"]["embed.weight"].update(shape=[1, 2]),
        r"expected \[29, 16\] at 0",
    ),
    "another dtype": (lambda m: m["program"].update(dtype="int4"), r"program\.dtype"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_manifests_that_disagree_with_the_files_are_refused(saved, name):
    change, text = REFUSED[name]
    rewrite(saved, change)
    with pytest.raises(ArtifactError, match=text):
        load_program(saved)


@pytest.mark.parametrize("value", [None, True, False])
def test_a_setting_that_is_gone_is_left_out(saved, value):
    config = load_program(saved)[1].compile.config
    rewrite(saved, lambda m: m["compile"]["config"].update(prefetch=value))
    assert load_program(saved)[1].compile.config == config


def test_folders_that_are_no_artifacts_are_refused(tmp_path, saved):
    with pytest.raises(ArtifactError, match="no such folder"):
        load_program(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match=r"manifest\.json: no such file"):
        load_program(tmp_path / "empty")
    (saved / "manifest.json").write_text((saved / "manifest.json").read_text().replace('"full"', '"sekv"'))
    with pytest.raises(ArtifactError, match=r"its hash is not the one in manifest\.sha256; the file is damaged"):
        load_program(saved)


def test_parts_of_another_model_are_refused(saved, other_program, tmp_path):
    other = save_program(other_program, tmp_path / "other", method="full")
    shutil.copy(other / "weights.safetensors", saved / "weights.safetensors")
    with pytest.raises(ArtifactError, match=r"weights\.safetensors: sha256 .*, expected .*; the file is damaged"):
        load_program(saved)


@pytest.mark.parametrize("name", ["programs/body.json", "manifest.json"])
@pytest.mark.parametrize(
    "filler", ["[" * 200_000, "[" + "0," * 400_000 + "0]", '{"a":' * 900 + "1" + "}" * 900, "9" * 10_000, "\xff"]
)
def test_files_full_of_nonsense_are_refused_in_a_few_words(saved, name, filler):
    """Deep, long and malformed documents, sealed like good ones."""
    import hashlib

    path = saved / name
    for data in (filler, '{"format": "semkv-artifact", "schema": 1, "nodes": %s}' % filler):  # noqa: UP031
        path.write_bytes(data.encode("latin-1"))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if name == "manifest.json":
            (saved / "manifest.sha256").write_text(f"{digest}  manifest.json\n")
        else:
            rewrite(saved, lambda m: m["files"][name].update(sha256=digest, bytes=path.stat().st_size))  # noqa: B023
        with pytest.raises(ArtifactError) as caught:
            load_program(saved)
        assert str(path) in str(caught.value)
        assert len(str(caught.value)) < 2000
