"""Which code of a key finds the attention that a real model pays to far tokens, at how many bytes: SmolLM2-135M, by layer and head.

    python -m benchmarks.quality.codes  # writes benchmarks/results/codes.json and docs/results/codes.md; 15 minutes on two cores
    python -m benchmarks.quality.codes --every 6 --calibration A.txt --texts B.txt  # a look: every sixth layer, texts of yours

Far is what lies beyond the first 4 and the last 32 tokens of the context. For each query of the last 64 the tokens with the best scores by
a code are chosen, the best of a query group's, and the true attention on them is summed: `caught`, of all far attention. True attention
itself chooses as well: the ceiling. Codes that are calibrated are made from other texts than those they are judged on.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import semkv
from benchmarks.lib.grids import table, write_document
from benchmarks.lib.places import DOCS, RESULTS, ROOT
from benchmarks.lib.real_model import MODELS, fetch
from semkv.cli.gguf import load_gguf
from semkv.evaluation.environment import describe, now
from semkv.io.cache_folder import cache_folder
from semkv.profiles.calibration.codebooks import LEVELS, learn, root_of
from semkv.profiles.schema.codes import Codebooks

CORPUS = ROOT.parent / "shared" / "data" / "corpus"
CALIBRATION = (
    "moby_dick.txt",
    "origin_of_species.txt",
    "state_of_the_union_1945_2006.txt",
    "python_peps_public_domain.txt",
)
TEXTS = ("emerson_essays.txt", "pride_and_prejudice.txt", "python_peps_public_domain.txt")
TOKENS, PLACES = 3072, 2
ASKED, RECORDED = 64, 256
SINKS, WINDOW, PAGE = 4, 32, 16
SHARES = (0.02, 0.05, 0.1)
DRAWN = 0.05
"""The share of the picture."""
STAGES, ROUNDS = (1, 2, 4), 12
"""Bytes of a code; rounds of k-means."""


@dataclass(frozen=True)
class Record:
    """Of one text and layer, after rotary embedding: keys [Hkv, n, D] and the last queries [Hq, w, D]."""

    keys: Tensor
    queries: Tensor


@dataclass(frozen=True)
class Head:
    """What calibration knows of one KV head: the mean key [D]; root [D, D] and its inverse, by whose columns keys and queries are compared
    (`semkv.profiles.calibration.codebooks.root_of`); principal directions of keys in that space [D, D]; and residual codebooks by how many
    of the directions they keep."""

    mean: Tensor
    root: Tensor
    inverse: Tensor
    directions: Tensor
    books: dict[int, Codebooks]


def read(compiled: Any, tokenizer: Any, path: Path, place: int) -> list[Record]:
    """The layers' keys and last queries for `TOKENS` tokens of a text, from its `place`th part of `2 * PLACES` on."""
    text = path.read_text(encoding="utf-8")
    at = place * len(text) // (2 * PLACES)
    ids = tokenizer(text[at : at + 8 * TOKENS], add_special_tokens=False)["input_ids"][:TOKENS]
    if len(ids) < TOKENS:
        raise SystemExit(f"{path}: fewer than {TOKENS} tokens from character {at} on; give a longer text")
    record = compiled.prefill_record(torch.tensor(ids), all_queries=True)
    sites = compiled.program.sites
    return [
        Record(record.keys[site.store].float(), record.queries[site.index][:, -RECORDED:].float()) for site in sites
    ]


