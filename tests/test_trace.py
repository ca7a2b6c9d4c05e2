"""The full-size speedrun model traced without a GPU: the CUDA path's code, whole graph, under fake
tensors."""

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

HP = PRESETS["speedrun"]
FEW_LAYERS = dict(windows="LSSL", value_embeds="0..0", attention="xx.x")
# What the speedrun does not use, in fewer layers.
OTHER_WAYS = dict(use_fp8=False, smear=True, key_offset=True, pair_rows=5000, **FEW_LAYERS)


@pytest.fixture(autouse=True)
def no_device_check(monkeypatch):
    """FlexAttention refuses gradients on CPU tensors at its door; fake CPU tensors stand for CUDA's
    here."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *args: None)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def nodes_of(graph_module):
    """All nodes of a graph and of the graphs within it, such as an autograd function's."""
    return [node for module in graph_module.modules() if isinstance(module, torch.fx.GraphModule)
            for node in module.graph.nodes]


def number_of(nodes, name):
    return sum(name in str(node.target) for node in nodes)


@pytest.mark.parametrize("changes", [{}, OTHER_WAYS], ids=["full size", "other ways"])
def test_training_step_and_validation_are_one_graph_each(changes):
    hp = dataclasses.replace(HP, **changes)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        # Or raises: a second start is to find the compiled program on the disk. That of an autograd
        # function is kept there where this is set.
        with torch._functorch.config.patch(autograd_cache_allow_custom_autograd_functions=True):
            check_cacheable(graph)
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
        nodes = nodes_of(graphs[0])
        assert number_of(nodes, "flex_attention") == hp.attention.count("x")
        # In the head alone: one product forward, two backward.
        assert number_of(nodes, "_scaled_mm") == 3 * hp.use_fp8
        model.eval()
        with torch.no_grad():
            tokens = torch.zeros(hp.val_seq_len, dtype=torch.int32)
            compiled(tokens, tokens.long(), torch.tensor(1792, dtype=torch.int32))
        assert len(graphs) == 2
        nodes = nodes_of(graphs[1])
        assert number_of(nodes, "flex_attention") == hp.attention.count("x")
        assert number_of(nodes, "_scaled_mm") == 0


def traced_step(hp, record):
    """Trace a training step of the model. record(direction) is called with each node of the forward
    and of the backward graph, as the compiler gets them."""
    def recorder(direction):
        def compiler(graph, inputs):
            for node in graph.graph.nodes:
                record(direction, node)
            return make_boxed_func(graph.forward)
        return compiler

    with FakeTensorMode(allow_non_fake_inputs=True):
        model = GPT(hp, flex, torch.bfloat16)
        backend = aot_autograd(fw_compiler=recorder("forward"), bw_compiler=recorder("backward"),
                               decompositions=select_decomp_table())
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        tokens = torch.zeros(hp.train_seq_len, dtype=torch.int32)
        compiled(tokens, tokens.long(), torch.tensor(128, dtype=torch.int32)).backward()


def test_the_loss_passes_over_the_logits_once_in_each_direction():
    """Each pass over T x V logits costs a millisecond at full size; so do branches, which a
    torch.cat compiles to, in the rotation of queries and keys."""
    hp = dataclasses.replace(HP, **FEW_LAYERS)
    logits = hp.train_seq_len * 50304
    passes = {"forward": [], "backward": []}

    def numel(node):
        value = node.meta.get("val")
        return value.numel() if isinstance(value, torch.Tensor) else 0

    def record(direction, node):
        assert direction == "backward" or "aten.cat" not in str(node.target)
        read = max(map(numel, node.all_input_nodes), default=0)
        if read == logits and 0 < numel(node) < logits:
            passes[direction].append(str(node.target))

    traced_step(hp, record)
    # What reads logits and makes fewer numbers of them; all else is fused into these. Backward it
    # is the two products with the gradient.
    assert passes == {"forward": ["aten.sum.dim_IntList", "aten.gather.default"],
                      "backward": 2 * ["aten._scaled_mm.default"]}


def test_the_kernels_get_contiguous_lists_of_blocks():
    """They step through a row by one, whatever its strides are."""
    hp = dataclasses.replace(HP, **FEW_LAYERS)
    blocks = hp.train_seq_len // train_gpt.BLOCK
    lists = {"forward": [], "backward": []}

    def record(direction, node):
        if "flex_attention" in str(node.target):
            given = [argument.meta.get("val") for argument in node.all_input_nodes]
            lists[direction] += [x for x in given if isinstance(x, torch.Tensor)
                                 and x.shape == (1, 1, blocks, blocks)]

    traced_step(hp, record)
    # For each layer with attention: kv and full kv, to which the gradient adds q and full q.
    assert len(lists["backward"]) == 3 * 4 and len(lists["forward"]) in (3 * 2, 3 * 4)
    for direction, given in lists.items():
        strides = {x.stride() for x in given if not x.is_contiguous()}
        assert not strides, (direction, strides)
        assert {x.dtype for x in given} == {torch.int32}


def dense(mask, scale):
    """Attention that torch.compile takes whole on a CPU, in place of FlexAttention."""
    def attend(q, k, v):
        position = torch.arange(q.size(2))
        seen = mask.mask_mod(0, 0, position[:, None], position[None, :])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    return attend


def test_nothing_recompiles_after_the_warmup(tmp_path, monkeypatch):
    """What is compiled on CUDA (model and its FP8 head, Newton-Schulz, NorMuon) through the warmup,
    then real steps, growing windows and validations under the stance that makes a recompile an
    error."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    for name in ("newton_schulz", "even_rows"):
        plain = inspect.getclosurevars(getattr(train_gpt, name)).nonlocals["function"]
        monkeypatch.setattr(train_gpt, name, torch.compile(plain, dynamic=False, fullgraph=True,
                                                           backend=backend))
    hp = dataclasses.replace(
        PRESETS["demo"], **FEW_LAYERS, model_dim=32, num_heads=2, head_dim=16,
        train_seq_len=256, val_seq_len=512, val_tokens=2000, window_end=384, num_iterations=4,
        seed=1, use_fp8=True, dtype="bfloat16")
    write_shard(tmp_path / "s.bin", torch.randint(257, (9000,)).numpy())
    shards = train_gpt.find_shards(f"{tmp_path}/s.bin")
    cpu = train_gpt.Ranks(0, 1, torch.device("cpu"))
    model = GPT(hp, dense, torch.bfloat16)
    whole = torch.compile(model, dynamic=False, fullgraph=True, backend=backend)
    optimizers = train_gpt.build_optimizers(model, hp, cpu)
    batches = train_gpt.train_batches(shards, hp, cpu)
    sequences = train_gpt.load_validation(shards, hp, cpu)
    train_gpt.warm_up(whole, optimizers, hp, cpu)
    in_warmup = len(compiled)
    # Training and validation graph; four shapes of matrices in both parts of NorMuon.
    assert in_warmup >= 2 + 2 * 4
    assert sum(number_of(nodes_of(graph), "_scaled_mm") for graph in compiled) == 3
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in range(4):
            train_gpt.evaluate(whole, sequences, step, hp, cpu)
            loss = train_gpt.train_step(whole, next(batches), optimizers, step, hp, cpu)
            assert loss.isfinite()
        tokens = torch.zeros(384, dtype=torch.int32)
        with pytest.raises(RuntimeError, match="recompile"):
            whole(tokens, tokens.long(), torch.tensor(128, dtype=torch.int32))
    assert len(compiled) == in_warmup
