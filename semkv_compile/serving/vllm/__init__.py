"""semkv as a model of vLLM, outside of its tree: an artifact is served as any model is; see docs/serving.md.

vLLM calls `register` in each of its processes, through the entry point `vllm.general_plugins`. Nothing else here is imported unless vLLM
serves a folder that `semkv serve` wrote, and nothing of vLLM is changed.
"""

from __future__ import annotations

from semkv.serving.vllm.names import ARCHITECTURE


def register() -> None:
    """Make the model known to vLLM, its loader, and how its requests take memory. Called by vLLM; calling it again changes nothing."""
    from vllm.model_executor.models import ModelRegistry

    import semkv.serving.vllm.loader
    import semkv.serving.vllm.memory  # noqa: F401 - both register what they define

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, f"semkv.serving.vllm.model:{ARCHITECTURE}")


__all__ = ["register"]
