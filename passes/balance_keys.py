"""Keys mapped so that few bits hold more of them, and no softmax changes: k becomes (k - mean) * scale, q becomes q / scale."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from semkv.errors import ConfigError
from semkv.ir.graph import attention_nodes, copy_graph_module, finish
from semkv.ir.program import KEY_MEAN, KEY_SCALE, Program
from semkv.ir.site import AttentionSite
from semkv.passes.base import Pass, PassOptions
from semkv.passes.graph_utils import aten
from semkv.profiles.schema.codes import KeyBalance

NEUTRAL = {aten.sub.Tensor: 0, aten.mul.Tensor: 1}
"""Constants that change nothing: no node is made for them."""


class BalanceKeys(Pass):
    """Put `options.key_balance` of each store between its keys, the queries of all sites that read it, and their attention: behind the
    rotary embedding, as a memory holds keys."""

    name = "balance_keys"
    needs = "annotated"
    leaves = "annotated"
    after = ("group_heads",)

    def applies(self, program: Program, options: PassOptions) -> bool:
        return bool(options.key_balance)

    def run(self, program: Program, options: PassOptions) -> Program:
        """Rewrite the operands of attention; all sites of a store read the same keys.

        Raises
        ------
        ConfigError: a balance that does not fit its store, or one with a mean where scores are soft-capped or a sink joins the softmax.
        """
        assert options.key_balance is not None
        body = copy_graph_module(program.body)
        nodes = dict(zip((site.index for site in program.sites), attention_nodes(body.graph), strict=True))
        for owner in program.stores:
            if owner.store not in options.key_balance:
                continue
            readers = [site for site in program.sites if site.store == owner.store]
            _check(options.key_balance[owner.store], owner, readers)
            balance = options.key_balance[owner.store].heads(list(owner.head_order or range(owner.kv_heads)))
            attentions = [nodes[site.index] for site in readers]
            balanced: dict[Node, Node] = {}
            for node in attentions:
                k = node.args[1]
                if k not in balanced:
                    less = _with(
                        body, node, k, aten.sub.Tensor, KEY_MEAN.format(owner.store), balance.mean, program.dtype
                    )
                    balanced[k] = _with(
                        body, node, less, aten.mul.Tensor, KEY_SCALE.format(owner.store), balance.scale, program.dtype
                    )
                node.update_arg(1, balanced[k])
            for site, node in zip(readers, attentions, strict=True):
                back = balance.scale.reciprocal().repeat_interleave(site.group_size, 0)
                new = _with(body, node, node.args[0], aten.mul.Tensor, f"query_scale_{site.index}", back, program.dtype)
                node.update_arg(0, new)
        note = f"{self.name}: keys of {len(options.key_balance)} stores balanced"
        return program.evolve(note, body=finish(body))


def _check(balance: KeyBalance, owner: AttentionSite, readers: list[AttentionSite]) -> None:
    heads = owner.kv_heads if owner.among is None else owner.among.kv_heads  # of the whole model, as profiles are
    expected = (heads, owner.key_dim)
    if balance.mean.shape != expected or balance.scale.shape != expected:
        raise ConfigError(
            f"the balance of store {owner.store} ({owner.name}) has the shapes {tuple(balance.mean.shape)} and "
            f"{tuple(balance.scale.shape)}, expected {expected}: was the profile made for another model?"
        )
    bound = [site.name for site in readers if not site.shifts_freely]
    if bound and balance.mean.any():
        raise ConfigError(
            f"keys of store {owner.store} would be less a mean, which changes the weights of {bound[0]}: its scores are soft-capped or "
            "have sinks"
        )


def _with(
    body: GraphModule, before: Node, x: Node, operator: OpOverload, name: str, by: Tensor, dtype: torch.dtype
) -> Node:
    """`operator` of x [B, H, T, D] and a constant [H, D] of the module, before node `before`; of shape and dtype of x."""
    if bool((by == NEUTRAL[operator]).all()):
        return x
    device = next((tensor.device for tensor in body.state_dict().values()), torch.device("cpu"))
    body.register_buffer(name, by.to(device, dtype)[:, None])
    with body.graph.inserting_before(before):
        made = body.graph.call_function(operator, (x, body.graph.get_attr(name)))
    made.meta = {key: value for key, value in x.meta.items() if key in ("val", "nn_module_stack")}
    made.meta["semkv_pass"] = BalanceKeys.name
    return made
