"""vLLM's scheduler with one thing more: a request that failed in the model ends with an error, alone."""

from __future__ import annotations

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus


class SemkvScheduler(Scheduler):
    """For `--scheduler-cls`."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """As vLLM's. Requests that the worker reports as without logits are finished with an error before a token is taken for them."""
        lost = [name for name, count in (model_runner_output.num_nans_in_logits or {}).items() if count]
        ended = self.finish_requests(lost, RequestStatus.FINISHED_ERROR) if lost else []
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request in ended:
            client = outputs.setdefault(request.client_index, EngineCoreOutputs())
            client.outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                )
            )
        return outputs


__all__ = ["SemkvScheduler"]
