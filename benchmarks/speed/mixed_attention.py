"""The kernel of mixed attention on a GPU: bytes read per second beside the copy bandwidth, SDPA and FlashInfer on the same bytes.

    python -m benchmarks.speed.mixed_attention            # on CUDA: decode steps at the shapes of Llama-3.1-8B, 4K to 64K resident entries
    python -m benchmarks.speed.mixed_attention --tune     # first the layouts: kept in the cache's folder, where compilations find them
    python -m benchmarks.speed.mixed_attention --dry-run  # tiny sizes in Triton's interpreter (TRITON_INTERPRET=1): no figures

One query token per row over exact entries in bfloat16, in three blocks as the runtime has them (kept, recent, unfolded), whose buffers
are longer than what is read; `coarse` adds a quarter as many means in 4 bits, with biases. Rows fill up to 512 MiB, so that large
calls leave the GPU's cache. Before it is timed a call must give the reference's result within the precision. Times are the device's,
without what the host takes to launch (`semkv.kernels.timing`); beside them those of calls from Python, one after the other, by CUDA
events. Medians. The bandwidth is a device-to-device copy's, bytes read and written counted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.lib.places import RESULTS
from semkv.compiler.kernel_layouts import tuning_file
from semkv.evaluation.environment import describe, now
from semkv.kernels.mixed_attention import mixed_attention_blocked
from semkv.kernels.mixed_attention.configuration import Configuration
from semkv.kernels.mixed_attention.triton import mixed_attention_launches, mixed_attention_triton
from semkv.kernels.timing import device_us
from semkv.kernels.tuning import Tuning, problem_name
from semkv.runtime.store.quantization import Quantized, quantize

RESULT = RESULTS / "mixed_attention.json"
LLAMA, TINY = (32, 8, 128), (4, 2, 16)
"""Query heads, KV heads, head dim."""
ENTRIES = (4096, 8192, 16384, 32768, 65536)
LARGE = 512 << 20
AHEAD = 40
"""Slots of a block's buffer beyond its entries."""


@dataclass(frozen=True)
class Line:
    """One call: microseconds of the device, bytes of keys and values that it reads, their rate in bytes per second, and its share of the
    copy bandwidth. reader: which kernel. call_us: microseconds of a call from Python. error: its largest difference from PyTorch in
    float32, over the largest result."""

    reader: str
    entries: int
    rows: int
    us: float
    nbytes: int
    rate: float
    share: float
    call_us: float
    error: float | None = None


@dataclass(frozen=True)
class Call:
    """Arguments of the operator: blocks, and the same keys and values in one piece [B, Hkv, N, D]."""

    q: Tensor
    where: Tensor
    blocks: list[tuple[Tensor, Tensor, Tensor]]
    means: tuple[Quantized, Quantized, Tensor, Tensor] | None
    k: Tensor
    v: Tensor

    @property
    def arguments(self) -> tuple:
        k, v, positions = (list(column) for column in zip(*self.blocks))
        if self.means is None:
            return self.q, self.where, k, v, positions
        mean_k, mean_v, places, bias = self.means
        plain = [None] * len(k)
        return (
            self.q,
            self.where,
            [*k, mean_k.codes],
            [*v, mean_v.codes],
            [*positions, places],
            [*plain, bias],
            None,
            [*plain, mean_k.scale],
            [*plain, mean_v.scale],
        )

    @property
    def nbytes(self) -> int:
        read = sum(k.nbytes + v.nbytes for k, v, _ in self.blocks)
        return read if self.means is None else read + self.means[0].nbytes + self.means[1].nbytes


