"""Quantised, adapted and offloaded weights: does a compiled model answer as the model does, and keep packed weights packed?

    make test-weights                                    # all rows, in an environment with the libraries
    python -m benchmarks.quality.weights_table --only lora       # rows with the word in their name; the other rows stay as they were
    python -m benchmarks.quality.weights_table --page            # docs/weights.md from benchmarks/results/weights.json

A row is a process of its own, so that no library changes what another row finds. It makes a small model of random weights, hands it to
the library, and asks for `generate`'s tokens. Where that fails, the library itself does not run here, and the row says so in its words.
Then semkv compiles the model. The row is

- `equal`: at `full` the tokens are the model's own, and the logits nearer to them by a factor of ten than those of the weights before they
  were rounded or adapted, or as near as its own of embeddings that are off by their dtype's epsilon (rounded activations make much of
  little); a method that drops tokens runs; both answer the same after `save` and `load`; and the program holds no more bytes of weights
  than the model, so that nothing was unpacked;
- `refused`: `CaptureError` or `ArtifactError`, with its words;
- `differs` or `error`: a defect, and the command exits with 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.lib.grids import table
from benchmarks.lib.places import RESULTS, ROOT
from benchmarks.quality.weights_rows import PROMPT, ROWS, plain, prompt
from semkv.evaluation.environment import describe, now

RESULT, PAGE = RESULTS / "weights.json", ROOT / "docs" / "weights.md"
START = "<!-- weights: written by `python -m benchmarks.quality.weights_table` from benchmarks/results/weights.json -->"
END = "<!-- end of weights -->"
NEW_TOKENS = 16
SECONDS = 240
"""A row's limit."""
EXTRA = 1.02
"""Bytes of a program over those of its model that are none of weights: tables of positions, numbers of a kernel."""
DEFECTS = ("differs", "error")


def tokens(model: Any) -> list[int]:
    import torch

    ids = prompt()
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )[0, ids.shape[1] :].tolist()


def nbytes(*modules: Any) -> int:
    """Bytes of all parameters and buffers, each memory once, with what wrapping tensors hold."""
    import torch

    from semkv.model.plain_tensors import named_plain_tensors

    held = [x for module in modules for _, x in named_plain_tensors(module)]
    for module in modules:  # HQQ keeps scales in a dict
        kept = [value for each in module.modules() for value in vars(each).values() if type(value) is dict]
        held += [x for values in kept for x in values.values() if type(x) is torch.Tensor]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}.values())


def apart(compiled: Any, model: Any) -> tuple[float, float, float]:
    """Largest difference of logits from the model's: of the compiled one in two parts, of its own where embeddings are off by their dtype's
    epsilon, and of the one that it was made of."""
    import torch

    ids, half = prompt(), PROMPT // 2
    with torch.no_grad():
        wanted = model(ids).logits[:, half:].float()
        before = plain(model.dtype)(ids).logits[:, half:].float()
        embedded = model.get_input_embeddings()(ids)
        noise = (
            torch.randn(embedded.shape, generator=torch.Generator().manual_seed(2)) * torch.finfo(embedded.dtype).eps
        )
        own = model(inputs_embeds=embedded * (1 + noise.to(embedded.dtype))).logits[:, half:].float()
        got = compiled.extend(compiled.prefill(ids[:, :half]), ids[:, half:], all_logits=True).float()
    error, own_error, change = (float((x - wanted).abs().max()) for x in (got, own, before))
    return error, own_error, change


def checked(model: Any, folder: Path) -> dict[str, Any]:
    """What semkv makes of a model that runs: outcome, reason and bytes."""
    import semkv
    from semkv.errors import ArtifactError, CaptureError

    expected = tokens(model)
    try:
        full = semkv.compile(model)
        small = full.with_method("streaming_llm", 0.3)
        program = full.program
        graphs = [x for x in (program.body, program.head, program.prefill, program.decode) if x is not None]
        found: dict[str, Any] = {"model_bytes": nbytes(model), "program_bytes": nbytes(*graphs)}
        wrong = []
        if tokens(full) != expected:
            wrong.append("tokens at full")
        found["error"], found["own_error"], found["change"] = apart(full, model)
        if 10 * found["error"] > found["change"] > 0 and found["error"] > 2 * found["own_error"]:
            wrong.append("logits no nearer to the model's than those of the weights before")
        for name, compiled in (("full", full), ("streaming_llm", small)):
            before = tokens(compiled)
            compiled.save(folder / name)
            if tokens(semkv.load(folder / name)) != before:
                wrong.append(f"tokens of {name} after loading")
        if found["program_bytes"] > EXTRA * found["model_bytes"]:
            wrong.append("the program holds more bytes than the model")
    except (CaptureError, ArtifactError) as error:
        return {"outcome": "refused", "reason": f"{type(error).__name__}: {error}"}
    return {"outcome": "differs" if wrong else "equal", "reason": "; ".join(wrong), **found}


