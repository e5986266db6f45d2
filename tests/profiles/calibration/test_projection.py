"""The projection behind each attention: found in graphs of several families, and run a second time correctly."""

import pytest
import torch
from torch.fx import Graph, GraphModule
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, Qwen3Config

from semkv.compiler.pipeline import captured_program
from semkv.ir.ops import attention
from semkv.profiles.calibration.interpreter import full_attention
from semkv.profiles.calibration.projection import ShadowInterpreter, output_regions

aten = torch.ops.aten

FAMILIES = {
    "gpt2": GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=128),
    "gpt_neox": GPTNeoXConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
    ),
    "qwen3": Qwen3Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
    ),
}
OUTPUTS = {"gpt2": "attn.c_proj", "gpt_neox": "attention.dense", "qwen3": "self_attn.o_proj"}


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_output_projection_of_each_family(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]).eval()
    program = captured_program(model)
    regions = output_regions(program.body)
    assert len(regions) == 2
    names = []
    for region in regions:
        (end,) = region.ends
        names.append(" ".join(str(node.target) for node in end.all_input_nodes if node.op == "get_attr"))
    for layer, name in enumerate(names):
        assert f"{layer}.{OUTPUTS[family]}.weight" in name

    # The second output is what the model's own projection makes of the other attention.
    seen = {}
    ids = torch.randint(0, 40, (20,))

    def attend(call):
        output = full_attention(call)
        shadow.shadow[call.site] = 2 * output
        seen[call.site] = output
        return output

    def compare(site, full, other):
        seen[f"full {site}"], seen[f"other {site}"] = full, other

    shadow = ShadowInterpreter(program.body, regions, attend, compare)
    modules = [module for name, module in model.named_modules() if name.endswith(OUTPUTS[family])]
    with torch.no_grad():
        hidden = shadow.run(ids[None], torch.arange(20)[None])
        logits = program.head(hidden)
        torch.testing.assert_close(logits, model(ids[None], use_cache=False).logits, rtol=1e-4, atol=1e-4)
        for site, module in enumerate(modules):
            merged = seen[site].transpose(0, 1).flatten(1)
            torch.testing.assert_close(seen[f"full {site}"], module(merged), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(seen[f"other {site}"], module(2 * merged), rtol=1e-4, atol=1e-5)
    assert not shadow.values


def build(project) -> GraphModule:
    """A body with one attention whose output [1, 2, T, 4] goes through `project` and onto the residual stream."""
    graph = Graph()
    graph.placeholder("input_ids")
    x = graph.placeholder("positions")
    x.meta["val"] = torch.ones(1, 3, 8)
    q = graph.call_function(aten.view.default, (x, [1, 2, 3, 4]))
    node = graph.call_function(attention, (q, q, q, x), {"site": 0, "scale": 1.0})
    graph.output(project(graph, node, x))
    root = torch.nn.Module()
    root.weight = torch.nn.Parameter(torch.ones(8, 8))
    return GraphModule(root, graph)


def test_a_gate_before_the_projection_lies_inside():
    def project(graph, node, x):
        merged = graph.call_function(aten.reshape.default, (node, [1, 3, 8]))
        gated = graph.call_function(aten.mul.Tensor, (merged, graph.call_function(aten.sigmoid.default, (x,))))
        made = graph.call_function(aten.linear.default, (gated, graph.get_attr("weight")))
        return graph.call_function(aten.add.Tensor, (x, made))

    (region,) = output_regions(build(project))
    assert [str(node.target) for node in region.ends] == ["aten.linear.default"]
    assert len(region.inside) == 3


def test_without_a_projection_the_attention_itself_is_compared():
    def project(graph, node, x):
        return graph.call_function(aten.add.Tensor, (x, graph.call_function(aten.reshape.default, (node, [1, 3, 8]))))

    (region,) = output_regions(build(project))
    assert region.ends == {region.attention}
    assert not region.inside
