"""The errors that semkv raises. Each message names the value, what was expected, and what to do."""

from __future__ import annotations

from typing import Any


class SemkvError(Exception):
    """Base of every error that semkv raises on purpose."""


class CaptureError(SemkvError):
    """The model cannot be turned into a program without risk of a wrong answer."""


class SpecError(SemkvError):
    """A pass left a graph that its stage does not allow: a defect of the pass, not of the model."""


class ConfigError(SemkvError, ValueError):
    """An argument is out of its range, or two arguments contradict each other."""


class BudgetError(ConfigError):
    """The budget is not a valid one, or smaller than the method can live in."""


class CapacityError(SemkvError, MemoryError):
    """Host memory, within its cap, or the disk has no room for what has to wait there."""


class InputError(SemkvError, ValueError):
    """Token ids, masks or positions that the program cannot run."""


class BatchError(SemkvError):
    """Some rows of a batch cannot be read, the others have been.

    Attributes
    ----------
    errors: by row, why. state: of the other rows, in their order, with what `generate` made of them; None in another process.
    sequences: int64 [B, T], what `generate` made of the other rows, those that failed being padded prompts; None where it made none.
    """

    def __init__(self, errors: dict[int, SemkvError], state: Any) -> None:
        listed = "; ".join(f"row {row}: {error}" for row, error in errors.items())
        super().__init__(
            f"{len(errors)} rows of a batch cannot be read ({listed}); the others have been: error.state, error.sequences"
        )
        self.errors, self.state = errors, state
        self.sequences: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the state, which is not pickled: errors cross from a pool's processes to the one that waits."""
        return BatchError, (self.errors, None), {**vars(self), "state": None}


class StepError(SemkvError):
    """Some rows of a step over several states failed; the others have taken their token.

    Attributes
    ----------
    errors: by row, why. A state of several rows of which one fails fails with it. logits: [B, vocab] of all rows, zeros at those that
    failed; None in another process. Where `StateError` follows from a row's state, the step had begun in it: release it.
    """

    def __init__(self, errors: dict[int, Exception], logits: Any) -> None:
        listed = "; ".join(f"row {row}: {error}" for row, error in sorted(errors.items()))
        all_failed = logits is not None and len(errors) == len(logits)
        others = "no other row was in it" if all_failed else "the others have taken their token: error.logits"
        super().__init__(f"{len(errors)} rows of a step failed ({listed}); {others}")
        self.errors, self.logits = errors, logits

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the logits: errors cross from a pool's processes to the one that waits."""
        return StepError, (self.errors, None), {**vars(self), "logits": None, "args": self.args}


class StateError(SemkvError, RuntimeError):
    """A state whose last step did not come to its end, so that its layers, or its rows, do not hold the same tokens; or a state or
    record made with weights that its model no longer has, or one that was released."""


class StaleModelError(SemkvError, RuntimeError):
    """The model that was compiled is no longer what was captured, in a way that only another capture can follow."""


class ProfileError(SemkvError):
    """A profile is damaged, of another schema, or belongs to another model."""


class ArtifactError(SemkvError):
    """A compiled artifact or a saved state is damaged, altered, or of another version or model."""


class ProcessError(SemkvError):
    """Another process of the same run failed, and `told` why, or ended."""

    def __init__(self, message: str, told: bool = False) -> None:
        super().__init__(message)
        self.told = told
