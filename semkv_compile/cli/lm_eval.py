"""What `semkv lm-eval` does: lm-evaluation-harness with the model `semkv`, which its own command cannot know of."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from semkv.errors import ConfigError


def run_lm_eval(arguments: list[str]) -> None:
    """Run the harness's own command with `arguments`; without `--model` its model is `semkv`.

    Raises
    ------
    ConfigError: the harness is not installed.
    """
    if find_spec("lm_eval") is None:
        raise ConfigError("lm-evaluation-harness is not installed: pip install 'semkv[lm-eval]'")
    from lm_eval.__main__ import cli_evaluate

    import semkv.cli.lm_eval_model  # noqa: F401 - registers the model

    named = any(one in ("--model", "-M") or one.startswith("--model=") for one in arguments)
    runs = not arguments or arguments[0] not in ("ls", "validate")
    if arguments and runs and not named and "-h" not in arguments and "--help" not in arguments:
        arguments = ["run", "--model", "semkv", *(arguments[1:] if arguments[0] == "run" else arguments)]
    before, sys.argv = sys.argv, ["semkv lm-eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before


__all__ = ["run_lm_eval"]
