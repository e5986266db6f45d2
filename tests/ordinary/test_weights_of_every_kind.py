"""Models whose weights are no plain parameters: quantised, parametrised, pruned, wrapped, offloaded. They run, or are refused by name."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import semkv
from semkv.artifact.fingerprint import model_fingerprint, program_fingerprint
from semkv.capture.device import on_cpu
from semkv.capture.identity import model_identity
from semkv.compiler.pipeline import captured_program
from semkv.config import CompileConfig
from semkv.errors import CaptureError, StaleModelError

VOCAB = 61


def plain(seed: int = 0, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Random weights large enough that tokens depend on what was read long before."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1000,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(4.0)
    return model


def ids(tokens: int = 700, rows: int = 1) -> Tensor:
    return torch.randint(2, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(5))


def generated(model: Any) -> list[list[int]]:
    given = ids()
    return model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=8, do_sample=False, pad_token_id=0
    ).tolist()


@pytest.fixture(scope="module")
def torchao() -> Iterator[Any]:
    """The library, quantisation part; it warns when it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchao.quantization

        yield torchao.quantization


# -- what is compiled ----------------------------------------------------------------------------------------------------


class PackedLinear(nn.Module):
    """Two 4-bit numbers to a byte and a scale per row, in buffers: how hand-written quantised layers keep weights."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 7
        codes = (weight / scale).round().clamp(-8, 7).to(torch.int8) + 8
        self.register_buffer("packed", (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        low, high = (self.packed & 15).to(x.dtype) - 8, (self.packed >> 4).to(x.dtype) - 8
        return F.linear(x, torch.stack([low, high], -1).flatten(1) * self.scale)


class Float8Linear(nn.Module):
    """A parameter of one byte a number, cast where it is used."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def written_by_hand(model: LlamaForCausalLM) -> nn.Module:
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, PackedLinear(getattr(layer.self_attn, name)))
        layer.mlp.up_proj = Float8Linear(layer.mlp.up_proj)
    model.lm_head = PackedLinear(model.lm_head)
    return model


def computed(model: LlamaForCausalLM) -> nn.Module:
    """Weights that modules make of others for each call, and a hook that changes what a module gives."""
    for layer in model.model.layers:
        parametrizations.weight_norm(layer.self_attn.q_proj)
        parametrizations.spectral_norm(layer.mlp.up_proj)
        prune.l1_unstructured(layer.mlp.down_proj, "weight", 0.5)
    model.model.layers[0].mlp.register_forward_hook(lambda module, arguments, result: 1.5 * result)
    return model


def compiled_by_torch(model: LlamaForCausalLM) -> nn.Module:
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    model.model.layers[1].compile(backend="eager")
    return torch.compile(model, backend="eager")


def dispatched(model: LlamaForCausalLM) -> nn.Module:
    from accelerate import dispatch_model

    return dispatch_model(model, device_map={"": "cpu"}, force_hooks=True)


def int8(model: LlamaForCausalLM, torchao: Any) -> nn.Module:
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    return model


def int8_tied(model: LlamaForCausalLM, torchao: Any) -> nn.Module:
    """One quantised table under two names."""
    config = torchao.IntxWeightOnlyConfig(weight_dtype=torch.int8)
    torchao.quantize_(model, config, filter_fn=lambda module, name: isinstance(module, nn.Embedding))
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def float8(model: LlamaForCausalLM, torchao: Any) -> nn.Module:
    torchao.quantize_(model, torchao.Float8WeightOnlyConfig())
    return model


def int4(model: LlamaForCausalLM, torchao: Any) -> nn.Module:
    torchao.quantize_(model, torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4))
    return model


def int8_activations_int4(model: LlamaForCausalLM, torchao: Any) -> nn.Module:
    config = torchao.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=torchao.PerGroup(32)
    )
    torchao.quantize_(model, config)
    return model


def int8_dispatched(model: LlamaForCausalLM, torchao: Any) -> nn.Module:
    return dispatched(int8(model, torchao))


def slow(kind: Callable[..., nn.Module]) -> Any:
    return pytest.param(kind, marks=pytest.mark.slow)


