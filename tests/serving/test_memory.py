"""How vLLM's scheduler hands memory to requests: with the parts of vLLM that it does it with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: `make test-serving` makes an environment with it")

import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import KVCacheSpecKind, get_kv_cache_spec_kind
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from semkv.serving.admission import Admission
from semkv.serving.vllm.memory import RequestManager, RequestSpec

TABLE = Admission(10, reading=(4, 8, 12, 16), running=(1, 2, 3, 4))
BLOCKS = 30


@pytest.fixture
def spec():
    return RequestSpec(block_size=40, shapes=((16,),), dtypes=(torch.int8,), admission=TABLE)


@pytest.fixture
def manager(spec):
    pool = BlockPool(num_gpu_blocks=BLOCKS, enable_caching=False, hash_block_size=40)
    return RequestManager(spec, block_pool=pool, enable_caching=False, kv_cache_group_id=0, scheduler_block_size=40)


def slots(manager, name, tokens, computed, prompt, *, first=False):
    """What vLLM's `allocate_slots` asks, in its order; new blocks, or None where there is no room."""
    if first:
        lacking = manager.get_num_blocks_to_allocate(name, prompt, [], 0, 0, prompt, apply_admission_cap=True)
        if lacking > manager.block_pool.get_num_free_blocks():
            return None
    manager.remove_skipped_blocks(name, computed, prompt)
    lacking = manager.get_num_blocks_to_allocate(name, tokens, [], computed, computed, tokens)
    if lacking > manager.block_pool.get_num_free_blocks():
        return None
    new = manager.allocate_new_blocks(name, tokens, tokens)
    assert len(new) == lacking
    return new


def free(manager):
    return manager.block_pool.get_num_free_blocks()


def test_a_request_from_its_prompt_to_its_end(manager):
    start = free(manager)
    first = slots(manager, "a", 8, 0, 25, first=True)  # the first 8 of 25 tokens: room for all of them
    assert len(first) == 12
    assert slots(manager, "a", 25, 8, 25) == []
    assert slots(manager, "a", 26, 25, 25) == []  # read: what only reading took is free again
    assert free(manager) == start - 3
    assert len(slots(manager, "a", 31, 30, 25)) == 1
    assert manager.req_to_blocks["a"][0] is first[0]  # the slot stays
    manager.free("a")
    assert free(manager) == start
    assert not manager._prompts
    assert not manager._running


def test_requests_wait_where_there_is_no_room(manager):
    assert slots(manager, "a", 40, 0, 40, first=True) is not None
    assert slots(manager, "b", 31, 0, 31, first=True) is None  # 16 of 29 are taken
    slots(manager, "a", 41, 40, 40)
    assert slots(manager, "b", 31, 0, 31, first=True) is not None
    manager.free("waiting and given up")
    manager.free("a")
    manager.free("b")
    assert free(manager) == BLOCKS - 1


def test_a_preempted_request_reads_all_of_its_text_again(manager):
    slots(manager, "a", 10, 0, 10, first=True)
    slots(manager, "a", 21, 20, 10)
    manager.free("a")
    lacking = manager.get_num_blocks_to_allocate("a", 21, [], 0, 0, 21, apply_admission_cap=True)
    assert lacking == TABLE.units(21, reading=True)
    manager.remove_skipped_blocks("a", 0, 10)
    manager.allocate_new_blocks("a", 8, 8)
    manager.remove_skipped_blocks("a", 12, 10)  # behind its prompt, and not at the end of what is read again
    assert len(manager.req_to_blocks["a"]) == lacking
    manager.remove_skipped_blocks("a", 21, 10)
    assert len(manager.req_to_blocks["a"]) == TABLE.units(21, reading=False)


def test_what_vllm_reads_of_the_spec(spec):
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=40))
    assert spec.page_size_bytes == 16
    assert spec.max_memory_usage_bytes(config) == 16 * 16
    assert spec.max_num_blocks_per_req(config, 40) == 16 + 4
    assert get_kv_cache_spec_kind(spec) is KVCacheSpecKind.MAMBA  # no slot for each token
    assert KVCacheSpecRegistry.get_manager_class(spec) is RequestManager
    assert RequestManager.find_longest_cache_hit([], 0, [0, 1], None, spec, False, 40) == (([], []), 0)
