"""A compiled model as vLLM's runner sees one: ids and positions of a batch in, logits out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheSpec

from semkv.errors import ConfigError
from semkv.ir.ranks import ranks_of
from semkv.serving.admission import Admission
from semkv.serving.folder import Served
from semkv.serving.requests import Requests, Row
from semkv.serving.vllm.memory import RequestSpec
from semkv.serving.vllm.names import BLOCK_BYTES, LOAD_FORMAT, SCHEDULER, WORKER

LAYER = "semkv.0.requests"


@dataclass
class BatchRows:
    """Of each request in a batch: its slot, and where its tokens begin; the last number is where all of them end."""

    slots: list[int]
    starts: list[int]


class RowsBuilder(AttentionMetadataBuilder[BatchRows]):
    """Reads both from what vLLM's runner knows of a batch."""

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> BatchRows:
        return BatchRows(
            common_attn_metadata.block_table_tensor[:, 0].tolist(), common_attn_metadata.query_start_loc_cpu.tolist()
        )


class RowsBackend(AttentionBackend):
    """In place of an attention: vLLM asks it for nothing but what the rows of a batch are."""

    @staticmethod
    def get_name() -> str:
        return "SEMKV"

    @staticmethod
    def get_impl_cls() -> type:
        """Asked of a backend whose attention vLLM runs, or divides by context, which `check_flags` refuses."""
        raise ConfigError(
            "vLLM runs no attention of this model, it is in the compiled one: serve it with `semkv serve`"
        )

    @staticmethod
    def get_builder_cls() -> type[RowsBuilder]:
        return RowsBuilder


class RequestsLayer(nn.Module, AttentionLayerBase):
    """The one layer with a memory that vLLM sees: its blocks are the units of bytes that requests take."""

    def __init__(self, admission: Admission) -> None:
        super().__init__()
        self.admission = admission

    def get_attn_backend(self) -> type[AttentionBackend]:
        return RowsBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return RequestSpec(
            block_size=vllm_config.model_config.max_model_len,  # a request has one slot, whatever its length
            shapes=((BLOCK_BYTES,),),
            dtypes=(torch.int8,),
            mamba_type=MambaAttentionBackendEnum.LINEAR,
            admission=self.admission,
        )