KINDS = (written_by_hand, computed, slow(dispatched), slow(compiled_by_torch))
QUANTISED = (int8_dispatched, float8, slow(int8), slow(int8_tied), slow(int4), slow(int8_activations_int4))
"""What of torchao runs on a CPU: `Int4WeightOnlyConfig` and float8 activations do not."""


def check_compiled(model: nn.Module, folder: Path) -> semkv.CompiledModel:
    """The model's own logits and text at `full`, and of a method that drops tokens and has none to drop; what it answers where it
    drops is something else, before and after the disk. Returns the one at `full`."""
    model.eval()
    with torch.no_grad():
        logits = model(ids()).logits
    text = generated(model)
    full = semkv.compile(model)
    torch.testing.assert_close(full(ids()).logits[:, -1], logits[:, -1], rtol=1e-4, atol=1e-4)
    assert generated(full) == text
    assert generated(full.with_method("streaming_llm", 900)) == text
    small = full.with_method("streaming_llm", 0.2)
    answers = [continued(small), continued(full)]
    assert (answers[0] - answers[1]).abs().max() > 0.01
    small.save(folder / "artifact")
    loaded = semkv.load(folder / "artifact")
    assert loaded.fingerprint == model_fingerprint(model)
    torch.testing.assert_close(continued(loaded), answers[0], rtol=1e-5, atol=1e-5)
    assert program_fingerprint(loaded.program) == program_fingerprint(small.program)
    return full


def continued(compiled: semkv.CompiledModel) -> Tensor:
    """Logits of a token after a prompt that was compressed."""
    return compiled.extend(compiled.prefill(ids()), ids(1))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_model_answers_as_it_does_without_compilation(kind: Callable[[Any], nn.Module], tmp_path: Path):
    check_compiled(kind(plain()), tmp_path)


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.__name__)
def test_a_quantised_model_answers_as_it_does_without_compilation(
    kind: Callable[[Any, Any], nn.Module], torchao: Any, tmp_path: Path
):
    check_compiled(kind(plain(), torchao), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [int8, float8, int4], ids=lambda kind: kind.__name__)
def test_a_quantised_model_in_bfloat16(kind: Callable[[Any, Any], nn.Module], torchao: Any):
    model = kind(plain(dtype=torch.bfloat16), torchao)
    with torch.no_grad():
        logits = model(ids()).logits[:, -1]
    compiled = semkv.compile(model)
    assert compiled.dtype == torch.bfloat16
    torch.testing.assert_close(compiled(ids()).logits[:, -1], logits, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
def test_quantised_activations_are_those_of_the_model(torchao: Any):
    """A rounding of attention's sums may move an activation to the next code, so logits are close and no more."""
    model = plain()
    torchao.quantize_(model, torchao.Int8DynamicActivationInt8WeightConfig())
    with torch.no_grad():
        logits = model(ids()).logits[:, -1]
        others = plain()(ids()).logits[:, -1]
    compiled = semkv.compile(model)(ids()).logits[:, -1]
    distance = (others - logits).abs().max()
    assert (compiled - logits).abs().max() < 0.1 * distance


@pytest.mark.slow
def test_a_checkpoint_that_transformers_quantises_while_it_loads(torchao: Any, tmp_path: Path):
    from transformers import TorchAoConfig

    plain().save_pretrained(tmp_path / "model")
    config = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", quantization_config=config, dtype=torch.float32, device_map="auto"
    )
    assert type(model.model.layers[0].mlp.up_proj.weight).__name__ == "Int8Tensor"
    check_memory(check_compiled(model, tmp_path), model)


def check_memory(compiled: semkv.CompiledModel, model: nn.Module) -> None:
    """The program holds the numbers that the model holds, and no dequantised ones."""
    weight = model.model.layers[0].self_attn.q_proj.weight
    held = compiled.program.decode.get_parameter("model.layers.0.self_attn.q_proj.weight.qdata")
    assert held.dtype == torch.int8
    assert held.data_ptr() == weight.qdata.data_ptr()
    graphs = (compiled.program.body, compiled.program.head, compiled.program.prefill, compiled.program.decode)
    sizes = {x.data_ptr(): x.nbytes for graph in graphs for x in graph.state_dict().values()}
    assert sum(sizes.values()) < 0.6 * sum(x.nbytes for x in plain().parameters())


