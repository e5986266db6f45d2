"""What all settings have in common: immutable, validated when they are made, with a JSON round trip."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from semkv.errors import ConfigError, SemkvError


class Settings(BaseModel):
    """Base of all settings. A wrong value, or a name that is no setting's, is a `ConfigError` (`BudgetError` for a budget)
    that says which, what was given and what was expected."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _refusal(type(self), error) from None

    @classmethod
    def checked(cls, **values: Any) -> Self:
        """`cls(**values)`, for values whose types are known only when they are checked."""
        return cls(**values)

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Settings from a dict, or from settings; raises `ConfigError`."""
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise _refusal(cls, error) from None

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """Settings from JSON; raises `ConfigError`."""
        try:
            return super().model_validate_json(json_data, **options)
        except ValidationError as error:
            raise _refusal(cls, error) from None


def _refusal(kind: type[Settings], error: ValidationError) -> SemkvError:
    """The first problem that `error` tells of, in words."""
    problem = error.errors(include_url=False)[0]
    name, value = ".".join(map(str, problem["loc"])), problem["input"]
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, SemkvError):
        return cause
    if not name:
        found = isinstance(cause, Exception)  # raised by a validator of all fields, which names them
        return ConfigError(str(cause) if found else f"{kind.__name__}: {problem['msg']}, got {value!r}")
    if problem["type"] == "missing":
        return ConfigError(f"setting {name} of {kind.__name__} is missing")
    if problem["type"] == "extra_forbidden":
        return ConfigError(
            f"setting {name} = {value!r}: there is no such setting; {kind.__name__} has: {', '.join(kind.model_fields)}"
        )
    return ConfigError(f"setting {name} = {value!r}: {cause if isinstance(cause, Exception) else problem['msg']}")


__all__ = ["Settings"]
