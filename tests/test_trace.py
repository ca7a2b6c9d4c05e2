"""The full-size speedrun model traced without a GPU: the CUDA path's code, whole graph, under fake tensors."""

import dataclasses
import inspect

import pytest
import torch
import torch.nn.functional as F
from conftest import write_shard
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.autograd_cache import check_cacheable
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as flex_module

import train_gpt
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


@pytest.mark.parametrize("changes", [dict(), dict(use_fp8=False, num_kv_heads=2, smear=True, key_offset=True, pair_rows=5000, **FEW_LAYERS)], ids=["full size", "bf16 and grouped queries"])
def test_training_step_and_validation_are_one_graph_each(changes):
    hp = dataclasses.replace(HP, **changes)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        check_cacheable(graph)  # or raises: a second start is to find the compiled program on the disk
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


def test_the_loss_passes_over_the_logits_once_in_each_direction():
    """Each pass over T x V logits costs a millisecond at full size; so do branches, which a torch.cat compiles to, in the
    rotation of queries and keys."""
    hp = dataclasses.replace(HP, **FEW_LAYERS)
    logits, passes = hp.train_seq_len * 50304, {"forward": [], "backward": []}

    def numel(node):
        return node.meta["val"].numel() if isinstance(node.meta.get("val"), torch.Tensor) else 0

    def record(direction):
        def compiler(graph, inputs):
            for node in graph.graph.nodes:
                if max(map(numel, node.all_input_nodes), default=0) == logits and 0 < numel(node) < logits:
                    passes[direction].append(str(node.target))
                assert direction == "backward" or "aten.cat" not in str(node.target)
            return make_boxed_func(graph.forward)
        return compiler

    with FakeTensorMode(allow_non_fake_inputs=True):
        model = GPT(hp, flex, torch.bfloat16)
        backend = aot_autograd(fw_compiler=record("forward"), bw_compiler=record("backward"), decompositions=select_decomp_table())
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        tokens = torch.zeros(hp.train_seq_len, dtype=torch.int32)
        compiled(tokens, tokens.long(), torch.tensor(128, dtype=torch.int32)).backward()
    assert passes == {"forward": ["aten.sum.dim_IntList", "aten.gather.default"], "backward": 2 * ["nanogpt.fp8_grad_matmul.default"]}


def dense(mask, scale):
    """Attention that torch.compile takes whole on a CPU, in place of FlexAttention."""
    def attend(q, k, v):
        position = torch.arange(q.size(2))
        seen = mask.mask_mod(0, 0, position[:, None], position[None, :])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=q.size(1) != k.size(1))
    return attend


def test_nothing_recompiles_after_the_warmup(tmp_path, monkeypatch):
    """What is compiled on CUDA (model, NorMuon, FP8 casts) through warmup, then real steps, growing windows and
    validations under the stance that makes a recompile an error."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    for name in ("newton_schulz", "even_rows", "to_fp8_compiled"):
        plain = inspect.getclosurevars(getattr(train_gpt, name)).nonlocals["function"]
        monkeypatch.setattr(train_gpt, name, torch.compile(plain, dynamic=False, fullgraph=True, backend=backend))
    hp = dataclasses.replace(
        PRESETS["demo"], **FEW_LAYERS, model_dim=32, num_heads=2, num_kv_heads=2, head_dim=16, train_seq_len=256, val_seq_len=512,
        val_tokens=2000, window_end=384, num_iterations=4, seed=1, use_fp8=True)
    path = write_shard(tmp_path / "s.bin", torch.randint(257, (9000,)).numpy())
    cpu = train_gpt.Ranks(0, 1, torch.device("cpu"))
    model = GPT(hp, dense, torch.bfloat16)
    whole = torch.compile(model, dynamic=False, fullgraph=True, backend=backend)
    matrices, groups = train_gpt.optimizer_groups(model, hp)
    muon, adam = train_gpt.Muon(matrices, 0, 1, torch.bfloat16), train_gpt.Adam(groups, 1)
    loader = train_gpt.TrainLoader([path], train_gpt.plan_spans([9000], 1024, 256, 1), hp, 0, 1, cpu.device)
    sequences, _ = train_gpt.load_validation([path], [9000], hp, 0, 1, cpu.device)
    train_gpt.warm_up(whole, dict(model.named_parameters()), muon, adam, hp, cpu)
    in_warmup = len(compiled)
    assert in_warmup >= 2 + 2 * 4 + 2  # training and validation graph, four shapes of matrices in both parts of NorMuon, FP8 casts
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in range(4):
            window = torch.tensor(train_gpt.window_tokens(step, hp), dtype=torch.int32)
            train_gpt.evaluate(whole, sequences, window, hp, cpu)
            assert train_gpt.train_step(whole, loader.next_step(), window, muon, adam, step, hp).isfinite()
        with pytest.raises(RuntimeError, match="recompile"):
            whole(torch.zeros(384, dtype=torch.int32), torch.zeros(384, dtype=torch.int64), window)
    assert len(compiled) == in_warmup
