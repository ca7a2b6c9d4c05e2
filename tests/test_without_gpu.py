"""What can be told about a run on GPUs without one: the programs that are compiled for it, its
collectives under NCCL's rules, its start and its end."""

import dataclasses
import shutil
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from compiled_run import dense
from conftest import (ATTEMPT, ENVIRONMENT, ROOT, TINY, launch, load_script, log_of, losses,
                      planted, write_shard)
from test_interpreted import why_not
from test_trace import nodes_of, number_of
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

from train_gpt import UserError, World, world_of_this_process


def python(*command, timeout=500, **environment):
    return subprocess.run([sys.executable, "-W", "ignore", *map(str, command)], cwd=ROOT,
                          capture_output=True, text=True, timeout=timeout,
                          env=ENVIRONMENT | environment)


# -------- The program for a GPU

@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("capability, cases", [
    (80, "shared_memory"), (89, "shared_memory"), (90, "fp8_products validation shared_memory"),
    (90, "full_size")])
def test_the_program_for_a_gpu_keeps_to_its_limits(capability, cases, tmp_path):
    """gpu_program.py says which."""
    done = python("tests/gpu_program.py", capability, *cases.split(),
                  TORCHINDUCTOR_CACHE_DIR=str(tmp_path), TRITON_CACHE_DIR=str(tmp_path))
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


