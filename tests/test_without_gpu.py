"""The program for a GPU, as far as it can be told without one: the graphs of the CUDA path, and the
kernels that are generated from them, compiled but not run (test_interpreted.py runs them)."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from functools import partial
import pytest
import torch
from conftest import run_helper, write_shard
from test_interpreted import why_not
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._functorch._aot_autograd.autograd_cache import check_cacheable
from torch.nn.attention import flex_attention as flex_module
import train_gpt

@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("capability, cases", [
    (89, "shared_memory"), *[pytest.param(*case, marks=pytest.mark.full) for case in (
        (80, "shared_memory"), (90, "validation shared_memory"), (100, "shared_memory"),
        (120, "shared_memory"), (90, "full_size"), (89, "24_gb"))]])
def test_the_program_for_a_gpu_keeps_to_its_limits(capability, cases, tmp_path):
    """gpu_program.py says which."""
    run_helper("gpu_program.py", capability, *cases.split(),
               TORCHINDUCTOR_CACHE_DIR=str(tmp_path), TRITON_CACHE_DIR=str(tmp_path))

def backward_in_another_thread(loss, backward=torch.Tensor.backward):
    """As autograd runs it on a GPU. A recompile there would be an error that nobody sees."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(backward, loss).result()

def number_of(graph, name):
    """How often it is in a graph and in the graphs in it, such as that of an autograd function."""
    return sum(name in str(node.target) for module in graph.modules()
               if isinstance(module, torch.fx.GraphModule) for node in module.graph.nodes)

def test_the_warmup_compiles_everything_in_whole_graphs(tmp_path, monkeypatch):
    """After the warm-up, real steps, growing windows and validations follow, where a recompile is
    an error. torch gives up a function that it has compiled for more than 8 kinds of arguments."""
    compiled = []
    def backend(graph, inputs):
        compiled.append(graph)
        check_cacheable(graph)  # raises where a second start would not find it on the disk
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
    flags = ["--preset=speedrun", "--windows=LSSL", "--value_embeds=0..0", "--attention=xx.x",
             "--model_dim=32", "--num_heads=2", "--head_dim=16", "--vocab_size=257",
             "--train_seq_len=256", "--val_seq_len=512", "--val_tokens=2000", "--micro_batches=2",
             "--window_end=384", "--num_iterations=8", "--seed=1", "--dtype=bfloat16"]
    hp, _ = train_gpt.parse_flags(flags)
    train_gpt.check_settings(hp, 1)
    hp = dataclasses.replace(train_gpt.resolve(hp, torch.device("cpu")), use_fp8=True,
                             num_kv_heads=1)
    write_shard(tmp_path / "s.bin", torch.randint(257, (9000,)).numpy())
    shards = train_gpt.find_shards(f"{tmp_path}/s.bin")
    cpu = train_gpt.World(0, 1, torch.device("cpu"))
    torch._dynamo.reset()
    monkeypatch.setattr(flex_module, "_validate_device", lambda *args: None)  # it refuses CPUs
    monkeypatch.setattr(torch.Tensor, "backward", backward_in_another_thread)
    monkeypatch.setattr(train_gpt.GPT, "LOGITS_TOKENS", 128)
    model = train_gpt.GPT(hp, torch.bfloat16, flex=True)
    train_gpt.draw_weights(model, hp.seed)
    compile = partial(torch.compile, dynamic=False, fullgraph=True, backend=backend)
    whole, functions = compile(model), {train_gpt.GPT.forward, train_gpt.newton_schulz}
    monkeypatch.setattr(train_gpt, "newton_schulz", compile(train_gpt.newton_schulz))
    optimizers = train_gpt.build_optimizers(model, hp, cpu)
    batches = train_gpt.train_batches(shards, hp, cpu, 0)
    sequences = train_gpt.load_validation(shards, hp, cpu)
    train_gpt.warm_up(whole, optimizers, shards, hp, cpu)
    validation, training, *others = compiled
    assert len(others) == 4  # shapes of matrices
    for graph, products in ((validation, 0), (training, 3 * 2)):
        assert number_of(graph, "flex_attention") == 3
        assert number_of(graph, "_scaled_mm") == products  # in the head, in two parts
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in range(hp.num_iterations):
            train_gpt.evaluate(whole, sequences, step, hp, cpu)
            loss = train_gpt.train_step(whole, next(batches), optimizers, step, hp, cpu)
            assert loss.isfinite()
        tokens = torch.zeros(384, dtype=torch.int32)
        with pytest.raises(RuntimeError, match="recompile"):
            whole(tokens, tokens.long(), torch.tensor(128, dtype=torch.int32))
    assert len(compiled) == 2 + len(others)
    entries = {function.__name__: len(_debug_get_cache_entry_list(function.__code__))
               for function in functions}
    assert entries["forward"] == 2 and max(entries.values()) < 8, entries
