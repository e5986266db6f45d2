"""Models that change after they were compiled: adapters that are switched and merged, weights that are trained further."""

from __future__ import annotations

import copy
from typing import Any

import torch
from journey import Desk, Result, continued, journey, refusal
from peft import LoraConfig, get_peft_model
from programs.several_models import another_model
from torch import Tensor

import semkv
from semkv.errors import StaleModelError, StateError

NEW = 5


def prompt(desk: Desk) -> Tensor:
    return desk.ids(desk.haystack("dense", 400).context)


def with_adapters(*names: str) -> Any:
    """A small model of its own with LoRA adapters of these names, whose numbers are not zero; the first is active."""
    config = LoraConfig(r=2, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(copy.deepcopy(another_model()), config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    generator = torch.Generator(device="cpu").manual_seed(9)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64, device="cpu"))
    return model.to(torch.float64).eval()


def switched_plainly(model: Any, desk: Desk) -> Result:
    adapted = with_adapters("first", "second")
    made = [continued(adapted, prompt(desk), NEW)]
    adapted.set_adapter("second")
    return [*made, continued(adapted, prompt(desk), NEW)]


@journey("snapkv", plain=switched_plainly, alone=True)
def adapters_that_are_switched(model: Any, desk: Desk) -> Result:
    """A switch is refused until `refresh`; then the other adapter answers."""
    adapted = with_adapters("first", "second")
    compiled = semkv.compile(adapted, method=desk.method, budget=desk.budget)
    made = [continued(compiled, prompt(desk), NEW)]
    adapted.set_adapter("second")
    assert "refresh()" in str(refusal(StaleModelError, lambda: continued(compiled, prompt(desk), NEW)))
    compiled.refresh()
    made.append(continued(compiled, prompt(desk), NEW))
    assert made[0] != made[1]
    return made


def trained_plainly(model: Any, desk: Desk) -> Result:
    merged = with_adapters("only").merge_and_unload()
    made = [continued(merged, prompt(desk), NEW)]
    train(merged)
    return [*made, continued(merged, prompt(desk), NEW)]


def train(model: Any) -> None:
    """A step of training, as far as anybody sees."""
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(-1.0)


@journey("quest", plain=trained_plainly, alone=True)
def an_adapter_merged_and_the_model_trained_further(model: Any, desk: Desk) -> Result:
    """Merged before it was compiled; new weights are followed, and conversations of the old ones are refused."""
    merged = with_adapters("only").merge_and_unload()
    compiled = semkv.compile(merged, method=desk.method, budget=desk.budget)
    state = compiled.prefill(prompt(desk))
    made = [continued(compiled, prompt(desk), NEW, state=state)]
    train(merged)
    made.append(continued(compiled, prompt(desk), NEW))
    assert "read the text again" in str(refusal(StateError, lambda: compiled.extend(state, prompt(desk)[:, :2])))
    assert made[0] != made[1]
    return made
