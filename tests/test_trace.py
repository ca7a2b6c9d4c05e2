"""The full-size model of the speedrun, traced without a GPU: the code of the CUDA path as one
graph, on fake tensors."""

import dataclasses

import pytest
import torch
from fake_mode import mode_of
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.autograd_cache import check_cacheable
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as flex_module

from train_gpt import BLOCK, GPT, PRESETS

HP = PRESETS["speedrun"]
FEW_LAYERS = dict(windows="LSSL", value_embeds="0..0", attention="xx.x")
# Settings that the speedrun does not use, in fewer layers.
OTHER_SETTINGS = dict(use_fp8=False, num_kv_heads=2, **FEW_LAYERS)


@pytest.fixture(autouse=True)
def no_device_check(monkeypatch):
    """FlexAttention refuses gradients of CPU tensors. Here fake CPU tensors stand for those of
    CUDA."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *args: None)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def nodes_of(graph_module):
    """The nodes of a graph and of the graphs in it, such as that of an autograd function."""
    return [node for module in graph_module.modules() if isinstance(module, torch.fx.GraphModule)
            for node in module.graph.nodes]


def number_of(nodes, name):
    return sum(name in str(node.target) for node in nodes)


@pytest.mark.parametrize("changes", [{}, OTHER_SETTINGS], ids=["speedrun", "other settings"])
def test_training_step_and_validation_are_one_graph_each(changes):
    hp = dataclasses.replace(HP, **changes)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        # This raises where a second start would not find the compiled program on the disk. With
        # this option, which the script sets, programs with an autograd function are kept too.
        with torch._functorch.config.patch(autograd_cache_allow_custom_autograd_functions=True):
            check_cacheable(graph)
        with mode_of(inputs):
            return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    with FakeTensorMode(allow_non_fake_inputs=True):
        model = GPT(hp, torch.bfloat16, flex=True)
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
        for window in (128, 896, 1792):  # a window that grows needs no other graph
            tokens = torch.zeros(hp.train_seq_len, dtype=torch.int32)
            loss = compiled(tokens, tokens.long(), torch.tensor(window, dtype=torch.int32))
            loss.backward()
        assert len(graphs) == 1 and loss.shape == () and loss.dtype == torch.float32
        for name, p in model.named_parameters():
            assert p.grad is not None and p.grad.shape == p.shape and p.grad.dtype == p.dtype, name
        nodes = nodes_of(graphs[0])
        assert number_of(nodes, "flex_attention") == hp.attention.count("x")
        # These are in the head alone: one product forward, two backward.
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
    """Traces a training step of the model, and calls record("forward" or "backward", node) with
    each node of the two graphs that the compiler gets."""
    def recorder(direction):
        def compiler(graph, inputs):
            for node in graph.graph.nodes:
                record(direction, node)
            return make_boxed_func(graph.forward)
        return compiler

    def backend(graph, inputs):
        with mode_of(inputs):
            return aot_autograd(fw_compiler=recorder("forward"), bw_compiler=recorder("backward"),
                                decompositions=select_decomp_table())(graph, inputs)

    with FakeTensorMode(allow_non_fake_inputs=True):
        model = GPT(hp, torch.bfloat16, flex=True)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        tokens = torch.zeros(hp.train_seq_len, dtype=torch.int32)
        compiled(tokens, tokens.long(), torch.tensor(128, dtype=torch.int32)).backward()


def test_what_reads_all_logits():
    """Each pass over T x V logits costs a millisecond at full size."""
    hp = dataclasses.replace(HP, **FEW_LAYERS)
    logits = hp.train_seq_len * 50304
    passes = {"forward": [], "backward": []}

    def numel(node):
        value = node.meta.get("val")
        return value.numel() if isinstance(value, torch.Tensor) else 0

    def record(direction, node):
        read = max(map(numel, node.all_input_nodes), default=0)
        if read == logits and 0 < numel(node) < logits:
            passes[direction].append(str(node.target))

    traced_step(hp, record)
    # These read the logits and make fewer numbers of them; everything else is fused into them. They
    # are a softmax, whose maximum and sum Inductor takes in one pass, and its gradient, which goes
    # into two products.
    softmax = ["aten.amax.default", "aten.sum.dim_IntList"]
    assert passes == {"forward": [*softmax, "aten.gather.default"],
                      "backward": [softmax[1], *2 * ["aten._scaled_mm.default"]]}


def test_the_kernels_get_contiguous_lists_of_blocks():
    """They step through a row by one element, whatever its strides are."""
    hp = dataclasses.replace(HP, **FEW_LAYERS)
    blocks = hp.train_seq_len // BLOCK
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


