"""Names under which vLLM knows semkv's parts; imports nothing, so that a command can tell them where vLLM is not installed."""

from __future__ import annotations

ARCHITECTURE = "SemkvForCausalLM"
"""Under which the model is known; the `architectures` of a served folder's config.json."""
LOAD_FORMAT = "semkv"
WORKER = "semkv.serving.vllm.worker.SemkvWorker"
SCHEDULER = "semkv.serving.vllm.scheduler.SemkvScheduler"
BLOCK_BYTES = 16
"""That vLLM allocates for a block: it stands for a unit of memory (`semkv.serving.admission.UNIT`) that semkv takes itself."""
