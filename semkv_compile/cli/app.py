"""The application that commands are added to."""

from __future__ import annotations

import typer

from semkv.cli.common import Version

app = typer.Typer(
    name="semkv",
    help="Compile decoders into models with a mixed-resolution KV memory: look inside, plan, time, evaluate, see a demo.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


@app.callback()
def main(version: Version = False) -> None:
    """Options that stand before a command."""


__all__ = ["app"]
