"""Compiled models and their states as files: the same tokens in a process that has no modelling code."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import LlamaForCausalLM

import semkv
from semkv.errors import ArtifactError, ProfileError
from semkv.profiles.schema import Profile

FRESH = """
import importlib.abc, json, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "transformers.models" or name.startswith("transformers.models."):
            raise ImportError(name + " is not installed here")
sys.meta_path.insert(0, Block())
import torch
import semkv, semkv.api, semkv.loading
def refuse(event, arguments):
    if event in ("pickle.find_class", "marshal.loads") and watching:
        raise AssertionError(event)
watching = []
sys.addaudithook(refuse)
prompt = torch.arange(3, 3 + 2 * 150).reshape(2, 150) * 7 % 97
options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 12, "pad_token_id": 0}
found = {}
for name in sys.argv[2:]:
    watching.append(name)
    compiled = semkv.load(f"{sys.argv[1]}/{name}.semkv")
    state = compiled.load_state(f"{sys.argv[1]}/{name}.state")
    watching.clear()
    torch.manual_seed(5)
    sampled = compiled.generate(prompt, do_sample=True, temperature=1.5, **options).tolist()
    greedy = compiled.generate(prompt, do_sample=False, **options).tolist()
    extended = compiled.extend(state, prompt[:, :5]).double().sum(-1).tolist()
    found[name] = [sampled, greedy, extended]
assert not [name for name in sys.modules if name.startswith("transformers.models.")]
print(json.dumps(found))
"""


def test_a_fresh_process_without_modelling_code_gives_the_same_tokens(compiled, saved, prompt):
    command = [sys.executable, "-c", FRESH, str(saved), *compiled]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout.splitlines()[-1])
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 12, "pad_token_id": 0}
    for name, one in compiled.items():
        sampled, greedy, extended = found[name]
        torch.manual_seed(5)
        assert sampled == one.generate(prompt, do_sample=True, temperature=1.5, **options).tolist()
        assert greedy == one.generate(prompt, do_sample=False, **options).tolist()
        assert sampled != greedy
        logits = one.extend(one.load_state(saved / f"{name}.state"), prompt[:, :5])
        torch.testing.assert_close(
            torch.tensor(extended, dtype=torch.float64), logits.double().sum(-1), rtol=1e-5, atol=1e-4
        )


def test_states_of_another_model_or_method_are_refused(model, profile, compiled, saved, tmp_path):
    other = LlamaForCausalLM(model.config).eval()
    with pytest.raises(ArtifactError, match=r"full\.state: a state of program \w+\.\.\., expected \w+\.\.\."):
        semkv.compile(other).load_state(saved / "full.state")
    with pytest.raises(
        ArtifactError,
        match=r"compiled otherwise: method 'full', expected 'sekv'; budget None, expected [\d.]+; compile",
    ):
        compiled["sekv"].load_state(saved / "full.state")


def test_damaged_and_foreign_profiles_inside_are_refused(model, profile, saved, tmp_path):
    folder = tmp_path / "model.semkv"
    shutil.copytree(saved / "sekv.semkv", folder)
    foreign = Profile(profile.info.model_copy(update={"fingerprint": "0" * 64}), profile.tensors)
    foreign.save(folder / "profile")
    with pytest.raises(ArtifactError, match=r"profile/profile\.json: (sha256|\d+ bytes)"):
        semkv.load(folder)
    with pytest.raises(ProfileError, match="belongs to another model"):
        semkv.compile(model, foreign, method="sekv", budget=0.5)