def calibrate(keys: Tensor, queries: Tensor) -> Head:
    """keys [n, D] and queries [m, D] of one KV head over all texts. An error of a key counts as what it does to products with queries."""
    mean, moment = keys.mean(0), (queries.T @ queries / len(queries))[None]
    whole = root_of(moment, keys.shape[-1])[0]
    x = (keys - mean) @ whole
    directions = torch.linalg.eigh((x.T @ x).double())[1].flip(1).float()
    books = {}
    for rank in (keys.shape[-1], keys.shape[-1] // 2):
        root = root_of(moment, rank)
        generator = torch.Generator().manual_seed(0)
        code, scale = learn(((keys - mean) @ root[0])[None], max(STAGES), ROUNDS, generator)
        vectors = (code.float() - LEVELS - 1) * scale.float()[..., None]
        books[rank] = Codebooks(mean[None], vectors, root)
    return Head(mean, whole, torch.linalg.pinv(whole.double()).float().T, directions, books)


def rounded(x: Tensor, bits: int) -> Tensor:
    """x [n, r] in `bits` bits a number, within 2.5 standard deviations of each column."""
    limit = 2.5 * x.std(0, keepdim=True)
    step = 2 * limit / (2**bits - 1)
    return ((x.clamp(-limit, limit) + limit) / step).round() * step - limit


Scores = Callable[[Tensor, Tensor, Head], Tensor]
"""(queries [G, T, D], keys [n, D], head) -> [G, T, n], in place of their products."""


def by_books(stages: int, part: int = 1) -> Scores:
    """Residual codebooks from calibration, a byte for each, along one of `part` of the directions."""

    def scores(q: Tensor, k: Tensor, head: Head) -> Tensor:
        whole = head.books[k.shape[-1] // part]
        books = Codebooks(whole.mean, whole.books[:, :stages], whole.root)
        return q @ books.decode(books.encode(k[None]))[0].T

    return scores


def by_calibrated_directions(rank: int, bits: int) -> Scores:
    """The first directions of keys where queries look, from calibration: the sketch of version 0.1."""

    def scores(q: Tensor, k: Tensor, head: Head) -> Tensor:
        basis = head.directions[:, :rank]
        return (q @ head.inverse @ basis) @ rounded((k - head.mean) @ head.root @ basis, bits).T

    return scores


def by_own_directions(rank: int, bits: int) -> Scores:
    """The first principal directions of the prompt's own keys."""

    def scores(q: Tensor, k: Tensor, head: Head) -> Tensor:
        centred = k - k.mean(0)
        basis = torch.linalg.svd(centred, full_matrices=False)[2][:rank].T
        return (q @ basis) @ rounded(centred @ basis, bits).T

    return scores


def by_pages(kind: str) -> Scores:
    """Pages of 16 by their mean key, or by the bounds of their keys (Quest); a token has its page's score."""

    def scores(q: Tensor, k: Tensor, head: Head) -> Tensor:
        pages = k[: len(k) // PAGE * PAGE].unflatten(0, (-1, PAGE))
        if kind == "mean":
            found = q @ pages.mean(1).T
        else:
            found = q.clamp(min=0) @ pages.amax(1).T + q.clamp(max=0) @ pages.amin(1).T
        found = found.repeat_interleave(PAGE, -1)
        return torch.cat([found, found.new_full((*found.shape[:-1], len(k) - found.shape[-1]), float("-inf"))], -1)

    return scores


CEILING = "true attention"
CODES: dict[str, tuple[float, Scores]] = {
    CEILING: (0, lambda q, k, head: q @ k.T),
    **{f"codebooks, {n} byte{'s' * (n > 1)}": (n, by_books(n)) for n in STAGES},
    **{f"codebooks of half of the directions, {n} byte{'s' * (n > 1)}": (n, by_books(n, 2)) for n in STAGES},
    "calibrated directions, 8 of 4 bits": (4, by_calibrated_directions(8, 4)),
    "calibrated directions, 16 of 2 bits": (4, by_calibrated_directions(16, 2)),
    "calibrated directions, 16 of 4 bits": (8, by_calibrated_directions(16, 4)),
    "the prompt's directions, 8 of 4 bits": (4, by_own_directions(8, 4)),
    "the prompt's directions, 16 of 4 bits": (8, by_own_directions(16, 4)),
    "pages of 16, mean in 8 bits": (4, by_pages("mean")),
    "pages of 16, bounds in 8 bits": (8, by_pages("bounds")),
}
"""Bytes of a token and KV head of 64 dims, and what scores by them. Codebooks and directions are weights of the model, not of a token."""


PANELS = (CEILING, "codebooks, 2 bytes", "calibrated directions, 16 of 2 bits", "pages of 16, bounds in 8 bits")

Sums = dict[tuple[str, float, int, int], list[float]]
"""Attention caught and all that is far, by code, share of the tokens, layer and KV head."""


def caught(
    record: Record, kv_head: int, group: int, scale: float, head: Head
) -> Iterator[tuple[str, float, float, float]]:
    """(code, share of tokens, attention caught, far attention) of one text and KV head, summed over queries."""
    k = record.keys[kv_head]
    q = record.queries[kv_head * group : (kv_head + 1) * group, -ASKED:]
    n, asked = len(k), torch.arange(len(k) - ASKED, len(k))
    true = (q @ k.T * scale).masked_fill(torch.arange(n) > asked[:, None], float("-inf")).softmax(-1)
    far = slice(SINKS, n - ASKED - WINDOW)
    mass = true[..., far]
    for name, (_, scores) in CODES.items():
        best = (scores(q, k[far], head) * scale).log_softmax(-1).amax(0)
        for share in SHARES:
            chosen = best.topk(int(share * n), -1).indices.expand(group, -1, -1)
            yield name, share, float(mass.gather(-1, chosen).sum()), float(mass.sum())


def measure(paths: list[tuple[Path, int]], texts: list[tuple[Path, int]], every: int) -> dict[str, Any]:
    """Caught and far attention by code, share of tokens, layer and KV head."""
    model, tokenizer = load_gguf(fetch(MODELS["smollm2"], cache_folder() / "models"))
    compiled = semkv.compile(model, config=semkv.CompileConfig(kv_dtype="float16"))
    read_all = {}
    for kind, given in (("calibration", paths), ("texts", texts)):
        read_all[kind] = []
        for path, place in given:
            read_all[kind].append(read(compiled, tokenizer, path, place)[::every])
            print(f"read {path.name}, part {place}", flush=True)
    sites = compiled.program.sites[::every]
    sums: Sums = defaultdict(lambda: [0.0, 0.0])
    for at, site in enumerate(sites):
        for kv_head in range(site.kv_heads):
            group = slice(kv_head * site.group_size, (kv_head + 1) * site.group_size)
            keys = torch.cat([one[at].keys[kv_head, SINKS:] for one in read_all["calibration"]])
            queries = torch.cat([one[at].queries[group].flatten(0, 1) for one in read_all["calibration"]])
            head = calibrate(keys, queries)
            for one in read_all["texts"]:
                for name, share, mine, far in caught(one[at], kv_head, site.group_size, site.scale, head):
                    total = sums[name, share, site.index, kv_head]
                    total[0] += mine
                    total[1] += far
        print(f"layer {site.index}", flush=True)
    layers, kv_heads = [site.index for site in sites], range(sites[0].kv_heads)
    return {
        "shares": {name: [whole(sums, name, share, layers, kv_heads) for share in SHARES] for name in CODES},
        "layers": layers,
        "heads": {
            name: [[whole(sums, name, DRAWN, [layer], [h]) for layer in layers] for h in kv_heads] for name in PANELS
        },
        "token_nbytes": 2 * (sites[0].key_dim + sites[0].value_dim),
    }


def whole(sums: Sums, code: str, share: float, layers: Iterable[int], kv_heads: Iterable[int]) -> float:
    """Of the far attention of some layers and heads, the part that a code catches with a share of the tokens."""
    found = [sums[code, share, layer, h] for layer, h in product(layers, kv_heads)]
    return round(sum(mine for mine, _ in found) / sum(far for _, far in found), 6)


def draw(report: dict[str, Any], path: Path) -> None:
    """Per layer and head: the ceiling at 5 % of the tokens, and what three codes catch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots(len(PANELS), 1, sharex=True)
    for axis, name in zip(axes, PANELS):
        grid = report["heads"][name]
        image = axis.imshow(grid, vmin=0, vmax=1, aspect="auto", cmap="viridis")
        axis.set(title=name, yticks=range(len(grid)), ylabel="KV head")
    axes[-1].set(xlabel="layer", xticks=range(len(report["layers"])), xticklabels=report["layers"])
    figure.colorbar(image, ax=axes, label=f"far attention caught by {100 * DRAWN:g} % of the tokens")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def write_page(report: dict[str, Any]) -> None:
    """`docs/results/codes.md` and its picture."""
    token, lines, at = report["token_nbytes"], [], SHARES.index(DRAWN)
    ceiling = report["shares"][CEILING][at]
    for name, (nbytes, _) in CODES.items():
        shares = report["shares"][name]
        lines.append([name, f"{nbytes:g}", f"{100 * nbytes / token:.1f}", *(f"{100 * x:.1f}" for x in shares)])
        lines[-1].append("-" if not nbytes else f"{100 * shares[at] / ceiling:.0f}")
    chosen = [f"{100 * share:g} % of the tokens" for share in SHARES]
    draw(report, DOCS / "codes" / "heads.png")
    environment = report["environment"]
    write_document(
        "codes",
        "# Which code of a key finds far attention",
        "Made by `benchmarks/quality/codes.py`.",
        "A method that brings tokens back must know which. It keeps a code of every key on the device and scores the query "
        "against the codes. The table says how much of SmolLM2-135M's attention beyond the first 4 and last 32 tokens the best "
        "tokens by each code hold, all layers and heads together, and of that ceiling which part at 5 % of the tokens. Bytes "
        f"are of one token in one KV head, whose key and value take {token} bytes in 16 bits.",
        table(["code", "bytes", "% of the KV", *chosen, "% of the ceiling, at 5 %"], lines),
        "Codebooks are learned once per model and KV head: 256 vectors, then 256 for what those leave, and so on; a token has the "
        "number of its nearest vector in each, a byte. An error of a key is weighed by what it does to products with this head's "
        "queries. Those of a profile keep the half of the directions along which queries are longest, and take half of the room on disk. "
        "The sketch of version 0.1 has calibrated directions; its rank was chosen by attention that is mostly near.",
        "![Far attention caught, by layer and KV head](codes/heads.png)",
        "## Provenance",
        f"Contexts of {TOKENS} tokens, {ASKED} queries each. Calibrated on {', '.join(report['calibration'])}; judged on "
        f"{', '.join(report['texts'])}: other places of a book where both name it. Machine: {environment['machine']}. "
        f"Commit: {environment['commit']}. Command: `{environment['command']}`.",
    )


def main() -> None:
    """Measure, write the JSON and the page."""
    options = ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--calibration", type=Path, nargs="+", help="texts to calibrate on (default: %(default)s)")
    options.add_argument(
        "--texts", type=Path, nargs="+", help="texts to judge on, their second halves (default: %(default)s)"
    )
    options.add_argument(
        "--every", type=int, default=1, help="measure every so many layers; more than 1 writes nothing"
    )
    options.add_argument("--page", action="store_true", help="write the page from the committed figures")
    options.set_defaults(calibration=[CORPUS / name for name in CALIBRATION], texts=[CORPUS / name for name in TEXTS])
    given = options.parse_args()
    path = RESULTS / "codes.json"
    if given.page:
        write_page(json.loads(path.read_text(encoding="utf-8")))
        return
    for text in (*given.calibration, *given.texts):
        if not text.is_file():
            options.error(f"{text}: no such text; name some with --calibration and --texts")
    started = now()
    calibration = [(text, place) for text in given.calibration for place in range(PLACES)]
    texts = [(text, PLACES + place) for text in given.texts for place in range(PLACES)]
    report = measure(calibration, texts, given.every)
    report |= {"environment": describe(started).model_dump(mode="json"), "tokens": TOKENS}
    report |= {
        kind: sorted({text.name for text, _ in of}) for kind, of in (("calibration", calibration), ("texts", texts))
    }
    for name in CODES:
        print(name, *(f"{100 * share:.1f}" for share in report["shares"][name]))
    if given.every == 1:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        write_page(report)


if __name__ == "__main__":
    main()
