"""A process takes its place and its GPU, and an error on one ends all."""

import os
import re
from contextlib import nullcontext
import pytest
import torch
from conftest import SCRIPT, TINY, launch, refused
import train_gpt
from train_gpt import World, world_of_this_process

def on_gpu(rank, size, number):
    return World(rank, size, torch.device("cuda", number))

@pytest.mark.parametrize("variables, expected", [
    (dict(RANK=6, LOCAL_RANK=2, WORLD_SIZE=8), on_gpu(6, 8, 2)),  # on a second machine
    (dict(SLURM_STEP_NUM_TASKS=8, WORLD_SIZE=1), on_gpu(0, 1, 0)), ({}, on_gpu(0, 1, 0)),
    (dict(RANK=4, LOCAL_RANK=4, WORLD_SIZE=8), "one process per GPU"),
    (dict(SLURM_STEP_NUM_TASKS=8), "srun")], ids=str)
def test_a_process_takes_the_gpu_of_its_local_rank(monkeypatch, variables, expected):
    chosen = []
    for name, answer in dict(is_available=lambda: True, device_count=lambda: 4,
                             set_device=chosen.append).items():
        monkeypatch.setattr(torch.cuda, name, answer)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")  # which the script sets
    with refused(expected) if isinstance(expected, str) else nullcontext():
        assert world_of_this_process() == expected
    assert chosen == ([] if isinstance(expected, str) else [expected.device.index])

@pytest.mark.parametrize("variables, workers", [
    (dict(LOCAL_WORLD_SIZE="8"), "6"), ({}, "32"), (dict(LOCAL_WORLD_SIZE="64"), "1"),
    (dict(LOCAL_WORLD_SIZE="8", TORCHINDUCTOR_COMPILE_THREADS="3"), "3")], ids=str)
def test_compilers_of_all_ranks_share_the_cores(variables, workers, monkeypatch):
    """Each rank would start up to 32, with a gigabyte of memory each."""
    for name, answer in dict(is_available=lambda: True, device_count=lambda: 8,
                             set_device=lambda number: None).items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(48), raising=False)
    monkeypatch.setattr(os, "environ", dict(variables))
    world_of_this_process()
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == workers

NCCL_ERROR = """NCCL error in: ProcessGroupNCCL.cpp:94, unhandled system error, NCCL version 2.27.7
ncclSystemError: System call (e.g. socket, malloc) or external library call failed.
Last error:
{}"""
@pytest.mark.parametrize("fails", ["init_process_group", "broadcast_object_list"])
@pytest.mark.parametrize("last, advice", [
    ("Error while creating shared memory segment /dev/shm/nccl-a7 (size 9637888), error: No space "
     "left on device (28)", r"--shm-size=1g"),
    ("socketPollConnect: connect to 10.0.0.2<4711> returned timeout", "set NCCL_SOCKET_IFNAME")])
def test_why_ranks_do_not_meet_is_said_with_what_helps(fails, last, advice, monkeypatch):
    """NCCL may connect at the first exchange only. Its reason is on its last line."""
    def fail(*args, **options):
        raise RuntimeError(NCCL_ERROR.format(last))
    monkeypatch.setattr(train_gpt.dist, "init_process_group", lambda *args, **options: None)
    monkeypatch.setattr(train_gpt.dist, fails, fail)
    with refused(re.escape(last) + ".*" + advice):
        train_gpt.connect(None, "text", World(0, 2, torch.device("cpu")))

@pytest.mark.parametrize("chosen, threads", [(None, 1), ("2", 2)])
def test_a_process_on_a_cpu_has_one_thread_if_nobody_chose(monkeypatch, runs_here, chosen, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    torch.set_num_threads(2)
    assert world_of_this_process() == World(0, 1, torch.device("cpu"))
    assert torch.get_num_threads() == threads

@pytest.mark.parametrize("flag, message", [
    ("--val_tokens=99999999", "99999999"),  # is found before the ranks meet
    ("--records=/dev/null", "/dev/null"),  # by the first rank, when they have met
    pytest.param("--scalar_lr=1e9 --windows=SSSSSS --attention=...... --value_embeds=......",
                 "_loss is nan", marks=pytest.mark.method)])  # by all of them
def test_an_error_on_several_ranks_is_printed_once_and_none_hangs(tmp_path, shards, flag, message):
    done = launch(*TINY, *shards, f"--records={tmp_path}", *flag.split(), ranks=2, check=False)
    errors = re.findall("(?m)^error: .*", done.stderr)
    assert done.returncode == 1 and len(errors) == 1 and message in errors[0], done.stderr
    assert f"{SCRIPT.name}\", line" not in done.stderr
    for log in tmp_path.glob("*.log"):
        assert log.read_text().endswith(f"\n{errors[0]}\n")