@pytest.mark.slow
def test_the_cache_of_captured_programs_takes_quantised_and_dispatched_models(
    torchao: Any, tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("SEMKV_CACHE", str(tmp_path))
    model = int8_dispatched(plain(), torchao)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        semkv.compile(model, config=CompileConfig(cache=True))
        (entry,) = tmp_path.glob("*.safetensors")
        assert entry.stat().st_size < 500_000
        again = semkv.compile(model, config=CompileConfig(cache=True))
    assert [entry] == list(tmp_path.glob("*.safetensors"))
    assert generated(again) == generated(model)


def test_a_wrapped_model_is_the_model_inside():
    def refuse(graph: Any, examples: Any) -> Any:
        raise AssertionError("a capture compiles nothing")

    model = plain()
    model.model.layers[0].mlp = torch.compile(model.model.layers[0].mlp, backend=refuse)
    model.model.layers[1].compile(backend=refuse)
    program = captured_program(nn.DataParallel(torch.compile(model, backend=refuse)))
    assert {id(x) for x in program.body.parameters()} <= {id(x) for x in model.parameters()}
    assert model_fingerprint(torch.compile(nn.DataParallel(model), backend="eager")) == model_fingerprint(model)


def test_a_copy_for_the_cpu_is_without_hooks_that_send_elsewhere(torchao: Any, monkeypatch: pytest.MonkeyPatch):
    """Another device is played by the CPU, and where hooks send to by `meta`, so that a hook that stayed would fail."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = int8(plain(), torchao)
    for module in model.modules():
        add_hook_to_module(module, hook := AlignDevicesHook(execution_device="cpu"))
        hook.execution_device = "meta"
    monkeypatch.setattr("semkv.capture.device.device_of", lambda _: torch.device("cuda"))
    monkeypatch.setattr(Tensor, "cpu", lambda self: self.clone())
    source, originals = on_cpu(model)
    assert hasattr(model, "_hf_hook")
    assert not any(hasattr(module, "_hf_hook") for module in source.modules())
    torch.testing.assert_close(source(ids()).logits, int8(plain(), torchao)(ids()).logits)
    own = model.lm_head.weight
    assert {x.data_ptr() for x in originals.values()} >= {own.qdata.data_ptr(), own.scale.data_ptr()}


def test_a_compiled_model_follows_new_quantised_weights(torchao: Any):
    model = int8(plain(), torchao)
    compiled = semkv.compile(model)
    small = compiled.with_method("streaming_llm", 0.2)
    before = compiled(ids()).logits[:, -1]
    model.load_state_dict(int8(plain(seed=1), torchao).state_dict(), assign=True)
    with torch.no_grad():
        expected = model(ids()).logits[:, -1]
    torch.testing.assert_close(compiled(ids()).logits[:, -1], expected, rtol=1e-4, atol=1e-4)
    assert (expected - before).abs().max() > 0.1
    torch.testing.assert_close(small(ids()).logits[:, -1], expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.scale.mul_(3)
        changed = model(ids()).logits[:, -1]
    torch.testing.assert_close(compiled(ids()).logits[:, -1], changed, rtol=1e-4, atol=1e-4)
    assert compiled.fingerprint == model_fingerprint(model)
    assert (expected - changed).abs().max() > 0.01


@pytest.mark.slow
def test_a_model_that_is_quantised_after_it_was_compiled_is_refused(torchao: Any):
    model = plain()
    compiled = semkv.compile(model)
    int8(model, torchao)
    with pytest.raises(
        StaleModelError, match=r"q_proj\.weight: Parameter -> Int8Tensor.*compiled\.refresh\(\) captures it"
    ):
        compiled(ids())
    compiled.refresh()
    assert generated(compiled) == generated(model)


# -- fingerprints and identities -----------------------------------------------------------------------------------------


def test_fingerprints_of_quantised_models_tell_them_apart(torchao: Any):
    model = int8(plain(), torchao)
    digest = model_fingerprint(model)
    assert digest == model_fingerprint(int8(plain(), torchao)) == model_fingerprint(copy.deepcopy(model))
    others = [plain(), int8(plain(seed=1), torchao), int4(plain(), torchao), float8(plain(), torchao)]
    assert len({digest, *map(model_fingerprint, others)}) == 5
    changed = int8(plain(), torchao)
    changed.model.layers[1].mlp.up_proj.weight.scale.mul_(1.01)
    assert model_fingerprint(changed) != digest


def test_a_fingerprint_is_the_same_after_a_checkpoint_and_in_another_process(torchao: Any, tmp_path: Path):
    model = int8(plain(), torchao)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    code = (
        "import torch, torchao, warnings; from semkv.artifact.fingerprint import weights_digest\n"
        "from torchao.quantization import Int8Tensor; from torch.serialization import safe_globals\n"
        f"weights = torch.load({str(tmp_path / 'weights.pt')!r}, weights_only=False)\n"
        "print(weights_digest(weights))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split()[-1] == model_fingerprint(model)


def test_fingerprints_of_plain_models_are_what_they_were():
    """Committed profiles carry fingerprints."""
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) + number)
    assert model_fingerprint(model) == "361e8de9b5674ea24a62eeb1c0775203fdacc8adf0daed4dda202553eab311fa"


def test_packed_weights_have_a_fingerprint_though_no_program():
    quantised = dynamic(plain())
    assert model_fingerprint(quantised) == model_fingerprint(dynamic(plain()))
    assert model_fingerprint(quantised) != model_fingerprint(dynamic(plain(seed=1)))


def test_identities_tell_apart_what_computes_with_the_same_weights(torchao: Any):
    weights, activations = plain(), plain()
    torchao.quantize_(weights, torchao.Int8WeightOnlyConfig())
    torchao.quantize_(activations, torchao.Int8DynamicActivationInt8WeightConfig())
    assert model_fingerprint(weights) == model_fingerprint(activations)
    assert model_identity(weights) != model_identity(activations)
    assert model_identity(weights) == model_identity(int8(plain(), torchao))


def test_a_hook_for_all_modules_leaves_a_model_without_identity():
    handle = nn.modules.module.register_module_forward_hook(lambda module, arguments, result: None)
    try:
        with pytest.raises(CaptureError, match="there are hooks for all modules, whose code is not known; remove them"):
            model_identity(plain())
    finally:
        handle.remove()


# -- what is refused, by name --------------------------------------------------------------------------------------------


def dynamic(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def test_packed_weights_are_refused_with_what_to_use_instead():
    expected = (
        r"module 'model\.layers\.0\.self_attn\.q_proj\._packed_params' \(LinearPackedParams\) keeps its weights packed in "
        r"'_packed_params'.*quantise with torchao instead"
    )
    with pytest.raises(CaptureError, match=expected):
        semkv.compile(dynamic(plain()))


class Moving(MutableMapping):
    """Parameters that are elsewhere until they are asked for, as compressed-tensors keeps them."""

    def __init__(self, held):
        self.held = held

    def __getitem__(self, name):
        return self.held[name]

    def __setitem__(self, name, value):
        self.held[name] = value

    def __delitem__(self, name):
        del self.held[name]

    def __iter__(self):
        return iter(self.held)

    def __len__(self):
        return len(self.held)


def test_parameters_that_move_are_refused_by_the_name_of_their_module():
    model = plain()
    module = model.model.layers[1].mlp.up_proj
    module.__dict__["_parameters"] = Moving(module._parameters)
    assert model(ids()).logits.isfinite().all()
    expected = r"module 'model\.layers\.1\.mlp\.up_proj' \(Linear\) keeps its parameters in a Moving of tests, .*another format"
    with pytest.raises(CaptureError, match=expected):
        semkv.compile(model)


def split_over_disk(folder: Path) -> nn.Module:
    plain().save_pretrained(folder / "model")
    parts = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    places = dict.fromkeys(parts, "cpu") | {"model.layers.1": "disk"}
    return AutoModelForCausalLM.from_pretrained(
        folder / "model", device_map=places, offload_folder=str(folder / "offload")
    ).eval()


def test_offloaded_weights_are_refused_by_the_name_of_their_module(tmp_path: Path):
    from accelerate import cpu_offload

    expected = r"module '{}' \({}\) has its weights offloaded by accelerate.*without device_map and offload"
    model = split_over_disk(tmp_path)
    with pytest.raises(CaptureError, match=expected.format(r"model\.layers\.1\.self_attn\.q_proj", "Linear")):
        semkv.compile(model)
    with pytest.raises(CaptureError, match=r"weight 'model\.layers\.1\..*' has no data \(device meta\): load"):
        model_fingerprint(model)
    with pytest.raises(CaptureError, match=expected.format(r"model\.embed_tokens", "Embedding")):
        semkv.compile(cpu_offload(plain(), execution_device="cpu"))


def torchscript(model: LlamaForCausalLM) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.model.layers[1].mlp = torch.jit.trace(model.model.layers[1].mlp, (torch.randn(1, 3, 32),)).eval()


def sparse(model: LlamaForCausalLM) -> None:
    linear = model.model.layers[1].mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.detach().to_sparse(), requires_grad=False)


class OwnParameter(nn.Parameter):
    """As those of bitsandbytes: computes in its own way, and does not say what it holds."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def own_parameter(model: LlamaForCausalLM) -> None:
    linear = model.model.layers[1].mlp.up_proj
    linear.weight = OwnParameter(linear.weight.detach(), requires_grad=False)


def two_devices(model: LlamaForCausalLM) -> None:
    model.model.layers[1].register_buffer("elsewhere", torch.empty(2, device="meta"))


def changing_hook(model: LlamaForCausalLM) -> None:
    from accelerate.hooks import LayerwiseCastingHook, add_hook_to_module

    hook = LayerwiseCastingHook(torch.float16, torch.float32, non_blocking=False)
    add_hook_to_module(model.model.layers[1].mlp.up_proj, hook)


class Branching(nn.Module):
    """Its Python looks at numbers, as layers that choose a kernel by outliers do."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if float(x.abs().max()) > 6 else self.linear(x) + 0


def branching(model: LlamaForCausalLM) -> None:
    model.model.layers[1].mlp.up_proj = Branching(model.model.layers[1].mlp.up_proj).eval()


REFUSED = [
    (
        torchscript,
        r"module 'model\.layers\.1\.mlp' \(TopLevelTracedModule\) is TorchScript.*compile the model that it was made from",
    ),
    (
        sparse,
        r"module 'model\.layers\.1\.mlp\.up_proj' \(Linear\): its weight 'weight' is a Parameter in the form torch\.sparse_coo",
    ),
    (
        own_parameter,
        r"'model\.layers\.1\.mlp\.up_proj' \(Linear\): its weight 'weight' is a OwnParameter, which computes in its own way",
    ),
    (
        two_devices,
        r"several devices: 'model\.embed_tokens\.weight' on cpu, 'model\.layers\.1\.elsewhere' on meta; load it on one",
    ),
    (
        changing_hook,
        r"'model\.layers\.1\.mlp\.up_proj' \(Linear\) has a LayerwiseCastingHook of accelerate, which changes weights",
    ),
    pytest.param(branching, r"cannot capture.*in model\.layers\.1\.mlp\.up_proj \(Branching\)", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=lambda given: getattr(given, "__name__", ""))
def test_what_no_graph_can_read_is_refused_by_the_name_of_its_module(change: Callable[[Any], None], message: str):
    model = plain()
    change(model)
    with pytest.raises(CaptureError, match=f"(?s){message}"):
        semkv.compile(model)


def test_sharded_weights_are_refused():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    model = plain()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        linear = model.model.layers[1].mlp.up_proj
        linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), init_device_mesh("cpu", (1,))))
        with pytest.raises(
            CaptureError, match=r"up_proj' \(Linear\): its weight 'weight' is a DTensor, sharded over processes; load"
        ):
            semkv.compile(model)
    finally:
        dist.destroy_process_group()
