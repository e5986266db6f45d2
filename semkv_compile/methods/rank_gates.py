"""g_phi: which components of a span's factors are worth keeping (SeKV Eq. 7)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from semkv.ir.site import AttentionSite
from semkv.methods.routers import own_heads
from semkv.profiles.schema import Profile

OPEN = 3.0
"""Initial logit of every gate: nearly everything is kept until the budget loss says otherwise."""


def _linear(inputs: int, outputs: int, generator: torch.Generator | None) -> nn.Linear:
    """As `nn.Linear` begins, by `generator`; without numbers of its own where there is none."""
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs, dtype=torch.float32, device="cpu")
    if generator is not None:
        nn.init.kaiming_uniform_(layer.weight, a=math.sqrt(5), generator=generator)
        nn.init.uniform_(layer.bias, -1 / math.sqrt(inputs), 1 / math.sqrt(inputs), generator=generator)
    return layer


class RankGates(nn.Module):
    """One small network for all sites and heads, with separate outputs for keys and values.

    Inputs: the span's singular values over their norm [R], its routing summary averaged over the query group and padded
    with zeros [d'], and log |S| / 4. Fewer than 0.1M parameters for any allowed size up to 128 hidden units.

    generator: of the numbers that training begins with; without one the parameters wait to be loaded.
    """

    def __init__(self, max_rank: int, summary_dim: int, hidden: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.max_rank, self.summary_dim = max_rank, summary_dim
        self.input = _linear(max_rank + summary_dim + 1, hidden, generator)
        self.hidden = _linear(hidden, hidden, generator)
        self.key = _linear(hidden, max_rank, generator)
        self.value = _linear(hidden, max_rank, generator)
        for head in (self.key, self.value):
            nn.init.zeros_(head.weight)
            nn.init.constant_(head.bias, OPEN)

    def forward(self, sigma: Tensor, summary: Tensor, log_size: Tensor, kind: str) -> Tensor:
        """Gates in (0, 1).

        sigma [..., r <= R] singular values, summary [..., d' <= summary_dim], log_size [...]; kind `key` or `value`
        -> [..., r].
        """
        rank = sigma.shape[-1]
        spectrum = sigma / sigma.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        features = torch.cat(
            [
                nn.functional.pad(spectrum, (0, self.max_rank - rank)),
                nn.functional.pad(summary, (0, self.summary_dim - summary.shape[-1])),
                log_size[..., None] / 4,
            ],
            dim=-1,
        )
        hidden = nn.functional.gelu(self.hidden(nn.functional.gelu(self.input(features))))
        head = self.key if kind == "key" else self.value
        return torch.sigmoid(head(hidden))[..., :rank]


class ProfileRankGates:
    """The rank gates of a profile, as `semkv.methods.forms.LowRankForms` calls them.

    trained: leading components that training has met. Those beyond are as they began, which says nothing: an output that no loss
    reached has weights of exactly zero.
    """

    def __init__(self, profile: Profile) -> None:
        section = profile.info.sekv
        if section is None:
            raise ValueError("the profile has no sekv section")
        self.network = RankGates(section.max_rank, section.gate_summary_dim, section.gate_hidden).eval()
        prefix = "sekv.gates."
        own = {name.removeprefix(prefix): x.float() for name, x in profile.tensors.items() if name.startswith(prefix)}
        self.network.load_state_dict(own)
        met = [layer.weight.detach().abs().sum(1) > 0 for layer in (self.network.key, self.network.value)]
        self.trained = min(int(own.int().cumprod(0).sum()) for own in met)
        self.routers = {name: x.float() for name, x in profile.tensors.items() if name.startswith("sekv.router.")}

    @torch.no_grad()
    def __call__(
        self, site: AttentionSite, key_sigma: Tensor, value_sigma: Tensor, mean_k: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Spectra [Hkv, m, r], mean keys [Hkv, m, D], lengths [m] -> gates of keys and of values, of the first min(r, trained)
        components, [Hkv, m, min(r, trained)]."""
        key_sigma, value_sigma = (sigma[..., : self.trained] for sigma in (key_sigma, value_sigma))
        router = own_heads(site, self.routers[f"sekv.router.{site.index}"]).unflatten(
            0, (site.kv_heads, site.group_size)
        )
        projected = torch.einsum("hgrd,hsd->hgsr", router, mean_k.float())
        summary = nn.functional.normalize(projected, dim=-1).mean(1)
        size = lengths.float().log().expand(key_sigma.shape[:2])
        return (
            self.network(key_sigma, summary, size, "key"),
            self.network(value_sigma, summary, size, "value"),
        )
