"""Reports as tables: for the terminal (rich) and for documents (Markdown)."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table

from semkv.evaluation.report import FAILED
from semkv.evaluation.schema import CellResult, Interval, Report, Summary

WIDE = 110
"""Columns of a terminal from which on intervals fit into tables."""

UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
CAPTION = (
    "In brackets: 95 % interval, clustered by context. A layer holds on the device, and reads: of its full KV in percent, the largest of "
    "all layers and steps / the mean. Times are of the clock, beside whatever else the machine did."
)
PERPLEXITY_CAPTION = "Where likelihood is measured the figure is perplexity, and is in no mean of scores."


def percent(interval: Interval | None, *, spread: bool = True) -> str:
    """`87 (81-92)`, in percent."""
    if interval is None:
        return "-"
    text = f"{100 * interval.value:.0f}"
    if not spread or interval.low is None or interval.high is None:
        return text
    return f"{text} ({100 * max(interval.low, 0.0):.0f}-{100 * interval.high:.0f})"


def size(count: float) -> str:
    """Bytes in a unit that people read."""
    for unit, name in UNITS:
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} B"


def plain(interval: Interval) -> str:
    """`8.31 (8.02-8.61)`, a number that is no share."""
    text = f"{interval.value:.2f}"
    return text if interval.low is None or interval.high is None else f"{text} ({interval.low:.2f}-{interval.high:.2f})"


def millis(microseconds: float | None) -> str:
    """Microseconds as milliseconds."""
    return "-" if microseconds is None else f"{microseconds / 1000:.2f}"


def _cells(report: Report, summary: Summary) -> dict[str, CellResult]:
    return {
        c.cell.family: c
        for c in report.cells
        if c.cell.variant == summary.variant and c.cell.length == summary.length and c.cell.question == summary.question
    }


def _families(report: Report) -> list[str]:
    return list(dict.fromkeys(c.cell.family for c in report.cells))


def _score(cell: CellResult, spread: bool) -> str:
    if cell.perplexity is None:
        return percent(cell.accuracy, spread=spread)
    return plain(cell.perplexity) if spread else f"{cell.perplexity.value:.2f}"


def what_is_scored(report: Report) -> str:
    """`Exact answers`, or `Scores` where a task gives part of a point."""
    return "Exact answers" if all(c.cell.task is None for c in report.cells) else "Scores"


def _accuracy(report: Report, summaries: list[Summary], spread: bool) -> tuple[list[str], list[list[str]]]:
    names = _families(report)
    lines = []
    for summary in summaries:
        cells = _cells(report, summary)
        lines.append(
            [
                summary.variant.label,
                summary.variant.budget_text,
                *[_score(cells[f], spread) if f in cells else "-" for f in names],
                percent(summary.accuracy, spread=spread),
                percent(summary.ratio, spread=spread),
                str(summary.accuracy.samples),
            ]
        )
    return ["method", "budget", *names, "mean", "% of full", "questions"], lines


def _signed(interval: Interval | None, spread: bool) -> str:
    """`81 (64 to 98)`, in percent; what is lost is below 0."""
    if interval is None:
        return "-"
    text = f"{100 * interval.value:.0f}"
    if not spread or interval.low is None or interval.high is None:
        return text
    return f"{text} ({100 * interval.low:.0f} to {100 * interval.high:.0f})"


def _recovered(report: Report, summaries: list[Summary], spread: bool) -> tuple[list[str], list[list[str]]]:
    """Of what the full cache gains over first and recent tokens of the same budget: a line for each method, budget and text."""
    lines = []
    for summary in summaries:
        for name, cell in _cells(report, summary).items():
            gained = cell.recovered
            if gained is None:
                continue
            every, far = (_signed(x, spread) for x in (gained.every, gained.far))
            told = [summary.variant.label, summary.variant.budget_text, name, every, far]
            lines.append([*told, f"{gained.far_tokens} / {gained.tokens}"])
    return ["method", "budget", "text", "all tokens", "far tokens", "far / all"], lines


def _agreement(report: Report, summaries: list[Summary], spread: bool) -> tuple[list[str], list[list[str]]]:
    """Beside the full cache's own answers: a line for each method, budget and task."""
    lines = []
    for summary in summaries:
        for name, cell in _cells(report, summary).items():
            found = cell.agreement
            if found is not None:
                told = [summary.variant.label, summary.variant.budget_text, name, percent(found.kept, spread=spread)]
                kl = plain(found.kl) if spread else f"{found.kl.value:.2f}"
                lines.append([*told, percent(found.top1, spread=spread), kl, str(found.tokens)])
    return ["method", "budget", "task", "answers kept", "same token", "KL, nats", "tokens"], lines


def _mass(report: Report, summaries: list[Summary]) -> tuple[list[str], list[list[str]]]:
    """Far attention: a line for each method, budget and task."""
    lines = []
    for summary in summaries:
        for name, cell in _cells(report, summary).items():
            if cell.mass is not None and summary.variant.budget is not None:
                shares = (f"{100 * share:.0f}" for share in (cell.mass.of_all, cell.mass.share))
                lines.append([summary.variant.label, summary.variant.budget_text, name, *shares])
    return ["method", "budget", "task", "of all", "of the best choice's"], lines


