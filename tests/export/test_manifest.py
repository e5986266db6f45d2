"""What `step.json` says is what the file and the states have."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from semkv.compiled import CompiledModel
from semkv.errors import ArtifactError, ConfigError
from tests.export.steps import reserved

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="semkv[onnx] is not installed",
)


@pytest.fixture(scope="module")
def folder(tiny: CompiledModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.export(tmp_path_factory.mktemp("export") / "step")


def test_it_says_every_input_and_output(folder: Path) -> None:
    import onnx

    step = json.loads((folder / "step.json").read_text())
    graph = onnx.load(str(folder / step["file"]), load_external_data=False).graph
    for told, values in ((step["inputs"], graph.input), (step["outputs"], graph.output)):
        assert [x["name"] for x in told] == [value.name for value in values]
        for x, value in zip(told, values):
            own = value.type.tensor_type
            dtype = onnx.helper.tensor_dtype_to_np_dtype(own.elem_type)
            assert x["dtype"] == str(dtype)
            shape = [dim.dim_param or dim.dim_value for dim in own.shape.dim]
            assert x["shape"] == shape, x["name"]
    symbols = {size for x in step["inputs"] for size in x["shape"] if isinstance(size, str)}
    assert symbols == {"rows", "layers_0_capacity"} == set(step["sizes"])
    assert all(x["says"] for x in step["inputs"])
    assert {x["replaces"] for x in step["outputs"]} - {None} <= {x["name"] for x in step["inputs"]}
    assert [x["name"] for x in step["outputs"] if x["replaces"] is None] == ["logits"]
    assert list(step["numbers"]) == ["at", "count", "room", "start", "shift"]
    assert step["opset"] == 20


def test_a_state_has_the_inputs_by_name(tiny: CompiledModel, folder: Path, tmp_path: Path) -> None:
    state = reserved(tiny, (90, 61), 12)
    path = tiny.export_state(state, tmp_path / "talk.safetensors", step=folder)
    step = json.loads((folder / "step.json").read_text())
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "semkv-step-state", "version": "1", "steps": "12"}
        assert set(file.keys()) == {x["name"] for x in step["inputs"]} | {"logits"}
        assert torch.equal(file.get_tensor("logits"), state.logits)
        assert file.get_tensor("positions").tolist() == [[90], [61]]
        assert file.get_tensor("numbers")[0, 0].tolist() == [90, 61]
        for x in step["inputs"]:
            tensor = file.get_tensor(x["name"])
            assert str(tensor.dtype) == f"torch.{x['dtype']}"
            fixed = [(size, have) for size, have in zip(x["shape"], tensor.shape) if isinstance(size, int)]
            assert all(size == have for size, have in fixed)
    assert state.reserved == 12


def test_states_that_do_not_fit_are_refused(tiny: CompiledModel, folder: Path, tmp_path: Path) -> None:
    state = tiny.prefill(torch.zeros(1, 20, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"call state.reserve"):
        tiny.export_state(state, tmp_path / "x", step=folder)
    state.reserve(2)
    with pytest.raises(ArtifactError, match=r"step\.json"):
        tiny.export_state(state, tmp_path / "x")
    other = tiny.with_method("streaming_llm", 0.5)
    with pytest.raises(ArtifactError, match="a step of 'full'"):
        other.export_state(other.prefill(torch.zeros(1, 20, dtype=torch.int64)), tmp_path / "x", step=folder)
    with pytest.raises(ConfigError, match="another compiled model"):
        tiny.with_method("full").export_state(state, tmp_path / "x", step=folder)
    (tmp_path / "step.json").write_text('{"format": "other"}')
    with pytest.raises(ArtifactError, match="not a step of version 1"):
        tiny.export_state(state, tmp_path / "x")
    assert not (tmp_path / "x").exists()