def one(name: str) -> dict[str, Any]:
    """The row `name`, in this process."""
    row = ROWS[name]
    missing = [each for each in row.needs if not _version(each)]
    if missing:
        return {"outcome": "not installed", "reason": f"pip installs no {missing[0]} here"}
    with tempfile.TemporaryDirectory() as folder:
        import torch

        torch.manual_seed(0)
        try:
            model = row.make(Path(folder)).eval()
            tokens(model)
        except Exception as error:
            return {"outcome": "not on a CPU", "reason": f"{type(error).__name__}: {error}"}
        try:
            found = checked(model, Path(folder))
        except Exception as error:
            import traceback

            traceback.print_exc()
            return {"outcome": "error", "reason": f"{type(error).__name__}: {error}"}
        return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def ran(name: str) -> dict[str, Any]:
    """The row `name`, in a process of its own."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.quality.weights_table", "--row", name],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        lines = done.stdout.splitlines()
        found = json.loads(lines[-1]) if done.returncode == 0 and lines else None
        if found is None or found["outcome"] in DEFECTS:
            print(done.stderr[-3000:], file=sys.stderr)
        found = found or {"outcome": "error", "reason": f"the process ended with {done.returncode}"}
    except subprocess.TimeoutExpired:
        found = {"outcome": "error", "reason": f"took more than {SECONDS} s"}
    found["reason"] = " ".join(found["reason"].split())[:600]
    versions = {each: _version(each) for each in ROWS[name].needs}
    return {"name": name, **found, "versions": versions, "seconds": round(time.monotonic() - began, 1)}


def block(content: dict[str, Any]) -> str:
    """The paragraph and table of the page."""
    lines = []
    for row in content["rows"]:
        version = ", ".join(f"{name} {number}" for name, number in row["versions"].items() if number)
        size = f"{row['program_bytes'] / row['model_bytes']:.2f}" if "program_bytes" in row else "-"
        reason = row["reason"].replace("|", "\\|").replace("<", "&lt;")
        lines.append(
            [
                row["name"],
                version or "-",
                row["outcome"],
                size,
                (reason[:257] + "..." if len(reason) > 260 else reason) or "-",
            ]
        )
    made = content["environment"]
    equal = sum(row["outcome"] == "equal" for row in content["rows"])
    intro = (
        f"{len(lines)} rows, {equal} equal, on {made['machine']}, torch {made['versions']['torch']}, transformers "
        f"{made['versions']['transformers']}, commit {made['commit']}. Made by `make test-weights`; do not edit."
    )
    return f"{intro}\n\n{table(['weights', 'library', 'outcome', 'bytes: program / model', 'why'], lines)}"


def filled(text: str, content: dict[str, Any]) -> str:
    """`text` with the part between START and END renewed."""
    if text.count(START) != 1 or text.count(END) != 1:
        raise SystemExit(f"{PAGE.name} needs the lines {START!r} and {END!r} once each")
    before, rest = text.split(START)
    return f"{before}{START}\n\n{block(content)}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name has this word")
    parser.add_argument("--row", choices=ROWS, help="one row, in this process, as JSON")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    given = parser.parse_args()
    if given.row:
        warnings.simplefilter("ignore")
        print(json.dumps(one(given.row)))
        return
    content = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else {"rows": []}
    if not given.page:
        started = now()
        names = [name for name in ROWS if given.only in name]
        if not names:
            raise SystemExit(f"--only {given.only!r} is in the name of no row; the rows: {', '.join(ROWS)}")
        rows = {row["name"]: row for row in content["rows"]}
        for name in names:
            rows[name] = ran(name)
            print(
                f"{name}: {rows[name]['outcome']} ({rows[name]['seconds']} s) {rows[name]['reason'][:200]}", flush=True
            )
        content = {
            "environment": describe(started).model_dump(mode="json"),
            "rows": [rows[name] for name in ROWS if name in rows],
        }
        RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), content), encoding="utf-8")
    if defects := [row["name"] for row in content["rows"] if row["outcome"] in DEFECTS]:
        raise SystemExit(f"defects: {', '.join(defects)}")


if __name__ == "__main__":
    main()
