"""Evaluation tasks: RULER, needles, InfiniteBench, GSM8K, LongBench, LongWriter, perplexity, the bundled families."""

from semkv.evaluation.tasks.base import Task
from semkv.evaluation.tasks.registry import TASKS, build_tasks, task_names

__all__ = ["TASKS", "Task", "build_tasks", "task_names"]