def _cost(report: Report, summaries: list[Summary]) -> tuple[list[str], list[list[str]]]:
    lines = []
    exceeded = any(c.usage.excess_share for summary in summaries for c in _cells(report, summary).values())
    for summary in summaries:
        usage = [c.usage for c in _cells(report, summary).values()]
        beyond = [_shares([(u.excess_share, u.excess_share_mean) for u in usage])] if exceeded else []
        lines.append(
            [
                summary.variant.label,
                summary.variant.budget_text,
                f"{100 * summary.device_share:.2f}",
                "-" if summary.variant.budget is None else f"{100 * max(u.budget_used for u in usage):.1f}",
                _shares([(u.device_share, u.device_share_mean) for u in usage]),
                _shares([(u.attended_share, u.attended_share_mean) for u in usage]),
                *beyond,
                size(max(u.device for u in usage)),
                size(max(u.host for u in usage)),
                size(max(u.disk for u in usage)),
                size(summary.moved_per_step),
                millis(summary.step_us.median),
                millis(summary.step_us.p95),
            ]
        )
    columns = [
        "method",
        "budget",
        "device, % of full KV",
        "% of budget",
        "a layer holds",
        "a layer reads",
        *(["beyond the budget"] if exceeded else []),
        "device",
        "host",
        "disk",
    ]
    return [*columns, "moved per step", "step, ms (median)", "step, ms (p95)"], lines


def _shares(found: list[tuple[float | None, float | None]]) -> str:
    """`12.1 / 10.0`: in percent of a layer's full KV, the largest and the mean; `-` where one was not measured."""
    largest, means = ([x for x in column if x is not None] for column in zip(*found))
    return f"{100 * max(largest):.1f} / {100 * max(means):.1f}" if largest and means else "-"


def tables(report: Report, *, spread: bool = True) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, columns and lines of each table: accuracy and cost for every length and question mode."""
    for question, length in dict.fromkeys((s.question, s.length) for s in report.summaries):
        found = [s for s in report.summaries if (s.question, s.length) == (question, length)]
        yield f"{what_is_scored(report)} (%), {length} tokens, question {question}", *_accuracy(report, found, spread)
        gained = _recovered(report, found, spread)
        if gained[1]:
            yield f"Recovered gain (%), {length} tokens", *gained
        agreed = _agreement(report, found, spread)
        if agreed[1]:
            yield f"Agreement with the full cache (%), {length} tokens, question {question}", *agreed
        caught = _mass(report, found)
        if caught[1]:
            yield f"Far attention caught (%), {length} tokens, question {question}", *caught
        yield f"Memory and time, {length} tokens, question {question}", *_cost(report, found)


def rich_tables(report: Report, *, spread: bool = True) -> list[Table]:
    """For a terminal; without `spread` accuracies come without their intervals."""
    result = []
    for title, columns, lines in tables(report, spread=spread):
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
        for place, name in enumerate(columns):
            table.add_column(name, justify="left" if place == 0 else "right", no_wrap=place < 2)
        for line in lines:
            table.add_row(*line)
        result.append(table)
    return result


def print_tables(report: Report, console: Console) -> None:
    """All tables, with intervals where they fit the console's width."""
    spread = console.width >= WIDE
    for table in rich_tables(report, spread=spread):
        console.print(table)
    if spread:
        console.print(CAPTION)
    for line in remarks(report):
        console.print(line)


def markdown(report: Report, *, heading: str = "###") -> str:
    """For a document."""
    parts = []
    for title, columns, lines in tables(report):
        parts += [f"{heading} {title}", "", "| " + " | ".join(columns) + " |"]
        parts.append("|" + "|".join([" --- ", *[" ---: "] * (len(columns) - 1)]) + "|")
        parts += ["| " + " | ".join(line) + " |" for line in lines]
        parts.append("")
    return "\n".join([*parts, " ".join([CAPTION, *remarks(report)]), ""])


def remarks(report: Report) -> list[str]:
    """What a reader of the tables has to know beside the caption."""
    mixed = any(c.perplexity is not None for c in report.cells)
    shown = {(c.cell.length, c.cell.question, c.cell.family) for c in report.cells if c.perplexity is None}
    meant = {(s.length, s.question, family) for s in report.summaries for family in s.families}
    left = sorted({f"{family} at {length:,}" for length, _, family in shown - meant})
    out = (
        f"In no mean, as the full cache itself scores under {100 * FAILED:.0f} % there: {', '.join(left)}."
        if left
        else ""
    )
    return [*([PERPLEXITY_CAPTION] if mixed else []), *([out] if out else []), *report.notes]


def provenance(report: Report) -> str:
    """One paragraph: model, machine, versions, commits, command, date."""
    e = report.environment
    versions = ", ".join(f"{name} {version}" for name, version in e.versions.items())
    state = "" if report.complete else " The run is not complete."
    return (
        f"Model: {report.model}. Machine: {e.machine}, {e.threads} threads of {e.cpus} cores"
        f"{', ' + e.accelerator if e.accelerator else ''}; Python {e.python}, {versions}. Commits of the rows: "
        f"{', '.join(report.commits) or 'none'}. Finished {e.finished}. Command: `{e.command}`.{state}"
    )
