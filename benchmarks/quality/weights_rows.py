"""The rows of `weights_table`: a small model of random weights, quantised, adapted or offloaded by a library's own functions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

VOCAB, PROMPT = 256, 200
CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1000,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Row:
    """needs: packages. make: the model, with a folder to keep checkpoints in."""

    needs: tuple[str, ...]
    make: Callable[[Path], Any]


def plain(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Random weights large enough that tokens depend on what was read long before."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(4.0)
    return model


def prompt() -> Tensor:
    """Ids [1, PROMPT]."""
    return torch.randint(2, VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(5))


def checkpoint(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    plain(dtype).save_pretrained(folder / "model")
    return folder / "model"


def loaded(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """A checkpoint that transformers quantises while it loads it."""
    return AutoModelForCausalLM.from_pretrained(checkpoint(folder, dtype), dtype=dtype, **options)


def torchao(config: str, dtype: torch.dtype = torch.float32, **options: Any) -> Row:
    def make(_: Path) -> nn.Module:
        import torchao.quantization as library

        model = plain(dtype)
        library.quantize_(model, getattr(library, config)(**options))
        return model

    return Row(("torchao",), make)


def torchao_loaded(folder: Path) -> nn.Module:
    import torchao.quantization as library
    from transformers import TorchAoConfig

    return loaded(folder, quantization_config=TorchAoConfig(library.Int8WeightOnlyConfig()))


def bitsandbytes(**options: Any) -> Row:
    def make(folder: Path) -> nn.Module:
        from transformers import BitsAndBytesConfig

        return loaded(folder, quantization_config=BitsAndBytesConfig(**options), device_map={"": "cpu"})

    return Row(("bitsandbytes", "accelerate"), make)


def quanto(weights: str) -> Row:
    def make(_: Path) -> nn.Module:
        from optimum.quanto import freeze, quantize

        model = plain()
        quantize(model, weights=weights)
        freeze(model)
        return model

    return Row(("optimum-quanto",), make)


def hqq(folder: Path) -> nn.Module:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    model = plain()
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and path != "lm_head":
            new = HQQLinear(
                module, BaseQuantizeConfig(nbits=4, group_size=64), compute_dtype=torch.float32, device="cpu"
            )
            owner, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(owner), leaf, new)
    return model


def compressed(scheme: str) -> Row:
    """A checkpoint in compressed-tensors' format, its weights rounded by the library's own compressor, which transformers loads."""

    def make(folder: Path) -> nn.Module:
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import (
            QuantizationConfig,
            apply_quantization_config,
            preset_name_to_scheme,
        )

        model = plain(torch.bfloat16)
        config = QuantizationConfig(
            config_groups={"group_0": preset_name_to_scheme(scheme, ["Linear"])},
            ignore=["lm_head"],
            quantization_status="initialized",
        )
        apply_quantization_config(model, config)
        for module in model.modules():
            if hasattr(module, "weight_scale"):
                grouped = module.weight.unflatten(-1, (module.weight_scale.shape[-1], -1))
                most = {"FP8": 448.0, "W4A": 7.0}.get(scheme[:3], 127.0)
                module.weight_scale.data.copy_(grouped.detach().abs().amax(-1) / most)
                if getattr(module, "weight_zero_point", None) is not None:
                    module.weight_zero_point.data.zero_()
                module.quantization_status = type(module.quantization_status)("frozen")
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(folder / "packed")
        compressor.update_config(folder / "packed")
        return AutoModelForCausalLM.from_pretrained(folder / "packed", dtype=torch.bfloat16)

    return Row(("compressed-tensors",), make)


def lora(merged: bool, library: str = "") -> Row:
    def make(_: Path) -> nn.Module:
        from peft import LoraConfig, get_peft_model

        model = plain()
        if library == "torchao":
            import torchao.quantization

            torchao.quantization.quantize_(model, torchao.quantization.Int8WeightOnlyConfig())
        adapted = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"]))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        return adapted.merge_and_unload() if merged else adapted

    return Row(("peft", *([library] if library else [])), make)


def offloaded(to: str) -> Row:
    def make(folder: Path) -> nn.Module:
        from accelerate import cpu_offload, disk_offload

        if to == "cpu":
            return cpu_offload(plain(), execution_device="cpu")
        return disk_offload(plain(), str(folder / "offload"), execution_device="cpu")

    return Row(("accelerate",), make)


def gguf(kind: str) -> Row:
    """A GGUF file of quantised matrices, which transformers dequantises while it loads it."""

    def make(folder: Path) -> nn.Module:
        import gguf as library
        from gguf.quants import quantize

        model = plain()
        to = getattr(library.GGMLQuantizationType, kind)
        writer = library.GGUFWriter(folder / "model.gguf", "llama")
        writer.add_context_length(CONFIG["max_position_embeddings"])
        writer.add_embedding_length(CONFIG["hidden_size"])
        writer.add_block_count(CONFIG["num_hidden_layers"])
        writer.add_feed_forward_length(CONFIG["intermediate_size"])
        writer.add_head_count(CONFIG["num_attention_heads"])
        writer.add_head_count_kv(CONFIG["num_key_value_heads"])
        writer.add_rope_dimension_count(CONFIG["head_dim"])
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_vocab_size(VOCAB)
        names = library.get_tensor_name_map(library.MODEL_ARCH.LLAMA, CONFIG["num_hidden_layers"])
        for name, parameter in model.state_dict().items():
            target = names.get_name(name, try_suffixes=(".weight",))
            data = parameter.numpy()
            if data.ndim == 1:
                writer.add_tensor(target, data)
            else:
                writer.add_tensor(target, quantize(data, to), raw_dtype=to)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32)

    return Row(("gguf",), make)


def packed_rows(x: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Codes of 4 bits [8 n, ...] as int32 [n, ...], eight in a number, in the given order from its lowest bits on."""
    eights = x.long().unflatten(0, (-1, 8))[:, list(order)]
    shifts = (4 * torch.arange(8)).view(1, 8, *[1] * (x.dim() - 1))
    return (eights << shifts).sum(1).to(torch.uint32).view(torch.int32)


