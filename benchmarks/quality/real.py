"""SmolLM2-135M at 3, 5 and 10 % of its memory: a short evaluation on texts that every machine with Python has.

    make real                                          # half an hour on two cores; the same command goes on after an interruption
    make real ARGS=--publish                           # also writes benchmarks/results/real.json and docs/results/real.md
    python -m benchmarks.quality.real --samples 32 --lengths 2K,4K --methods full,streaming_llm,sketch,sekv,quest,h2o

It fetches the model (benchmarks/lib/real_model.py), learns codebooks for it, which are kept in the cache's folder, and runs `semkv eval`:
how much of what a long context gives to ordinary text survives (recovered gain), and whether needles are found. Half of the texts, the
reference manual of Python and its library's sources, are for calibration, the other half to be judged on.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks.lib.grids import provenance_of, table, write_document, write_results
from benchmarks.lib.places import ROOT
from benchmarks.lib.real_model import MODELS, fetch
from semkv.evaluation import Report
from semkv.evaluation.schema import CellResult, Interval
from semkv.evaluation.tables import percent
from semkv.io.cache_folder import cache_folder

METHODS = "full,streaming_llm,snapkv,quest,sketch"
BUDGETS = "0.03,0.05,0.1"
NEEDLES = "niah_single_1"
LARGE = 30_000
"""Bytes of a source file that is a text of its own."""
GAIN = (
    "*Gain recovered*: of the log-likelihood that the full cache gains over first and recent tokens (`streaming_llm` at the same budget), "
    "in percent; *far* tokens are those for which that is more than 1 nat ([evaluation.md](../evaluation.md))."
)
"""What tables of recovered gain say first."""
CALIBRATION = ("--steps", "sketch", "--length", "2048", "--samples", "6")


def texts() -> dict[str, dict[str, str]]:
    """By what they are for and their kind: the manual's topics and the library's large sources, every second one for each."""
    topics = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]
    library = Path(sysconfig.get_path("stdlib"))
    sources = [path for path in sorted(library.glob("*.py")) if path.stat().st_size > LARGE]
    code = [path.read_text(encoding="utf-8", errors="replace") for path in sources]
    purposes = (("calibration", 0), ("judged", 1))
    return {
        purpose: {"manual": "\n\n".join(topics[first::2]), "code": "\n\n".join(code[first::2])}
        for purpose, first in purposes
    }


def write_texts(folder: Path) -> dict[str, list[Path]]:
    """Files of `texts` in `folder`, by what they are for."""
    written: dict[str, list[Path]] = {}
    for purpose, kinds in texts().items():
        (folder / purpose).mkdir(parents=True, exist_ok=True)
        for kind, text in kinds.items():
            path = folder / purpose / f"{kind}.txt"
            path.write_text(text, encoding="utf-8")
            written.setdefault(purpose, []).append(path)
    return written


def run(program: str, *arguments: object) -> None:
    """A command of this environment, shown; `SystemExit` where it fails."""
    command = [str(Path(sys.executable).parent / program), *map(str, arguments)]
    print("$", program, *command[1:], flush=True)
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise SystemExit(f"{program} ended with code {done.returncode}; the same command goes on where it stopped")


def gained(interval: Interval | None) -> str:
    """`79 (70 to 88)`, in percent: worse than first and recent tokens is below 0."""
    if interval is None:
        return "-"
    spread = "" if interval.low is None else f" ({100 * interval.low:.0f} to {100 * interval.high:.0f})"
    return f"{100 * interval.value:.0f}{spread}"


def publish(report: Report, command: str) -> None:
    """`benchmarks/results/real.json`, and `docs/results/real.md` with a table for each length."""
    report = report.model_copy(update={"environment": report.environment.model_copy(update={"command": command})})
    write_results("real", report)
    parts = []
    for length in sorted({found.cell.length for found in report.cells}):
        own: dict[tuple[str, str], dict[str, CellResult]] = {}
        for found in report.cells:
            if found.cell.length == length:
                variant = found.cell.variant
                own.setdefault((variant.label, variant.budget_text), {})[found.cell.family] = found
        needles = sorted({family for cells in own.values() for family in cells} - {"perplexity"})
        lines = []
        for (label, budget), cells in own.items():
            text = cells["perplexity"]
            kept = text.recovered
            gain = ["100", "100"] if budget == "-" else [gained(kept.every), gained(kept.far)] if kept else ["-", "-"]
            lines.append([f"`{label}`", budget, *gain, *(percent(cells[name].accuracy) for name in needles)])
            lines[-1].append(f"{text.perplexity.value:.2f}" if text.perplexity else "-")
        columns = [
            "method",
            "budget",
            "gain recovered, all tokens",
            "far tokens",
            *(f"`{name}`" for name in needles),
            "perplexity",
        ]
        texts = max(found.accuracy.contexts for found in report.cells if found.cell.family == "perplexity")
        parts += [f"## {length:,} tokens, {texts} texts", table(columns, lines)]
    write_document(
        "real",
        "# A real model at 3, 5 and 10 % of its memory",
        "`benchmarks/quality/real.py --publish` writes this page, and `make real` prints the same on your machine. It is a short look: few "
        "texts and needles, wide intervals.",
        "SmolLM2-135M-Instruct, whose context was read and compressed before the text behind it, or the question, came. "
        + GAIN
        + " Needles: numbers found, of those hidden in the context. In brackets 95 % intervals, clustered by context. Every layer "
        "holds, and reads, no more than its budget, codes included; the codebooks of `sketch` are weights of the model. It holds exact "
        "tokens in 8 bits, the other methods in 16. A method that is missing at a budget is one that it is too small for.",
        *parts,
        "Codebooks are learned from every second topic of Python's reference manual and every second large source file of its "
        "library; the others are the texts. All methods of other papers are our implementations.",
        "## Provenance",
        provenance_of(report),
    )


def main() -> None:
    """Fetch, calibrate once, measure."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--output", type=Path, default=ROOT / "real_output", help="report and pictures (%(default)s)")
    options.add_argument("--profile", type=Path, help="a profile of the model; default: made from the texts, and kept")
    options.add_argument("--methods", default=METHODS, help="separated by commas (%(default)s)")
    options.add_argument(
        "--generated", default="budgeted", help="or kept beside the budget, or budgeted,kept (%(default)s)"
    )
    options.add_argument("--budgets", default=BUDGETS, help="fractions of the full KV (%(default)s)")
    options.add_argument("--lengths", default="2K", help="tokens of context (%(default)s)")
    options.add_argument("--samples", type=int, default=6, help="texts, and needles, per length (%(default)s)")
    options.add_argument("--tokens", type=int, default=96, help="that are read behind each text (%(default)s)")
    options.add_argument("--needles", default=NEEDLES, help="needle tasks (%(default)s); '' for none")
    options.add_argument("--publish", action="store_true", help="write the committed results and the page as well")
    asked = options.parse_args()
    model = fetch(MODELS["smollm2"], cache_folder() / "models")
    asked.output.mkdir(parents=True, exist_ok=True)
    written = write_texts(asked.output / "texts")
    profile = asked.profile or cache_folder() / "profiles" / "smollm2-manual-and-code"
    if not profile.exists():
        profile.parent.mkdir(parents=True, exist_ok=True)
        data = [part for path in written["calibration"] for part in ("--data", path)]
        run("semkv-profile", model, *data, *CALIBRATION, "-o", profile)
    run(
        "semkv",
        "eval",
        *("--model", model, "--profile", profile, "--kv-dtype", "float16"),
        *("--methods", asked.methods, "--budgets", asked.budgets, "--generated", asked.generated),
        *("--tasks", ",".join(name for name in ("perplexity", asked.needles) if name)),
        *("--source", f"text={written['judged'][0].parent}", "--set", f"perplexity.tokens={asked.tokens}"),
        *("--lengths", asked.lengths, "--samples", asked.samples),
        *("--json", asked.output / "real.json", "--plot", asked.output),
    )
    if asked.publish:
        report = Report.model_validate_json((asked.output / "real.json").read_text(encoding="utf-8"))
        publish(report, "make real ARGS='" + " ".join(sys.argv[1:]) + "'")


if __name__ == "__main__":
    main()
