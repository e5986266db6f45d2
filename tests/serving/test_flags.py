"""A served folder is refused under flags with which requests would be lost, or answered wrongly."""

from __future__ import annotations

from types import SimpleNamespace as Space

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: `make test-serving` makes an environment with it")

from semkv.errors import ConfigError
from semkv.serving.admission import Admission
from semkv.serving.folder import Served
from semkv.serving.vllm import model
from semkv.serving.vllm.model import check_flags, of_all
from semkv.serving.vllm.names import LOAD_FORMAT, SCHEDULER, WORKER


def flags(**changes):
    """vLLM's configuration as `semkv serve` makes it, but for `group__name=value`."""
    config = Space(
        parallel_config=Space(worker_cls=WORKER, world_size=3, tensor_parallel_size=3, decode_context_parallel_size=1),
        scheduler_config=Space(scheduler_cls=SCHEDULER, async_scheduling=False),
        cache_config=Space(enable_prefix_caching=False, kv_cache_memory_bytes=1600, cache_dtype="auto"),
        load_config=Space(load_format=LOAD_FORMAT),
        model_config=Space(enforce_eager=True, enable_prompt_embeds=False),
        use_v2_model_runner=False,
        lora_config=None,
        speculative_config=None,
        quant_config=None,
        kv_transfer_config=None,
    )
    for path, value in changes.items():
        *owners, name = path.split("__")
        place = config
        for owner in owners:
            place = getattr(place, owner)
        setattr(place, name, value)
    return config


def test_the_flags_of_the_command_are_enough():
    """None is refused; the command itself has each that is asked for (tests/serving/test_command.py)."""
    assert check_flags(flags()) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parallel_config__worker_cls": "auto"}, "adds what is missing here: --worker-cls semkv.serving.vllm.worker"),
        ({"scheduler_config__scheduler_cls": None}, "--scheduler-cls semkv.serving.vllm.scheduler"),
        ({"scheduler_config__async_scheduling": True}, "missing here: --no-async-scheduling"),
        ({"load_config__load_format": "auto"}, "missing here: --load-format semkv"),
        (
            {"cache_config__enable_prefix_caching": True},
            "--no-enable-prefix-caching .a compressed memory has no prefixes",
        ),
        ({"cache_config__kv_cache_memory_bytes": None}, "missing here: --kv-cache-memory-bytes"),
        ({"model_config__enforce_eager": False}, "missing here: --enforce-eager"),
        ({"use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0 in the environment"),
        ({"parallel_config__world_size": 6}, "does not take pipeline or context parallelism: serve without"),
        ({"parallel_config__decode_context_parallel_size": 3}, "does not take pipeline or context parallelism"),
        ({"lora_config": 1, "speculative_config": 1}, "does not take LoRA, speculative decoding: serve without"),
        ({"quant_config": 1}, "does not take quantization"),
        ({"model_config__enable_prompt_embeds": True}, "does not take prompts of embeddings"),
        ({"kv_transfer_config": 1}, "does not take a KV connector"),
        ({"cache_config__cache_dtype": "fp8"}, "does not take --kv-cache-dtype"),
    ],
)
def test_other_flags_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        check_flags(flags(**change))


def test_limits_in_bytes_need_equal_parts(monkeypatch):
    """Processes with other numbers of KV heads would reach them at other requests."""
    own, other = Admission(4, (1, 5), (2, 2)), Admission(4, (3, 4), (1, 6))

    def gather(tables, table, group):
        tables[:] = [table, *parts]

    monkeypatch.setattr(model.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(model.dist, "all_gather_object", gather)
    parts = [other]
    assert of_all(own, Served("x"), None) == Admission(4, (3, 5), (2, 6))
    with pytest.raises(ConfigError, match="--keep-sessions: 2 processes have different numbers of KV heads"):
        of_all(own, Served("x", keep=5), None)
    parts = [own]
    assert of_all(own, Served("x", keep=5, host_memory=9), None) == own