def gptqmodel(method: str, group: int = 32) -> Row:
    """A checkpoint in the format of GPTQ or AWQ, its weights rounded to the nearest of 4 bits, which transformers loads by GPTQModel."""

    def make(folder: Path) -> nn.Module:
        from safetensors.torch import save_file

        model = plain(torch.float16)
        model.save_pretrained(folder / "model")
        state = {name: x for name, x in model.state_dict().items() if not name.endswith("_proj.weight")}
        for name, module in model.named_modules():
            if not name.endswith("_proj"):
                continue
            weight = module.weight.detach().float().T.unflatten(0, (-1, group))  # [groups, group, out]
            scale = weight.abs().amax(1) / 7
            codes = ((weight / scale[:, None]).round() + 8).clamp(0, 15).flatten(0, 1)  # [in, out]
            zeros = torch.full_like(scale, 7 if method == "gptq" else 8)  # GPTQ's format keeps them less one
            state[f"{name}.scales"] = scale.half()
            if method == "gptq":
                state[f"{name}.qweight"] = packed_rows(codes)
                state[f"{name}.qzeros"] = packed_rows(zeros.T).T.contiguous()
                state[f"{name}.g_idx"] = (torch.arange(codes.shape[0]) // group).to(torch.int32)
            else:
                order = (0, 2, 4, 6, 1, 3, 5, 7)
                state[f"{name}.qweight"] = packed_rows(codes.T, order).T.contiguous()
                state[f"{name}.qzeros"] = packed_rows(zeros.T, order).T.contiguous()
        save_file(state, folder / "model" / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "model" / "config.json").read_text())
        quantised = {"quant_method": method, "bits": 4, "group_size": group, "desc_act": False}
        quantised |= (
            {"sym": True, "checkpoint_format": "gptq"} if method == "gptq" else {"zero_point": True, "version": "gemm"}
        )
        config["quantization_config"] = quantised
        (folder / "model" / "config.json").write_text(json.dumps(config))
        return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float16, device_map={"": "cpu"})

    return Row(("gptqmodel", "optimum", "accelerate"), make)


def dispatched(_: Path) -> nn.Module:
    from accelerate import dispatch_model

    return dispatch_model(plain(), device_map={"": "cpu"}, force_hooks=True)


ROWS: dict[str, Row] = {
    "torchao int8 weight-only": torchao("Int8WeightOnlyConfig"),
    "torchao int8 weight-only, by transformers": Row(("torchao", "accelerate"), torchao_loaded),
    "torchao int4 weight-only": torchao("Int4WeightOnlyConfig", torch.bfloat16),
    "torchao intx weight-only, 4 bits": torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4),
    "torchao float8 weight-only": torchao("Float8WeightOnlyConfig"),
    "torchao int8 dynamic": torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao int8 dynamic, 4-bit weights": torchao("Int8DynamicActivationIntxWeightConfig", weight_dtype=torch.int4),
    "torchao float8 dynamic": torchao("Float8DynamicActivationFloat8WeightConfig", torch.bfloat16),
    "bitsandbytes int8": bitsandbytes(load_in_8bit=True),
    "bitsandbytes nf4": bitsandbytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    ),
    "quanto int8": quanto("qint8"),
    "quanto int4": quanto("qint4"),
    "quanto float8": quanto("qfloat8"),
    "HQQ 4 bits": Row(("hqq",), hqq),
    "compressed-tensors W8A16": compressed("W8A16"),
    "compressed-tensors W4A16": compressed("W4A16"),
    "compressed-tensors FP8": compressed("FP8_DYNAMIC"),
    "GPTQ 4 bits": gptqmodel("gptq"),
    "AWQ 4 bits": gptqmodel("awq"),
    "GGUF Q8_0": gguf("Q8_0"),
    "GGUF Q4_0": gguf("Q4_0"),
    "peft lora, unmerged": lora(False),
    "peft lora, merged": lora(True),
    "peft lora on torchao int8, unmerged": lora(False, "torchao"),
    "accelerate device_map on one device": Row(("accelerate",), dispatched),
    "accelerate CPU offload": offloaded("cpu"),
    "accelerate disk offload": offloaded("disk"),
}

__all__ = ["CONFIG", "PROMPT", "ROWS", "Row", "plain", "prompt"]
