"""The full-size speedrun model traced without a GPU: the CUDA path's code, whole graph, under fake tensors."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as flex_module

from train_gpt import GPT, PRESETS, flex

HP = dataclasses.replace(PRESETS["speedrun"], num_kv_heads=6)


@pytest.fixture(autouse=True)
def no_device_check(monkeypatch):
    """FlexAttention refuses gradients on CPU tensors at its door; fake CPU tensors stand for CUDA's here."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *args: None)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


FEW_LAYERS = dict(windows="LSSL", value_embeds="0..0", attention="xx.x")


@pytest.mark.parametrize("changes", [dict(), dict(use_fp8=False, num_kv_heads=2, **FEW_LAYERS)], ids=["full size", "bf16 and grouped queries"])
def test_training_step_and_validation_are_one_graph_each(changes):
    hp = dataclasses.replace(HP, **changes)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    with FakeTensorMode(allow_non_fake_inputs=True):
        model = GPT(hp, flex, torch.bfloat16)
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
        for window in (128, 896, 1792):  # a growing window is no other graph
            tokens = torch.zeros(hp.train_seq_len, dtype=torch.int32)
            loss = compiled(tokens, tokens.long(), torch.tensor(window, dtype=torch.int32))
            loss.backward()
        assert len(graphs) == 1 and loss.shape == () and loss.dtype == torch.float32
        for name, p in model.named_parameters():
            assert p.grad is not None and p.grad.shape == p.shape and p.grad.dtype == p.dtype, name
        targets = [str(node.target) for node in graphs[0].graph.nodes]
        assert sum("flex_attention" in t for t in targets) == hp.attention.count("x")
        assert any("nanogpt.fp8_linear" in t for t in targets) == hp.use_fp8
        model.eval()
        with torch.no_grad():
            tokens = torch.zeros(hp.val_seq_len, dtype=torch.int32)
            compiled(tokens, tokens.long(), torch.tensor(1792, dtype=torch.int32))
        assert len(graphs) == 2
        assert not any("nanogpt.fp8_linear" in str(node.target) for node in graphs[1].graph.nodes)
