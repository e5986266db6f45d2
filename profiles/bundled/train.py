"""The recipe: trains the bundled model from nothing to its accuracy table in one run.

    python -m semkv.profiles.bundled.train --preset cpu --out runs/bundled

``cpu`` runs two one-thread processes that average their gradients (about an hour on two free cores with bf16 matrix
units); ``gpu`` trains a larger network from a random start on one GPU. Lengths grow by stages, shorter ones stay in
the mix, and the learning rate falls at the end. Stages and rate follow the share of the steps done or, where that is
more, of ``--minutes``, so a run on a slow machine still sees every length and ends annealed. A run that was stopped
goes on with ``--resume``. Writes OUT/checkpoint.pt, OUT/model (Hugging Face layout, fp16) and log lines.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
import time
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor

from .data import training_batch
from .evaluate import SAMPLES, accuracy_table
from .network import Params, Shape, export, forward, random_init, structured_init

SHORTER_SHARE = 0.3
"""Share of a stage's steps that take a shorter length, so that what was learned first is not forgotten."""
SHORTEST_MIXED = 256


@dataclass(frozen=True)
class Preset:
    """A run's sizes. ``stages`` are (sequence length in tokens, steps); ``tokens`` is per step and process."""

    shape: Shape = field(default_factory=Shape)
    structured: bool = True
    processes: int = 2
    device: str = "cpu"
    tokens: int = 4096
    stages: tuple[tuple[int, int], ...] = ((128, 150), (256, 300), (512, 600), (1024, 1000), (2048, 900), (4096, 250))
    rate: float = 2e-3
    warmup: int = 50
    constant: float = 0.5
    decay: float = 0.01
    minutes: float = math.inf
    save_every: int = 200

    @property
    def steps(self) -> int:
        return sum(steps for _, steps in self.stages)


PRESETS = {
    "cpu": Preset(),
    "gpu": Preset(
        shape=Shape(layers=6, hidden=320, mlp=896),
        structured=False,
        processes=1,
        device="cuda" if torch.cuda.is_available() else "cpu",
        tokens=65536,
        stages=((128, 1000), (256, 1500), (512, 2000), (1024, 3000), (2048, 3000), (4096, 2000), (8192, 500)),
        rate=1e-3,
        warmup=500,
    ),
}


def share_done(preset: Preset, step: int, elapsed: float) -> float:
    """Share of the run that is done: of its steps or, where that is more, of its minutes (``elapsed``: seconds)."""
    return min(max(step / preset.steps, elapsed / 60 / preset.minutes), 1.0)


def length_at(preset: Preset, done: float, rng: random.Random) -> int:
    """Sequence length when ``done`` of the run is done: its stage's, or at times a shorter one."""
    ends = accumulate(steps / preset.steps for _, steps in preset.stages)
    reached = (length for (length, _), end in zip(preset.stages, ends, strict=True) if done < end)
    length = next(reached, preset.stages[-1][0])
    shorter = [n for n, _ in preset.stages if SHORTEST_MIXED <= n < length]
    return rng.choice(shorter) if shorter and rng.random() < SHORTER_SHARE else length


def rate_at(preset: Preset, step: int, done: float) -> float:
    """Learning rate: linear warm-up, constant, then a half cosine to 2 % of it as ``done`` goes to 1."""
    fall = max((done - preset.constant) / (1 - preset.constant), 0.0)
    return preset.rate * min(1.0, (step + 1) / preset.warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * fall)))


def answer_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, float]:
    """Weighted mean cross-entropy, and the share of answer tokens (weight 1) that are right."""
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    loss = (loss * weights.flatten()).sum() / weights.sum()
    with torch.no_grad():
        answers = weights == 1.0
        right = logits[answers].argmax(-1) == targets[answers]
    return loss, right.float().mean().item()


class FlatParameters:
    """Parameters and gradients in one buffer each: one all-reduce, one clip, one optimiser state."""

    def __init__(self, params: Params, device: str):
        self.values = torch.cat([p.flatten() for p in params.values()]).to(device)
        self.grads = torch.zeros_like(self.values)
        self.params: Params = {}
        at = 0
        for name, p in params.items():
            view = self.values[at : at + p.numel()].view_as(p).detach().requires_grad_()
            view.grad = self.grads[at : at + p.numel()].view_as(p)
            self.params[name] = view
            at += p.numel()


