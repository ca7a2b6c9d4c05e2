"""What can be told about a run on GPUs without one: the programs that are compiled for it, its
collectives under NCCL's rules, its start and its end."""

import ast
import dataclasses
import inspect
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from compiled_run import dense
from conftest import ENVIRONMENT, ROOT, TINY, write_shard
from test_interpreted import why_not
from test_trace import nodes_of, number_of
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

import train_gpt
from records.sample import load_script
from train_gpt import UserError, World, connect, world_of_this_process

ATTEMPT = ROOT / "records" / "speedrun_2026" / "train_gpt.py"


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


TWO_LAYERS = ["--windows=LS", "--value_embeds=0.", "--attention=xx", "--pair_rows=300"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor's CPU programs need g++")
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
    compile) goes through the warmup. Then real steps, growing windows, all stages and validations
    follow, under the stance that makes a recompile an error. torch gives up a function that has
    been compiled for more than 8 kinds of arguments, so none may come near that."""
    torch._dynamo.reset()
    script = load_script(path)
    compiled = []
    functions = {script.GPT.loss if path == ATTEMPT else script.GPT.forward}

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
    model = script.GPT(hp, dense, torch.bfloat16)
    whole = model
    if path == ATTEMPT:
        model.loss = torch.compile(model.loss, dynamic=False, fullgraph=True, backend=backend)
    else:
        whole = torch.compile(model, dynamic=False, fullgraph=True, backend=backend)
    for name in {"newton_schulz", "cautious_decay", "even_rows"} & set(vars(script)):
        function = getattr(script, name)
        functions.add(function)
        monkeypatch.setattr(script, name, torch.compile(function, backend=backend, dynamic=False,
                                                        fullgraph=True))
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
    whole_model = "loss" if path == ATTEMPT else "forward"
    assert entries[whole_model] == 2 and max(entries.values()) < 8
    torch._dynamo.reset()


# -------- Collectives

@pytest.mark.parametrize("ranks", [2, 4])
def test_nobody_touches_a_tensor_on_its_way_between_processes(ranks):
    """collectives_worker.py says how."""
    done = python("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
                  "tests/collectives_worker.py", timeout=280)
    assert done.returncode == 0 and done.stdout.count("equal") == ranks, done.stdout + done.stderr


# -------- Start and end

class Gpus:
    """Stands in for torch.cuda: a machine with four GPUs."""

    def __init__(self, monkeypatch):
        self.chosen = []
        for name, answer in dict(is_available=lambda: True, device_count=lambda: 4,
                                 set_device=self.chosen.append).items():
            monkeypatch.setattr(torch.cuda, name, answer)


def as_rank(monkeypatch, rank, local_rank, size):
    for name, value in dict(RANK=rank, LOCAL_RANK=local_rank, WORLD_SIZE=size).items():
        monkeypatch.setenv(name, str(value))


def test_a_process_takes_the_gpu_of_its_local_rank(monkeypatch):
    """On a second machine rank and local rank differ."""
    gpus = Gpus(monkeypatch)
    as_rank(monkeypatch, 6, 2, 8)
    world = world_of_this_process()
    assert world == World(6, 8, torch.device("cuda", 2)) and gpus.chosen == [2]
    as_rank(monkeypatch, 4, 4, 8)
    with pytest.raises(UserError, match="GPU"):
        world_of_this_process()


class Store(dict):
    set = dict.__setitem__

    def get(self, name):
        return self[name]


def test_processes_meet_in_a_store_before_nccl_connects_their_own_gpus(monkeypatch):
    """NCCL would wait forever for a process that is missing. Without device_id it would take the
    GPU with the number of the global rank for its first barrier."""
    store = Store({f"script of {rank}": "abc" for rank in range(8)})
    begun = []

    def rendezvous(address, **options):
        begun.append(("store", options["timeout"]))
        return iter([(store, 6, 8)])

    def init_process_group(backend, **options):
        begun.append((backend, options))

    monkeypatch.setattr(train_gpt.dist, "rendezvous", rendezvous)
    monkeypatch.setattr(train_gpt.dist, "init_process_group", init_process_group)
    connect(World(6, 8, torch.device("cuda", 2)), "abc")
    (first, timeout), (backend, options) = begun
    assert first == "store" and backend == "nccl" and options["store"] is store
    assert options["device_id"] == torch.device("cuda", 2)
    assert (options["rank"], options["world_size"]) == (6, 8)
    assert timeout == options["timeout"] == train_gpt.TIMEOUT
    begun.clear()
    connect(World(0, 8, torch.device("cpu")), "abc")
    assert begun[1][0] == "gloo" and begun[1][1]["device_id"] is None
    begun.clear()
    with pytest.raises(UserError, match="machines"):
        connect(World(6, 8, torch.device("cuda", 2)), "another script")
    assert [name for name, _ in begun] == ["store"], "NCCL connected scripts that differ"


WAITING = """
import signal, sys, time
import torch
import train_gpt
from pathlib import Path
from types import SimpleNamespace

log = SimpleNamespace(file=True, path=Path(sys.argv[1]))
train_gpt.end_at_signals(log)
print("waiting", flush=True)
train_gpt.wait_for(SimpleNamespace(query=lambda: False))  # the event of a process that is gone
"""


def test_sigterm_ends_a_process_that_waits_for_another_one(tmp_path):
    """... and it still says how to resume. In a wait inside CUDA, Python would not handle the
    signal."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "step00000007.pt").touch()
    process = subprocess.Popen([sys.executable, "-c", WAITING, str(tmp_path / "run.log")], cwd=ROOT,
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)})
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM
    assert "SIGTERM" in errors and "step00000007.pt" in errors and "--resume=" in errors


def test_every_wait_for_a_gpu_is_one_that_signals_interrupt():
    """torch.cuda.synchronize() and Event.synchronize() block in C, and .item() on a CUDA tensor
    does too."""
    tree = ast.parse(inspect.getsource(train_gpt))
    called = {node.func.attr for node in ast.walk(tree)
              if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)}
    assert "query" in called and not called & {"synchronize", "item"}


FAILING = """
    if world.rank == 1 and step == 2:
        raise RuntimeError("NCCL error: unhandled cuda error")
"""


def test_an_unexpected_error_on_one_process_ends_all_with_its_traceback(tmp_path, shards):
    """The other process waits in a collective meanwhile. Only a limit far above what this takes
    (torchrun gives processes 30 s to end) tells a hang from it."""
    text = (ROOT / "train_gpt.py").read_text()
    head = "    window = window_tensor(step, hp, world)\n    loss = torch.zeros"
    assert text.count(head) == 1
    script = tmp_path / "failing.py"
    script.write_text(text.replace(head, FAILING + head))
    began = time.monotonic()
    done = python("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script,
                  *TINY, *shards, f"--records={tmp_path}/records", timeout=280)
    assert done.returncode == 1 and time.monotonic() - began < 280
    assert "Traceback" in done.stderr and "NCCL error: unhandled cuda error" in done.stderr
    assert len(list((tmp_path / "records").glob("*.log"))) == 1