class SemkvForCausalLM(nn.Module):
    """vLLM's view of a compiled model. Scheduling, sampling and the API are vLLM's; text is read and remembered by semkv."""

    is_attention_free = True
    has_inner_state = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        check_flags(vllm_config)
        served = Served.read(Path(vllm_config.model_config.model))
        among = get_tp_group() if vllm_config.parallel_config.tensor_parallel_size > 1 else None
        compiled = served.load(
            vllm_config.device_config.device, None if among is None else ranks_of(among.device_group)
        )
        if vllm_config.model_config.dtype != compiled.dtype:
            raise ConfigError(
                f"--dtype {vllm_config.model_config.dtype}: the artifact computes in {compiled.dtype}; leave the option to `semkv serve`"
            )
        longest = vllm_config.model_config.max_model_len
        on_host = compiled.device.type == "cpu"
        admission = Admission.of(compiled.request_bytes, longest, host=on_host)
        if among is not None:
            admission = of_all(admission, served, among.cpu_group)
        admission.check(vllm_config.cache_config.kv_cache_memory_bytes // BLOCK_BYTES - 1, longest)
        self.requests = Requests(compiled, served.keep or 0)
        self.vocab_size = compiled.program.vocab_size
        self.layer_name = f"{prefix}.{LAYER}" if prefix else LAYER
        self.layer = RequestsLayer(admission)
        vllm_config.compilation_config.static_forward_context[self.layer_name] = self.layer
        self._logits: dict[int, Tensor] = {}

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Asked where prompts are embeddings in part, which `check_flags` refuses: ids are embedded in the compiled model."""
        raise ConfigError("prompts of embeddings are not served: send text or token ids")

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Read a batch, ids and positions [T]. Returns the places of its tokens, float32 [T, 1], by which `compute_logits` finds theirs."""
        metadata = get_forward_context().attn_metadata
        self._logits = {}
        if metadata is not None:  # else vLLM tries how much memory a batch takes: none of the blocks
            batch = metadata[self.layer_name]
            begins = [start for start, end in zip(batch.starts, batch.starts[1:]) if end > start]
            read = positions[begins].tolist() if begins else []
            ends = batch.starts[1:]
            present = [(slot, a, b) for slot, a, b in zip(batch.slots, batch.starts, ends) if b > a]
            rows = [Row(slot, a, b, place) for (slot, a, b), place in zip(present, read)]
            self._logits = self.requests.run(input_ids.long(), rows)
        return torch.arange(len(positions), dtype=torch.float32, device=positions.device)[:, None]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits [N, vocab] after the tokens at places [N, 1]; zeros where nothing follows: inside of a prompt, or its request failed."""
        nothing = torch.zeros(self.vocab_size, dtype=torch.float32, device=hidden_states.device)
        made = [self._logits.get(int(place), nothing).float() for place in hidden_states[:, 0].tolist()]
        return torch.stack(made) if made else nothing.new_empty((0, self.vocab_size))


def of_all(own: Admission, served: Served, group: ProcessGroup) -> Admission:
    """What the requests take of each process of `group`, at most: all admit alike.

    Raises `ConfigError` for limits in bytes that one process would reach before another, which would then wait for it in vain.
    """
    tables = [own] * dist.get_world_size(group)
    dist.all_gather_object(tables, own, group=group)
    limits = {"--host-memory": served.host_memory, "--keep-sessions": served.keep}
    given = [flag for flag, limit in limits.items() if limit is not None]
    if given and any(table != own for table in tables):
        raise ConfigError(
            f"{', '.join(given)}: {len(tables)} processes have different numbers of KV heads, so that a limit in bytes would not be the "
            "same requests in each: leave it out, or take a number of processes that divides the KV heads"
        )
    return Admission.largest(tables)


def check_flags(config: VllmConfig) -> None:
    """Raise `ConfigError` for settings under which requests would be lost or answered wrongly."""
    parallel, scheduler, cache = config.parallel_config, config.scheduler_config, config.cache_config
    wrong = {
        f"--worker-cls {WORKER}": parallel.worker_cls != WORKER,
        f"--scheduler-cls {SCHEDULER}": scheduler.scheduler_cls != SCHEDULER,
        f"--load-format {LOAD_FORMAT}": config.load_config.load_format != LOAD_FORMAT,
        "--no-enable-prefix-caching (a compressed memory has no prefixes to share)": cache.enable_prefix_caching,
        "--no-async-scheduling": scheduler.async_scheduling,
        "--enforce-eager": not config.model_config.enforce_eager,
        "--kv-cache-memory-bytes": cache.kv_cache_memory_bytes is None,
        "VLLM_USE_V2_MODEL_RUNNER=0 in the environment": config.use_v2_model_runner,
    }
    missing = [flag for flag, lacking in wrong.items() if lacking]
    if missing:
        raise ConfigError(
            f"serve this folder with `semkv serve`, which adds what is missing here: {', '.join(missing)}"
        )
    refused = {
        "pipeline or context parallelism": parallel.world_size != parallel.tensor_parallel_size
        or parallel.decode_context_parallel_size > 1,
        "LoRA": config.lora_config is not None,
        "speculative decoding": config.speculative_config is not None,
        "quantization": config.quant_config is not None,
        "prompts of embeddings": config.model_config.enable_prompt_embeds,
        "a KV connector": config.kv_transfer_config is not None,
        "--kv-cache-dtype (compile with CompileConfig(kv_dtype=...))": cache.cache_dtype != "auto",
    }
    asked = [name for name, given in refused.items() if given]
    if asked:
        raise ConfigError(f"semkv's model in vLLM does not take {', '.join(asked)}: serve without")


__all__ = ["SemkvForCausalLM", "check_flags", "of_all"]
