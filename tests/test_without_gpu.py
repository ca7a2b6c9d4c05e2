"""The program for a GPU, as far as it can be told without one: the code of the CUDA path as one
graph, on fake tensors of full size; the kernels that are generated from it, compiled but not run;
and a training in which nothing may recompile. test_interpreted.py runs the kernels."""

import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import run_helper, write_shard
from helpers.fake_mode import mode_of
from test_interpreted import why_not
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._functorch._aot_autograd.autograd_cache import check_cacheable
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as flex_module

import train_gpt
from train_gpt import GPT, PRESETS

HP = PRESETS["speedrun"]
FEW_LAYERS = dict(windows="LSSL", value_embeds="0..0", attention="xx.x")


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


@pytest.mark.parametrize("changes", [{}, dict(use_fp8=False, num_kv_heads=2)], ids=str)
def test_training_step_and_validation_are_one_graph_each(changes):
    """In fewer layers; gpu_program.py compiles all of them."""
    hp = dataclasses.replace(HP, **FEW_LAYERS, **changes)
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
        # These are in the head alone: for each part one product forward, two backward.
        parts = math.ceil(hp.train_seq_len / GPT.LOGITS_TOKENS)
        assert parts > 1 and number_of(nodes, "_scaled_mm") == 3 * parts * hp.use_fp8
        model.eval()
        with torch.no_grad():
            tokens = torch.zeros(hp.val_seq_len, dtype=torch.int32)
            compiled(tokens, tokens.long(), torch.tensor(1792, dtype=torch.int32))
        assert len(graphs) == 2
        nodes = nodes_of(graphs[1])
        assert number_of(nodes, "flex_attention") == hp.attention.count("x")
        assert number_of(nodes, "_scaled_mm") == 0


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("capability, cases", [
    (80, "shared_memory"), (89, "shared_memory"), (90, "validation shared_memory"),
    (90, "full_size")])
def test_the_program_for_a_gpu_keeps_to_its_limits(capability, cases, tmp_path):
    """gpu_program.py says which."""
    run_helper("gpu_program.py", capability, *cases.split(),
               TORCHINDUCTOR_CACHE_DIR=str(tmp_path), TRITON_CACHE_DIR=str(tmp_path))


def dense(q, k, v, mask, scale):
    """Attention that torch.compile takes whole on a CPU, in place of FlexAttention."""
    position = torch.arange(q.size(2))
    seen = mask.mask_mod(0, 0, position[:, None], position)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)


def backward_in_another_thread(loss, backward=torch.Tensor.backward):
    """As autograd runs it on a GPU. A recompile there would be an error that nobody sees."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(backward, loss).result()


def test_nothing_recompiles_after_the_warmup(tmp_path, monkeypatch):
    """Everything that is compiled on a GPU (the model with its FP8 head, and what optimizers
    compile) goes through the warmup. Then real steps, growing windows and validations follow, under
    the stance that makes a recompile an error. torch gives up a function that has been compiled for
    more than 8 kinds of arguments, so none may come near that."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    flags = [
        "--preset=speedrun", "--windows=LSSL", "--value_embeds=0..0", "--attention=xx.x",
        "--model_dim=32", "--num_heads=2", "--head_dim=16", "--vocab_size=257",
        "--train_seq_len=256", "--val_seq_len=512", "--val_tokens=2000", "--micro_batches=2",
        "--window_end=384", "--num_iterations=8", "--save_every=0", "--seed=1", "--dtype=bfloat16",
        "--epochs=100"]
    hp, _ = train_gpt.parse_flags(flags)
    train_gpt.check_settings(hp, 1)
    hp = dataclasses.replace(train_gpt.resolve(hp, torch.device("cpu")), use_fp8=True)
    write_shard(tmp_path / "s.bin", torch.randint(257, (9000,)).numpy())
    shards = train_gpt.find_shards(f"{tmp_path}/s.bin")
    cpu = train_gpt.World(0, 1, torch.device("cpu"))
    monkeypatch.setattr(train_gpt, "attention", dense)
    monkeypatch.setattr(torch.Tensor, "backward", backward_in_another_thread)
    model = train_gpt.GPT(hp, torch.bfloat16, flex=True)
    train_gpt.draw_weights(model, hp.seed)
    compile = partial(torch.compile, dynamic=False, fullgraph=True, backend=backend)
    whole, functions = compile(model), {train_gpt.GPT.forward, train_gpt.newton_schulz}
    monkeypatch.setattr(train_gpt, "newton_schulz", compile(train_gpt.newton_schulz))
    optimizers = train_gpt.build_optimizers(model, hp, cpu)
    batches = train_gpt.train_batches(shards, hp, cpu, 0)
    sequences = train_gpt.load_validation(shards, hp, cpu)
    train_gpt.warm_up(whole, optimizers, hp, cpu)
    assert torch._functorch.config.autograd_cache_allow_custom_autograd_functions
    in_warmup = len(compiled)
    assert in_warmup >= 2 + 4  # training, validation, and four shapes of matrices
    assert sum(number_of(nodes_of(graph), "_scaled_mm") for graph in compiled) == 3
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in range(hp.num_iterations):
            train_gpt.evaluate(whole, sequences, step, hp, cpu)
            loss = train_gpt.train_step(whole, next(batches), optimizers, step, hp, cpu)
            assert loss.isfinite()
        tokens = torch.zeros(384, dtype=torch.int32)
        with pytest.raises(RuntimeError, match="recompile"):
            whole(tokens, tokens.long(), torch.tensor(128, dtype=torch.int32))
    assert len(compiled) == in_warmup
    entries = {function.__name__: len(_debug_get_cache_entry_list(function.__code__))
               for function in functions}
    assert entries["forward"] == 2 and max(entries.values()) < 8, entries
