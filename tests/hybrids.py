"""Tiny hybrid models of transformers, and what such a model does by itself, with a cache of its own."""

from __future__ import annotations

import inspect

import torch
import transformers
from torch import Tensor, nn

VOCAB = 61
COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16}
FAMILIES = {
    "Lfm2": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "conv_L_cache": 5},
    "Qwen3_5": DELTA,
    "Qwen3Next": DELTA | EXPERTS,
    "FalconH1": MAMBA | {"num_hidden_layers": 2, "mamba_d_ssm": 64},
    "NemotronH": NEMOTRON | {"layer_types": ["linear_attention", "full_attention", "mlp"], "num_hidden_layers": 3},
    "Jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_hidden_layers": 2,
        "mamba_d_state": 8,
        "num_experts": 1,
    },
    "Mamba2": {"num_hidden_layers": 1, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 16},
    "RecurrentGemma": {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 16},
}
"""Fields by the name of the class."""

SERVED = [name for name in FAMILIES if name not in ("Mamba2", "RecurrentGemma")]
"""Those that compile."""


FORGETS = ("Jamba",)
"""Models whose code for several tokens ignores the states before them: later turns are right one token at a time only."""


def hybrid(name: str, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A random model of a family whose output depends on all that it has read."""
    prefix = "Qwen3_5Text" if name == "Qwen3_5" else name
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{prefix}Config")(**(COMMON | FAMILIES[name]))
    )
    draw(model)
    return model.to(dtype).eval()


def draw(model: nn.Module) -> None:
    """Give a model random weights by which its output depends on all that it has read, and let it generate without an end."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(1.3 * noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * noise)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0


def ids(length: int, seed: int) -> Tensor:
    """Random tokens int64 [1, length]."""
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


class Alone:
    """One conversation of a model with transformers' own cache."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.past, self.length = model, None, 0
        taken = inspect.signature(model.forward).parameters
        self.name = "cache" if "cache" in taken else "past_key_values"
        self.positions = "position_ids" in taken
        self.forgets = type(model).__name__.startswith(FORGETS)
        self.pending: Tensor | None = None

    def read(self, tokens: Tensor) -> Tensor:
        """Logits [1, T, vocab] after each of `tokens` [1, T]."""
        if self.forgets and self.length and tokens.shape[1] > 1:
            return torch.cat([self.read(token) for token in tokens.split(1, 1)], 1)
        options = {self.name: self.past, "use_cache": True}
        if self.positions:
            options["position_ids"] = torch.arange(self.length, self.length + tokens.shape[1])[None]
        with torch.no_grad():
            result = self.model(input_ids=tokens, **options)
        self.past = result[self.name]
        self.length += tokens.shape[1]
        return result.logits

    def answer(self, tokens: Tensor, count: int) -> list[int]:
        """`count` greedy tokens after `tokens` [1, T] and what is pending."""
        logits = self.read(tokens if self.pending is None else torch.cat([self.pending, tokens], 1))
        made = []
        for number in range(count):
            self.pending = logits[:, -1].argmax(-1, keepdim=True)
            made.append(int(self.pending))
            if number + 1 < count:
                logits = self.read(self.pending)
        return made


def difference(mine: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest number of `theirs`."""
    return float((mine - theirs).detach().abs().max() / theirs.detach().abs().max())