TWO_LAYERS = ["--windows=LS", "--value_embeds=0.", "--attention=xx"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor's CPU programs need g++")
@pytest.mark.skipif(torch.__version__ < "2.10", reason="Inductor of torch 2.9 writes past the end "
                    "of FP8 rows on a CPU, where the script compiles nothing")
def test_a_compiled_run_has_backward_passes_in_another_thread_and_starts_faster_again(tmp_path,
                                                                                      shards):
    """The first start finds nothing in the compiler's cache; the second one finds everything, the
    model with its FP8 head included, and compiles nothing anew."""
    counts = []
    for folder in ("first", "second"):
        done = python("tests/compiled_run.py", *TINY, *shards, *TWO_LAYERS, "--num_iterations=3",
                      "--val_loss_every=2", "--save_every=0", "--dtype=bfloat16",
                      f"--records={tmp_path}/{folder}", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr
        counts.append(done.stdout.splitlines()[-1])
    assert "miss" in counts[0] and "bypass" not in counts[0]
    assert "hit" in counts[1] and "bypass" not in counts[1] and "miss" not in counts[1]


@pytest.mark.parametrize("path", [ROOT / "train_gpt.py", ATTEMPT], ids=["train_gpt", "attempt"])
def test_nothing_recompiles_after_the_warmup(path, tmp_path, monkeypatch):
    """Everything that is compiled on a GPU (the model with its FP8 head, and what optimizers
    compile) goes through the warmup. Then real steps, growing windows and validations follow, under
    the stance that makes a recompile an error. torch gives up a function that has been compiled for
    more than 8 kinds of arguments, so none may come near that."""
    torch._dynamo.reset()
    script = load_script(path, "script_that_is_compiled")
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    flags = [
        "--preset=speedrun", "--windows=LSSL", "--value_embeds=0..0", "--attention=xx.x",
        "--model_dim=32", "--num_heads=2", "--head_dim=16", "--vocab_size=257",
        "--train_seq_len=256", "--val_seq_len=512", "--val_tokens=2000", "--micro_batches=2",
        "--num_iterations=8", "--save_every=0", "--seed=1", "--dtype=bfloat16", "--epochs=100"]
    if path == ATTEMPT:
        flags += ["--stages=1:1:128,2:1.5:256,3:1.7:384", "--skips=..1.", "--late_input=1",
                  "--backout=1", "--pair_rows=300"]
    else:
        flags += ["--window_end=384"]
    hp, _ = script.parse_flags(flags)
    script.check_settings(hp, 1)
    hp = dataclasses.replace(script.resolve(hp, torch.device("cpu")), use_fp8=True)
    write_shard(tmp_path / "s.bin", torch.randint(257, (9000,)).numpy())
    shards = script.find_shards(f"{tmp_path}/s.bin")
    cpu = script.World(0, 1, torch.device("cpu"))
    monkeypatch.setattr(script, "attention", dense)
    model = script.GPT(hp, torch.bfloat16, flex=True)
    compile = partial(torch.compile, dynamic=False, fullgraph=True, backend=backend)
    if path == ATTEMPT:
        model.loss = compile(model.loss)
        whole, functions = model, {script.GPT.loss}
    else:
        whole, functions = compile(model), {script.GPT.forward}
    for name in {"newton_schulz", "cautious_decay", "even_rows"} & set(vars(script)):
        function = getattr(script, name)
        functions.add(function)
        monkeypatch.setattr(script, name, compile(function))
    optimizers = script.build_optimizers(model, hp, cpu)
    batches = script.train_batches(shards, hp, cpu, 0)
    sequences = script.load_validation(shards, hp, cpu)
    script.warm_up(whole, optimizers, hp, cpu)
    in_warmup = len(compiled)
    assert in_warmup >= 2 + 4  # training, validation, and four shapes of matrices
    assert sum(number_of(nodes_of(graph), "_scaled_mm") for graph in compiled) == 3
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in range(hp.num_iterations):
            script.evaluate(whole, sequences, step, hp, cpu)
            loss = script.train_step(whole, next(batches), optimizers, step, hp, cpu)
            assert loss.isfinite()
        tokens = torch.zeros(384, dtype=torch.int32)
        with pytest.raises(RuntimeError, match="recompile"):
            whole(tokens, tokens.long(), torch.tensor(128, dtype=torch.int32))
    assert len(compiled) == in_warmup
    entries = {function.__name__: len(_debug_get_cache_entry_list(function.__code__))
               for function in functions}
    print(entries)
    assert entries["loss" if path == ATTEMPT else "forward"] == 2 and max(entries.values()) < 8
    torch._dynamo.reset()


# -------- Collectives

@pytest.mark.parametrize("ranks", [2, 4])
def test_nobody_touches_a_tensor_on_its_way_between_processes(ranks):
    """collectives_worker.py says how."""
    done = python("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
                  "tests/collectives_worker.py", timeout=280)
    assert done.returncode == 0 and done.stdout.count("equal") == ranks, done.stdout + done.stderr


# -------- Start and end

def as_rank(monkeypatch, **variables):
    """Sets what torchrun tells a process in its environment, and gives this machine four GPUs. What
    the process does with them is noted in the list that is returned."""
    chosen = []
    for name, answer in dict(is_available=lambda: True, device_count=lambda: 4,
                             set_device=chosen.append).items():
        monkeypatch.setattr(torch.cuda, name, answer)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")  # which the script sets
    return chosen


def test_a_process_takes_the_gpu_of_its_local_rank(monkeypatch):
    """On a second machine rank and local rank differ."""
    chosen = as_rank(monkeypatch, RANK=6, LOCAL_RANK=2, WORLD_SIZE=8)
    assert world_of_this_process() == World(6, 8, torch.device("cuda", 2)) and chosen == [2]
    chosen = as_rank(monkeypatch)
    assert world_of_this_process() == World(0, 1, torch.device("cuda", 0)) and chosen == [0]


@pytest.mark.parametrize("variables, words", [
    (dict(RANK=4, LOCAL_RANK=4, WORLD_SIZE=8), "one process per GPU"),
    (dict(SLURM_STEP_NUM_TASKS=8), "srun")], ids=str)
def test_an_environment_that_makes_no_sense_is_refused(monkeypatch, variables, words):
    chosen = as_rank(monkeypatch, **variables)
    with pytest.raises(UserError, match=words) as caught:
        world_of_this_process()
    assert "\n" not in str(caught.value) and not chosen


def test_an_unexpected_error_on_one_process_ends_all_with_its_traceback(tmp_path, shards):
    """The other process waits in a collective meanwhile. Only a limit far above what this takes
    (torchrun gives processes 30 s to end) tells a hang from it."""
    error = "raise RuntimeError('NCCL error: unhandled cuda error')"
    script = planted(tmp_path, f"if world.rank == 1 and step == 2: {error}")
    began = time.monotonic()
    done = launch(*TINY, *shards, f"--records={tmp_path}/records", script=script, ranks=2,
                  check=False)
    assert done.returncode == 1 and time.monotonic() - began < 280
    assert "Traceback" in done.stderr and "NCCL error: unhandled cuda error" in done.stderr
    assert len(losses(log_of(tmp_path / "records"), "train_loss")) in (1, 2)
