"""How requests take memory in vLLM's scheduler: blocks that each stand for a unit of bytes, by `CompiledModel.request_bytes`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_cache_spec_registry import register_kv_cache_spec

from semkv.serving.admission import Admission


class RequestManager(SingleTypeKVCacheManager):
    """Hands a request as many blocks as its bytes take, and takes back those that only its prompt needed. Nothing is shared or cached.

    The first block of a request stays with it to its end: its number is the slot by which the worker knows it.
    """

    kv_cache_spec: RequestSpec

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prompts: dict[str, int] = {}
        """Tokens of each request that are read before it generates."""
        self._running: set[str] = set()
        """Requests whose prompts have been read."""

    def _wanted(self, request_id: str, tokens: int) -> int:
        admission, reading = self.kv_cache_spec.admission, request_id not in self._running
        return admission.units(max(tokens, self._prompts.get(request_id, 0)), reading=reading)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Blocks that a request of `num_tokens` tokens still lacks; those of its whole prompt with the first piece of it."""
        if apply_admission_cap:  # the question whether the whole of it fits, asked once, before it begins
            self._prompts[request_id] = max(num_tokens, self._prompts.get(request_id, 0))
        return max(0, self._wanted(request_id, num_tokens) - len(self.req_to_blocks.get(request_id, ())))

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        """Hand out what `get_num_blocks_to_allocate` counted."""
        blocks = self.req_to_blocks[request_id]
        lacking = self._wanted(request_id, num_tokens) - len(blocks)
        new = self.block_pool.get_new_blocks(lacking) if lacking > 0 else []
        blocks.extend(new)
        return new

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Take back what only the reading of a prompt needed, once it has been read and compressed."""
        prompt = self._prompts[request_id] = max(num_prompt_tokens or 0, self._prompts.get(request_id, 0))
        if request_id in self._running or processed_computed_tokens < prompt or request_id not in self.req_to_blocks:
            return
        self._running.add(request_id)
        blocks = self.req_to_blocks[request_id]
        kept = self._wanted(request_id, processed_computed_tokens)
        self.block_pool.free_blocks(reversed(blocks[kept:]))
        del blocks[kept:]

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forget a request that ended or was preempted, and return its blocks."""
        self._prompts.pop(request_id, None)
        self._running.discard(request_id)
        return super().pop_blocks_for_free(request_id)

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """No blocks and no tokens: a compressed memory has no prefixes that another request could begin with."""
        return tuple([] for _ in kv_cache_group_ids), 0


@register_kv_cache_spec(manager_class=RequestManager)
@dataclass(frozen=True)
class RequestSpec(MambaSpec):
    """A state per request, of a size that its length decides. vLLM's runner sees the spec of a recurrent model: one slot per request."""

    admission: Admission = field(kw_only=True)

    @property
    def prefix_cacheable(self) -> bool:
        """Never; a compressed memory has no prefixes that another request could begin with."""
        return False

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Of the longest request, in bytes of blocks."""
        longest = vllm_config.model_config.max_model_len
        admission = self.admission
        return self.page_size_bytes * max(admission.units(longest, reading=x) for x in (True, False))

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """The worker's table of a request's blocks only grows: it has room for what its prompt took, and for what came after."""
        return sum(self.admission.units(max_len, reading=x) for x in (True, False))


__all__ = ["RequestManager", "RequestSpec"]
