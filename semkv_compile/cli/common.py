"""What all commands share: errors in one line, lists from the command line, progress. Imports nothing heavy."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from semkv import __version__
from semkv.errors import ConfigError, ProcessError, SemkvError

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = 130


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"semkv {__version__}")
        raise typer.Exit()


Version = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
]


def refuse(message: str) -> NoReturn:
    """End with one line on stderr and exit code 2."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn errors that a user can cause into one line and exit code 2; an interrupt into exit code 130."""
    try:
        yield
    except ProcessError as error:
        if error.told:  # the process that failed prints it
            raise typer.Exit(2) from None
        refuse(str(error))
    except (SemkvError, FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        refuse(str(error))
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None


def words(text: str, option: str) -> list[str]:
    """`a,b, c` as a list; refuses an empty one."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        refuse(f"{option} {text!r}: expected a list such as a,b,c")
    return found


def modes(text: str) -> tuple[str, ...]:
    """`budgeted,kept` of `--generated`, each once."""
    found = tuple(dict.fromkeys(words(text, "--generated")))
    wrong = [mode for mode in found if mode not in ("budgeted", "kept")]
    if wrong:
        refuse(f"--generated {wrong[0]!r}: expected budgeted, kept, or both separated by a comma")
    return found


def whole_numbers(text: str, option: str) -> list[int]:
    """`1024,4K` as numbers of tokens; K is 1024."""
    numbers = []
    for part in words(text, option):
        scale = 1024 if part[-1] in "kK" else 1
        digits = part[:-1] if scale > 1 else part
        if not digits.isdecimal() or int(digits) < 1:
            refuse(f"{option} {part!r}: expected whole numbers of tokens, at least 1, such as 1024,4K")
        numbers.append(scale * int(digits))
    return numbers


def budgets(text: str, option: str) -> list[int | float]:
    """`0.05,10%,256`: with a point or a percent sign a fraction of the full KV, without one tokens per KV head and layer."""
    found: list[int | float] = []
    for part in words(text, option):
        try:
            if part.endswith("%"):
                found.append(float(part[:-1]) / 100)
            else:
                found.append(int(part) if part.lstrip("+-").isdecimal() else float(part))
        except ValueError:
            refuse(
                f"{option} {part!r}: expected fractions of the full KV such as 0.1, or tokens per KV head such as 256"
            )
    from semkv.config import check_budget

    for value in found:
        check_budget(value)
    return found


def parse_size(text: str | None, option: str) -> int | None:
    """Bytes of a size such as `24GB`; `ConfigError` for what is none."""
    from semkv.config import byte_count

    try:
        return None if text is None else byte_count(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def read_text(path: Path, option: str) -> str:
    """The text of a file that `option` names; `ConfigError` where there is none, or it is not UTF-8."""
    if not path.is_file():
        raise ConfigError(f"{option} {path}: no such file")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option} {path}: not readable as UTF-8 ({error}); convert it") from None


def quiet_libraries() -> None:
    """Keep model libraries from writing progress bars and notices between ours."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in (
        "transformers",
        "torchao",
        "torch.utils._pytree",
    ):  # the last two: of torchao's own parts, where it is installed
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def check_writable(path: Path | None, option: str, *, folder: bool = False) -> None:
    """Refuse an output that cannot be written, before work starts: its kind is wrong or no parent can be made."""
    if path is None:
        return
    if path.exists() and path.is_dir() != folder:
        wanted, found = ("folder", "file") if folder else ("file", "folder")
        refuse(f"{option} {path}: expected a {wanted}, but there is a {found}")
    parent = path
    while not parent.exists():
        parent = parent.parent
    if parent != path and not parent.is_dir():
        refuse(f"{option} {path}: {parent} is not a folder")
    if not os.access(parent, os.W_OK):
        refuse(f"{option} {path}: no permission to write in {parent}")


def output_console() -> Console:
    """Where tables go: as wide as the terminal, or wide enough for them in a file or pipe."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=140)


@contextmanager
def progress_bar(description: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar with counts and the remaining time on a terminal, a line every tenth elsewhere; yields what to call."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _line_progress(description)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[place]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(description, total=None, place="")

        def report(done: int, total: int, place: str) -> None:
            bar.update(task, completed=done, total=total, place=place)

        yield report


def _line_progress(description: str) -> Callable[[int, int, str], None]:
    import time

    started = time.monotonic()
    shown = 0

    def report(done: int, total: int, place: str) -> None:
        nonlocal shown
        if done < total and 10 * done // total <= shown:
            return
        shown = 10 * done // total
        left = (time.monotonic() - started) / done * (total - done)
        print(
            f"{description}: {done}/{total}, {left:.0f} s left{f' ({place})' if place else ''}",
            file=sys.stderr,
            flush=True,
        )

    return report


class PhaseBars(AbstractContextManager["PhaseBars"]):
    """A progress bar for each phase of a calibration, one after the other; `indent` stands before their names."""

    def __init__(self, indent: str = "") -> None:
        self.indent = indent
        self.phase = ""
        self.stack = ExitStack()
        self.report: Any = None

    def __call__(self, phase: str, done: int, total: int, figures: dict[str, float]) -> None:
        """Show that `done` of `total` of a phase are done, with its latest figures."""
        if phase != self.phase:
            self.stack.close()
            self.phase = phase
            self.report = self.stack.enter_context(progress_bar(f"{self.indent}{phase}"))
        self.report(done, total, " ".join(f"{name} {value:.3g}" for name, value in figures.items()))

    def close(self) -> None:
        """End the bar that is shown, before something else is printed."""
        self.stack.close()
        self.phase = ""

    def __exit__(self, *error: object) -> None:
        self.stack.close()
