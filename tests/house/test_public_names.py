"""The names that users may rely on, and what importing them costs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

import semkv

PUBLIC = {
    "semkv": ["CompileConfig", "CompiledModel", "Profile", "State", "bundled", "compile", "explain", "load"],
    "semkv.errors": [
        "ArtifactError",
        "BudgetError",
        "CapacityError",
        "CaptureError",
        "ConfigError",
        "InputError",
        "ProcessError",
        "ProfileError",
        "SemkvError",
        "SpecError",
        "StaleModelError",
        "StateError",
        "StepError",
    ],
    "semkv.methods": [
        "CAKE",
        "H2O",
        "METHODS",
        "ChunkKV",
        "CompressKV",
        "Full",
        "Method",
        "PyramidKV",
        "SeKV",
        "SemantiCache",
        "SnapKV",
        "StreamingLLM",
        "delimiter_ids",
        "find_method",
    ],
    "semkv.profiles.calibration": ["CalibrationSettings", "bundled_data", "calibrate", "text_data"],
    "semkv.compiler.pipeline": ["LOWER", "UNDERSTAND", "captured_program", "lower", "run_passes"],
    "semkv.passes.base": ["Pass", "PassOptions"],
    "semkv.ir.site": ["AttentionSite"],
    "semkv.ir.program": ["Program"],
    "semkv.ir.memory": ["Entries", "Memory", "entries", "record"],
    "semkv.bundled": ["load", "profile"],
    "semkv.profiles.bundled.tasks": ["FAMILIES", "make_haystack", "make_text"],
}
MEMBERS = {
    "CompiledModel": [
        "begin",
        "compress",
        "device",
        "extend",
        "generate",
        "load_state",
        "prefill",
        "prefill_record",
        "prompt_inputs",
        "refresh",
        "release",
        "request_bytes",
        "save",
        "step",
        "with_method",
    ],
    "State": ["fork", "full_bytes", "get_seq_length", "kv_dtype", "lengths", "nbytes", "save", "select", "stats"],
    "Profile": [
        "best_method",
        "check_model",
        "fingerprint",
        "from_pretrained",
        "load",
        "push_to_hub",
        "save",
        "save_pretrained",
    ],
    "CompileConfig": ["extend_chunk", "host", "kv_dtype", "method_options", "page_size", "prefill_chunk"],
}


def test_all_of_semkv() -> None:
    assert sorted(semkv.__all__) == PUBLIC["semkv"]
    assert set(semkv.__all__) <= set(dir(semkv))


def test_no_module_hides_a_public_function() -> None:
    # Importing a submodule sets it as an attribute of its package, over the lazy name.
    for name in set(semkv.__all__) - {"bundled"}:
        assert importlib.util.find_spec(f"semkv.{name}") is None, f"semkv.{name} would be the module once imported"


@pytest.mark.parametrize("module", sorted(PUBLIC))
def test_names_of_documented_modules(module: str) -> None:
    found = importlib.import_module(module)
    missing = [name for name in PUBLIC[module] if not hasattr(found, name)]
    assert missing == [], f"{module} lost {missing}: users rely on these names"


@pytest.mark.parametrize("name", sorted(MEMBERS))
def test_members_of_public_classes(name: str) -> None:
    found = getattr(semkv, name)
    known = {*dir(found), *getattr(found, "model_fields", {})}
    assert [member for member in MEMBERS[name] if member not in known] == []


def test_methods_by_name() -> None:
    from semkv.methods import METHODS

    assert list(METHODS)[:4] == ["full", "streaming_llm", "snapkv", "sekv"]
    assert {"h2o", "pyramidkv", "chunkkv", "cake", "semanticache", "compresskv", "sentencekv", "heterocache"} <= set(
        METHODS
    )


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'semkv' has no attribute 'kompile'"):
        semkv.kompile  # noqa: B018


def _loaded_after(code: str) -> set[str]:
    printed = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sorted(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(printed.stdout.split())


def test_importing_semkv_is_cheap() -> None:
    loaded = _loaded_after("import semkv, semkv.errors")
    assert not loaded & {
        "torch",
        "transformers",
        "numpy",
        "pydantic",
        "rich",
        "typer",
        "triton",
        "matplotlib",
        "networkx",
    }


def test_profiles_load_without_triton_and_modelling_code() -> None:
    loaded = _loaded_after("import semkv.profiles.schema")
    assert not loaded & {"triton", "transformers.modeling_utils", "semkv.kernels", "semkv.runtime"}