def run(rank: int, preset: Preset, out: Path, seed: int, resume: bool, rendezvous: str) -> None:
    """One process of a run. Step, rank and seed fix its data, so a resumed run sees what an unbroken one sees."""
    if preset.device == "cpu":
        torch.set_num_threads(1)
    if preset.processes > 1:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=preset.processes)
    start = structured_init if preset.structured else random_init
    flat = FlatParameters(start(preset.shape, seed), preset.device)
    optimiser = torch.optim.AdamW(
        flat.params.values(), lr=preset.rate, betas=(0.9, 0.98), weight_decay=preset.decay, fused=True
    )
    first, elapsed = 0, 0.0
    checkpoint = out / "checkpoint.pt"
    if resume and checkpoint.exists():
        saved = torch.load(checkpoint, map_location=preset.device, weights_only=True)
        flat.values.copy_(saved["values"])
        optimiser.load_state_dict(saved["optimiser"])
        first, elapsed = saved["step"], saved["elapsed"]

    began = time.monotonic() - elapsed
    shown, right, loss_sum, since = time.monotonic(), 0.0, 0.0, 0
    step = first
    while step < preset.steps and elapsed <= 60 * preset.minutes:
        done = share_done(preset, step, elapsed)
        length = length_at(preset, done, random.Random(f"{seed}-{step}"))
        rng = random.Random(f"train-{seed}-{step}-{rank}")
        ids, positions, targets, weights = (x.to(preset.device) for x in training_batch(rng, length, preset.tokens))
        flat.grads.zero_()
        loss, accuracy = answer_loss(forward(flat.params, preset.shape, ids, positions), targets, weights)
        loss.backward()
        if preset.processes > 1:
            clock = torch.tensor([time.monotonic() - began], dtype=torch.float64, device="cpu")
            dist.broadcast(clock, 0)
            elapsed = clock.item()
            dist.all_reduce(flat.grads)
            flat.grads.div_(preset.processes)
        else:
            elapsed = time.monotonic() - began
        flat.grads.mul_((1.0 / (flat.grads.norm() + 1e-6)).clamp(max=1.0))
        optimiser.param_groups[0]["lr"] = rate_at(preset, step, done)
        optimiser.step()
        right, loss_sum, since = right + accuracy, loss_sum + loss.item(), since + 1
        step += 1
        if rank == 0 and (since == 20 or step == preset.steps):
            pace = (time.monotonic() - shown) / since
            left = min(pace * (preset.steps - step) / 60, preset.minutes - elapsed / 60)
            print(
                f"step {step}/{preset.steps} length {length} loss {loss_sum / since:.3f} "
                f"answers {right / since:.3f} rate {optimiser.param_groups[0]['lr']:.1e} "
                f"{preset.tokens * preset.processes / pace:.0f} tokens/s {elapsed / 60:.1f} min, {left:.0f} to go",
                flush=True,
            )
            shown, right, loss_sum, since = time.monotonic(), 0.0, 0.0, 0
        if rank == 0 and step % preset.save_every == 0:
            save(checkpoint, flat, optimiser, step, elapsed)
            export(flat.params, preset.shape, out / "model")
    if rank == 0:
        save(checkpoint, flat, optimiser, step, elapsed)
        export(flat.params, preset.shape, out / "model")
    if preset.processes > 1:
        dist.barrier()
        dist.destroy_process_group()


def save(path: Path, flat: FlatParameters, optimiser: torch.optim.Optimizer, step: int, elapsed: float) -> None:
    """Writes a checkpoint that replaces the last one only when complete."""
    state = {"values": flat.values, "optimiser": optimiser.state_dict(), "step": step, "elapsed": elapsed}
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def train(preset: Preset, out: Path, seed: int = 0, resume: bool = False) -> Path:
    """Runs ``preset`` to its end; the folder of the exported model."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        args = (preset, out, seed, resume, f"{folder}/rendezvous")
        if preset.processes > 1:
            mp.spawn(run, args=args, nprocs=preset.processes)
        else:
            run(0, *args)
    return out / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=tuple(PRESETS), default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="end, annealed, after this many minutes of training"
    )
    parser.add_argument("--max-steps", type=int, help="cut every stage to this many steps (a dry run)")
    args = parser.parse_args()
    preset = PRESETS[args.preset]
    changes = {"minutes": args.minutes}
    if args.max_steps:
        changes["stages"] = tuple((length, min(steps, args.max_steps)) for length, steps in preset.stages)
    folder = train(replace(preset, **changes), args.out, args.seed, args.resume)
    accuracy_table(folder, SAMPLES)


if __name__ == "__main__":
    main()
