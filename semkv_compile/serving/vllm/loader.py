"""The loader of an artifact's weights: the model has loaded them when it was made."""

from __future__ import annotations

from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from semkv.serving.vllm.names import LOAD_FORMAT


@register_model_loader(LOAD_FORMAT)
class SemkvLoader(BaseModelLoader):
    """For `--load-format semkv`."""

    def download_model(self, model_config: ModelConfig) -> None:
        """An artifact is a folder of this machine."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """They came with the artifact; vLLM sees none of them."""
