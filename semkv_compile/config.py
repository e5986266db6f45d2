"""Settings of one compilation, validated before any work starts."""

from __future__ import annotations

import math
import re
from numbers import Integral
from typing import Any, Literal

import torch
from pydantic import Field, field_validator, model_validator

from semkv.errors import BudgetError
from semkv.settings import Settings

KV_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}

PREFIXES = "KMGT"


def byte_count(text: str) -> int:
    """Bytes of a size such as `24GB`, `1.5 GiB`, `1T` or `4096`; `ValueError` for anything else."""
    found = re.fullmatch(rf"\s*(\d+(?:\.\d+)?)\s*(?:([{PREFIXES}])(?:(I?)B)?)?\s*", text.upper())
    if found is None or float(found[1]) == 0:
        raise ValueError(f"{text!r} is no size: expected a number of bytes, or one with a unit such as 24GB or 16GiB")
    power = PREFIXES.index(found[2]) + 1 if found[2] else 0
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


class CompileConfig(Settings):
    """How a compiled model stores and moves its KV memory.

    Immutable, with a JSON round trip (`model_dump_json`, `model_validate_json`). What is out of range is a `ConfigError`.

    Parameters
    ----------
    kv_dtype: dtype of exact keys and values, `float16` for example. Default: the model's own.
        It is also the dtype in which the full KV, the budget's denominator, is measured.
    host: where folded spans wait: `ram` or `disk` (a memory-mapped file).
    floor: tokens per KV head and layer that every row may hold where the budget is a fraction, however short the row is: one of up to
        so many tokens is exact, a longer one is held within them until the fraction of its length is more. Where the method needs
        more to serve every length, that. 0: the fraction alone, and rows that are too short for it are refused (`BudgetError`):
        for measurements. A budget in tokens has none, nor has 1.0, which keeps every token.
    page_size: tokens in a page, the granularity in which exact entries are charged to the budget; 1 to 64.
    disk_folder: `disk` only: folder on whose disk the files are; they have no name there. Default: the system's temporary folder.
    prefill_chunk: tokens of a prompt that run at once; each chunk attends to the exact keys and values of all before it, which
        wait on the host. Shorter prompts run in one piece. Default: 2,048, on CUDA 8,192.
    extend_chunk: tokens that `extend` runs at once; those of a chunk share the room for unfolded spans. Default: 1 for up to
        64 new tokens where a method unfolds spans, else as many as the method folds at once; 512 without a budget.
    offload: where folded tokens wait. `budget`: on the host, so that the device holds no more than the budget. `progressive`:
        on the device, beside the budget, as long as `device_memory` has room; layers go to the host one by one, the last
        first, as the sequence grows (SpeContext Alg. 2). What a step selects is the same, so tokens are too.
    device_memory: `progressive` only: bytes of the device for weights, working memory and KV, a number or a text such as
        `24GB` or `16GiB`.
    host_memory: bytes of the host for what waits there, over all states of the compiled model: folded tokens, and the keys and
        values of a prompt while it is read. What does not fit goes to files with host='disk', else it is refused with
        `CapacityError`, for a prompt before it is read. Default: no limit; with host='disk', everything is in files.
        `progressive`: the lengths that fit follow from it.
    rows: `progressive` only: sequences that share the device.
    kernels: which kernels answer the attention of a step, and on a CPU in float32 what lies between two of them. `auto`: Triton's
        on CUDA where it is installed, those in C++ on a CPU where there is a compiler (g++ or clang++), PyTorch's elsewhere;
        `torch`: PyTorch's everywhere; `cpp`: those in C++; `triton`: Triton's, which on a CPU runs in its interpreter
        (TRITON_INTERPRET=1, for tests). Calls that the others are not made for (many queries, float64, gradients) are PyTorch's
        always.
    cuda_graphs: CUDA only: decode steps launch what lies between two attentions as CUDA graphs, recorded at the first step of each
        number of rows; what cannot be recorded is launched as before, with a warning. Default: on a CUDA device, where steps are
        shorter with them (docs/results/gpu.md). `step`: a step of one row is one CUDA graph, its memory included, recorded again when
        that moves; not yet tried on a GPU.
    latents: models with multi-head latent attention (DeepSeek-V2 and later): memory holds the latent of a token, which all heads
        share, in place of the keys and values that each head makes of it: `semkv.passes.absorb_latents`. The full KV, the budget's
        denominator, is that of the latents then, a small part of that of the heads; a method chooses tokens for all heads at once;
        prompts take longer to read, as heads compare latents, which are wider. Results are the same but for rounding.
    cache: keep the captured program on disk, and take it from there when the same model is compiled again with the same
        versions (`semkv.compiler.program_cache`).
    method_options: parameters of the method, by name; see each method's docstring.
    """

    kv_dtype: str | None = None
    host: Literal["ram", "disk"] = "ram"
    disk_folder: str | None = None
    floor: int = Field(default=256, ge=0)
    page_size: int = Field(default=8, ge=1, le=64)
    prefill_chunk: int | None = Field(default=None, ge=1)
    extend_chunk: int | None = Field(default=None, ge=1)
    offload: Literal["budget", "progressive"] = "budget"
    device_memory: int | None = Field(default=None, ge=1)
    host_memory: int | None = Field(default=None, ge=1)
    rows: int = Field(default=1, ge=1)
    kernels: Literal["auto", "torch", "cpp", "triton"] = "auto"
    cuda_graphs: Literal["step"] | bool | None = None
    latents: bool = False
    cache: bool = False
    method_options: dict[str, Any] = Field(default_factory=dict)

    @field_validator("kv_dtype")
    @classmethod
    def _known_dtype(cls, value: str | None) -> str | None:
        if value is not None and value not in KV_DTYPES:
            raise ValueError(f"expected one of {', '.join(KV_DTYPES)}")
        return value

    @field_validator("device_memory", "host_memory", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        return byte_count(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _folder_with_disk(self) -> CompileConfig:
        if self.disk_folder is not None and self.host != "disk":
            raise ValueError(f"disk_folder {self.disk_folder!r} is for host='disk', and host is {self.host!r}")
        return self

    @model_validator(mode="after")
    def _memory_with_progressive(self) -> CompileConfig:
        if self.offload == "progressive" and self.device_memory is None:
            raise ValueError("offload='progressive' needs device_memory, such as '24GB'")
        if self.offload == "budget" and (self.device_memory is not None or self.rows > 1):
            name = "rows" if self.device_memory is None else "device_memory"
            raise ValueError(f"{name} is for offload='progressive'; with 'budget' the budget is all there is")
        return self

    def records(self, device: torch.device) -> bool:
        """Whether steps on `device` launch CUDA graphs."""
        return device.type == "cuda" if self.cuda_graphs is None else bool(self.cuda_graphs)

    def steps_as_graphs(self, device: torch.device) -> bool:
        """Whether steps on `device`, memory and all, are graphs of tensors."""
        return device.type == "cpu" or self.cuda_graphs == "step"

    def torch_kv_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """The dtype of exact entries for a model whose own dtype is `model_dtype`."""
        return model_dtype if self.kv_dtype is None else KV_DTYPES[self.kv_dtype]


def check_budget(budget: float | int | None) -> float | int | None:
    """Return `budget` when it is None, a fraction in (0, 1] or a positive whole number of tokens; raise `BudgetError` else."""
    if budget is None:
        return None
    if isinstance(budget, Integral) and not isinstance(budget, (bool, int)):  # NumPy's
        budget = int(budget)
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise BudgetError(
            f"budget {budget!r}: expected a fraction of the full KV in (0, 1] or a whole number of tokens"
        )
    if isinstance(budget, int):
        if budget < 1:
            raise BudgetError(f"budget {budget}: a whole number is tokens per KV head and layer, at least 1")
        return budget
    if math.isnan(budget) or not 0.0 < budget <= 1.0:
        raise BudgetError(
            f"budget {budget}: a fraction of the full KV must lie in (0, 1]; for a number of tokens per KV head pass an int"
        )
    return float(budget)