def make(
    shape: tuple[int, int, int], entries: int, rows: int, coarse: int, device: torch.device, dtype: torch.dtype
) -> Call:
    """Random entries; a sixteenth is kept, as much recent, the rest unfolded."""
    q_heads, kv_heads, dim = shape
    generator = torch.Generator(device).manual_seed(entries)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device).to(dtype)

    k, v = (draw(rows, kv_heads, entries, dim) for _ in range(2))
    blocks, begin = [], 0
    for count in (entries // 16, entries // 16, entries - 2 * (entries // 16)):
        own = []
        for x in (k, v):
            buffer = x.new_zeros(rows, kv_heads, count + AHEAD, dim)
            buffer[:, :, :count] = x[:, :, begin : begin + count]
            own.append(buffer[:, :, :count])
        positions = torch.arange(begin, begin + count, dtype=torch.int32, device=device)
        blocks.append((own[0], own[1], positions.expand(rows, 1, -1)))
        begin += count
    means = None
    if coarse:
        places = torch.arange(coarse, dtype=torch.int32, device=device).expand(rows, 1, -1)
        bias = draw(rows, q_heads, 1, coarse).float()
        means = (
            quantize(draw(rows, kv_heads, coarse, dim), 4),
            quantize(draw(rows, kv_heads, coarse, dim), 4),
            places,
            bias,
        )
    where = torch.full((rows, 1), entries, device=device)
    return Call(draw(rows, q_heads, 1, dim), where, blocks, means, k, v)


def call_us(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median microseconds of `repeats` calls from Python, after three."""
    if device.type != "cuda":
        begun = time.perf_counter()
        run()
        return 1e6 * (time.perf_counter() - begun)
    for _ in range(3):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    return 1000 * sorted(begin.elapsed_time(end) for begin, end in events)[repeats // 2]


def copy_bandwidth(device: torch.device, nbytes: int) -> float:
    """Bytes read and written per second."""
    here, there = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * nbytes / (device_us(lambda: there.copy_(here), device) / 1e6)


def flashinfer_reader(call: Call) -> Callable[[], Tensor] | None:
    """FlashInfer's decode of one row on the same bytes; None where it is not installed or there are more rows."""
    if importlib.util.find_spec("flashinfer") is None or call.q.shape[0] > 1:
        return None
    import flashinfer

    return partial(flashinfer.single_decode_with_kv_cache, call.q[0, :, 0], call.k[0], call.v[0], kv_layout="HND")


def launched(call: Call, layout: Configuration, scale: float) -> Callable[[], object]:
    """Our call as the device has it: what follows from the arguments is there."""
    _, made = mixed_attention_launches(*call.arguments, scale=scale, configuration=layout)
    return lambda: [launch.run() for launch in made]


def readers(call: Call, layout: Configuration, scale: float) -> dict[str, Callable[[], Tensor]]:
    """Ours, and for exact entries alone the others, which read one piece."""
    own = partial(mixed_attention_triton, *call.arguments, scale=scale, configuration=layout)
    if call.means is not None:
        return {"semkv, exact and coarse": own}
    sdpa = partial(
        torch.nn.functional.scaled_dot_product_attention, call.q, call.k, call.v, scale=scale, enable_gqa=True
    )
    found = {"semkv": own, "SDPA": sdpa}
    flashinfer = flashinfer_reader(call)
    return found if flashinfer is None else found | {"FlashInfer": flashinfer}


def lines(call: Call, layout: Configuration, bandwidth: float, repeats: int) -> list[Line]:
    """One line per reader; our own result is checked first."""
    scale = call.q.shape[-1] ** -0.5
    found = []
    exact = mixed_attention_blocked(call.q.float(), *call.arguments[1:], scale=scale)
    for name, run in readers(call, layout, scale).items():
        error = float((run().float().view(exact.shape) - exact).abs().max() / exact.abs().max())
        if error > (0.02 if call.q.dtype == torch.bfloat16 else 1e-4):
            raise SystemExit(
                f"correctness check failed: {name} is off by {error:.3g} of the largest; nothing is reported"
            )
        device = call.q.device
        us = device_us(launched(call, layout, scale) if name.startswith("semkv") else run, device, repeats)
        rate = call.nbytes / (us / 1e6)
        entries = call.k.shape[2] + (0 if call.means is None else call.means[0].codes.shape[2])
        found.append(
            Line(
                name,
                entries,
                call.q.shape[0],
                us,
                call.nbytes,
                rate,
                rate / bandwidth,
                call_us(run, device, repeats),
                error,
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="measure layouts first")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    started = now()
    device = torch.device("cpu" if given.dry_run else "cuda")
    dtype, shape = (torch.float32, TINY) if given.dry_run else (torch.bfloat16, LLAMA)
    entries = (64,) if given.dry_run else ENTRIES
    torch.set_grad_enabled(False)
    bandwidth = copy_bandwidth(device, 1 << (20 if given.dry_run else 30))
    problem = (dtype, shape[2], shape[2], shape[0] // shape[1])
    timings: dict[str, float] = {}
    if given.tune:
        from semkv.kernels.mixed_attention.tune import CANDIDATES, tune

        candidates = CANDIDATES[:1] if given.dry_run else CANDIDATES
        best, found = tune(
            problem, shape[1], max(entries) // 4, device, candidates=candidates, repeats=1 if given.dry_run else 20
        )
        timings = {str(candidate): us for candidate, us in found.items()}
        if not given.dry_run:
            Tuning.load(tuning_file()).with_layout(device, problem, best).save(tuning_file())
        print(f"tuned for {problem_name(problem)}: {best}", flush=True)
        layout = best
    else:
        layout = Configuration(*Tuning.load(tuning_file()).layout(device, problem))
    found_lines: list[Line] = []
    print(
        f"copy: {bandwidth / 1e9:.0f} GB/s\n{'':26}{'entries':>8}{'rows':>6}{'MiB':>8}{'us':>10}{'GB/s':>8}{'of copy':>9}{'call, us':>10}",
        flush=True,
    )
    for count in entries:
        many = max(1, LARGE // (4 * shape[1] * shape[2] * count)) if not given.dry_run else 2
        for rows, coarse in dict.fromkeys(((1, 0), (1, count // 4), (many, 0))):
            for line in lines(make(shape, count, rows, coarse, device, dtype), layout, bandwidth, given.repeats):
                found_lines.append(line)
                print(
                    f"{line.reader:26}{line.entries:>8}{line.rows:>6}{line.nbytes / 2**20:>8.0f}{line.us:>10.1f}{line.rate / 1e9:>8.0f}"
                    f"{line.share:>9.0%}{line.call_us:>10.1f}",
                    flush=True,
                )
    report = {
        "dry_run": given.dry_run,
        "shape": shape,
        "dtype": str(dtype).removeprefix("torch."),
        "copy_bandwidth": bandwidth,
        "layout": asdict(layout),
        "tuning_us": timings,
        "lines": [asdict(line) for line in found_lines],
        "environment": describe(started, str(device)).model_dump(mode="json"),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
