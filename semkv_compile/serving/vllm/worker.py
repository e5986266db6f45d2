"""vLLM's worker with one thing more: the model hears which requests begin and end, which vLLM tells workers and not models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from semkv.serving.requests import Requests

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker
else:
    # what vLLM itself takes where no worker is named
    Worker = resolve_obj_by_qualname(
        "vllm.v1.worker.cpu_worker.CPUWorker" if current_platform.is_cpu() else "vllm.v1.worker.gpu_worker.Worker"
    )


class SemkvWorker(Worker):
    """For `--worker-cls`."""

    @property
    def _requests(self) -> Requests:
        return self.model_runner.get_model().requests

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """As vLLM's. Before it, requests that ended or were preempted let go of their memory, and those that are scheduled begin."""
        follow(self._requests, scheduler_output)
        return self._with_failures(super().execute_model(scheduler_output))

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        """As vLLM's, and which requests failed in the model."""
        return self._with_failures(super().sample_tokens(grammar_output))

    def semkv_report(self) -> dict[str, int]:
        """What there is now: requests, bytes of their states, resident bytes of the process; and the steps so far, with their rows.

        In a server with VLLM_SERVER_DEV_MODE=1: `POST /collective_rpc` with `{"method": "semkv_report"}`.
        """
        return self._requests.report()

    def _with_failures(self, output: Any) -> Any:
        """vLLM has a place for requests whose logits are no numbers; those of a request that failed are not there at all."""
        if isinstance(output, ModelRunnerOutput) and output.req_ids:
            failed = self._requests.take_failed()
            if failed:
                output.num_nans_in_logits = {**(output.num_nans_in_logits or {}), **dict.fromkeys(failed, 1)}
        return output


def follow(requests: Requests, scheduled: SchedulerOutput) -> None:
    """Tell `requests` what a step of vLLM begins and ends."""
    requests.end(list(scheduled.finished_req_ids), keep=True)
    requests.end(list(scheduled.preempted_req_ids or ()))
    for new in scheduled.scheduled_new_reqs:
        sampling = new.sampling_params
        requests.begin(
            new.req_id,
            new.block_ids[0][0],
            prompt=new.prompt_len,
            all_logits=sampling is not None and sampling.prompt_logprobs is not None,
            ids=new.prompt_token_ids,
        )
    cached = scheduled.scheduled_cached_reqs
    for name, blocks, made in zip(cached.req_ids, cached.new_block_ids, cached.num_output_tokens):
        if name in cached.resumed_req_ids:
            known = len(cached.all_token_ids[name])
            requests.begin(name, blocks[0][0], prompt=known - made, known=known)


__all__ = ["SemkvWorker", "follow"]
