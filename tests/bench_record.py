#!/usr/bin/env python3
"""The record's own model beside ours and the record attempt's: forward and backward on one GPU.

    python tests/bench_record.py LOG --train_files='data/fineweb10B/fineweb_train_*.bin'

LOG is a published log of record 2025-01-26, which begins with the record's source. Its model is run
as it stands there, in this process. The models take the same tokens in turn, so that a GPU that
changes its speed changes it for all; times are medians. Flags that are not this program's own go
to train_gpt.py.

By default no model has Inductor's coordinate descent tuning, which the record's script turns on.
TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1 turns it on for all of them.

--cpu runs without a GPU, as a test of this program with small settings. There FlexAttention has no
backward pass, so that only validation's forward pass is run.
"""

import dataclasses
import importlib.util
import json
import statistics
import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from bench_gpu import at_window, timed
from gpu_lease import replaced, source_of
from torch import nn

import train_gpt
from data import common
from train_gpt import (UserError, parse_flags, read_tokens, require, resolve,
                       world_of_this_process)


ATTEMPT = Path(__file__).resolve().parent.parent / "records" / "speedrun_2026" / "train_gpt.py"


def load_attempt():
    spec = importlib.util.spec_from_file_location("attempt", ATTEMPT)
    attempt = sys.modules["attempt"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(attempt)
    return attempt


def record_model(log: Path, hp, device: torch.device) -> nn.Module:
    """The model of the record's source, as its script makes it. What differs is its size, if hp
    has another, and on a CPU the device."""
    source, found, _ = source_of(log).partition("# Our own simple Distributed Data Loader")
    require(found, f"{log} does not begin with the source of record 2025-01-26")
    source = replaced(source, log, {
        "torch._inductor.config.coordinate_descent_tuning = True": ""})
    if device.type == "cpu":
        source = source.replace('device="cuda"', 'device="cpu"')
    record = sys.modules["record"] = types.ModuleType("record")
    exec(compile(source, str(log), "exec"), vars(record))
    require(hp.num_heads * hp.head_dim == hp.model_dim and hp.head_dim == 128,
            "the record's model needs --head_dim=128, and --num_heads of model_dim / 128")
    model = record.GPT(hp.vocab_size, num_layers=12, num_heads=hp.num_heads, model_dim=hp.model_dim,
                       max_seq_len=max(hp.train_seq_len, hp.val_seq_len)).to(device)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.bfloat16()
    return model


def passes(model: nn.Module, call, device: torch.device):
    """A function that runs the model forward and backward, and returns its loss."""
    def forward_and_backward():
        loss = call()
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    if device.type == "cuda":
        return forward_and_backward
    model.eval()
    return torch.no_grad()(call)


def contestants(log: Path, hp, attempt_hp, window: int, tokens, device: torch.device) -> dict:
    """{name: (tokens of a call, the call)}"""
    T = hp.train_seq_len
    inputs, targets = tokens[:T], tokens[1:T + 1].long()
    cuda = device.type == "cuda"
    attempt = sys.modules["attempt"]
    found = {}

    model = record_model(log, hp, device)
    if cuda:
        model.compile(dynamic=False)
    blocks = torch.full((), window // train_gpt.BLOCK, dtype=torch.int32, device=device)
    found["the record"] = T, passes(model, lambda m=model: m(inputs, targets, blocks), device)

    model = train_gpt.GPT(hp, getattr(torch, hp.dtype), flex=cuda).to(device)
    if cuda:
        model.compile(dynamic=False, fullgraph=True)
    size = torch.full((), window, dtype=torch.int32, device=device)
    found["train_gpt.py"] = T, passes(model, lambda m=model: m(inputs, targets, size), device)

    model = attempt.GPT(attempt_hp, getattr(torch, hp.dtype), flex=cuda).to(device)
    if cuda:
        model.loss = torch.compile(model.loss, dynamic=False, fullgraph=True)
    T = attempt_hp.train_seq_len
    few = tokens[:T], tokens[1:T + 1].long()
    found["the record attempt"] = T, passes(model, lambda m=model: m(*few, size), device)
    return found


def main():
    parser = common.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path, metavar="LOG")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there, too")
    parser.add_argument("--repeat", type=int, default=10, help="timed calls of each model (10)")
    parser.add_argument("--window", type=int, default=896, help="long window in tokens (896)")
    parser.add_argument("--cpu", action="store_true", help="go on without a CUDA GPU")
    args, more = parser.parse_known_args()
    require(torch.cuda.is_available() or args.cpu, "there is no CUDA GPU; --cpu runs without one")
    hp, _ = parse_flags(["--preset=speedrun", *more])
    world = world_of_this_process()
    device = world.device
    hp = at_window(resolve(hp, device), args.window)
    attempt = load_attempt()
    shared = {name: getattr(hp, name) for name in
              ("vocab_size", "model_dim", "num_heads", "head_dim", "dtype", "use_fp8")}
    attempt_hp = dataclasses.replace(attempt.PRESETS["speedrun"], **shared)
    if attempt_hp.train_seq_len > hp.train_seq_len:  # in a rehearsal
        attempt_hp = dataclasses.replace(attempt_hp, train_seq_len=hp.train_seq_len,
                                         val_seq_len=hp.val_seq_len)
    shard = train_gpt.find_shards(hp.train_files)[0]
    require(shard.tokens > hp.train_seq_len, f"{shard.path} is shorter than --train_seq_len")
    tokens = read_tokens(shard.path, 0, hp.train_seq_len + 1, hp.vocab_size)
    tokens = tokens.to(torch.int32).to(device)

    calls = contestants(args.log, hp, attempt_hp, args.window, tokens, device)
    losses = {}
    times = {name: [] for name in calls}
    for name, (_, call) in calls.items():
        timed(call, device, 1)
        losses[name] = float(call())
        print(f"{name}: compiled, loss {losses[name]:.4f}", flush=True)
    for _ in range(args.repeat):
        for name, (_, call) in calls.items():
            times[name].append(timed(call, device, 1, warmup=0))
    report(args, device, calls, losses, times)


def report(args, device: torch.device, calls: dict, losses: dict, times: dict):
    """Prints the medians as a table, and writes them."""
    figures = {}
    for name, (length, _) in calls.items():
        milliseconds = 1000 * statistics.median(times[name])
        figures[name] = dict(tokens=length, ms=milliseconds, loss=losses[name],
                             us_per_token=1000 * milliseconds / length)
    record = figures["the record"]["us_per_token"]
    tuned = torch._inductor.config.coordinate_descent_tuning
    print("| model | ms | tokens | us per token | of the record's | loss |")
    print("|---|---|---|---|---|---|")
    for name, each in figures.items():
        microseconds = each["us_per_token"]
        print(f"| {name} | {each['ms']:.1f} | {each['tokens']} | {microseconds:.3f} | "
              f"{microseconds / record:.3f} | {each['loss']:.4f} |")
    cuda = device.type == "cuda"
    ratio = figures["train_gpt.py"]["us_per_token"] / record
    print(f"figure: train_gpt.py takes {ratio:.3f} times the record's time, forward"
          f"{' and backward' if cuda else ''}, {'with' if tuned else 'without'} tuning")
    if args.json:
        about = dict(device=torch.cuda.get_device_name() if cuda else "CPU",
                     torch=torch.__version__, window=args.window, repeat=args.repeat, tuned=tuned)
        args.json.write_text(json.dumps(dict(about=about, models=figures), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(common.run(main, errors=(UserError,)))
