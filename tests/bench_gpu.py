#!/usr/bin/env python3
"""What a training step costs on one CUDA GPU, where its time goes, and how far that is from what the GPU can do.

    python tests/bench_gpu.py --json bench.json                                      the speedrun on synthetic documents
    python tests/bench_gpu.py --train_files='data/fineweb10B/fineweb_train_*.bin'    on real shards
    python tests/bench_gpu.py --train_seq_len=8192 --val_seq_len=8192 --micro_batches=48    flags of train_gpt.py go through

First the GPU's ceilings: matrix products in bfloat16 and FP8, copies. Then train_gpt.py's own model, loader, optimizers and
step, compiled as it compiles them: steps at three long windows, weighted over the schedule; the time by part from the profiler's
kernel times; peak memory; what the FP8 casts lose. Times are medians after a warmup. A share of the floor is the time that the
step's FLOPs would take at full rate, over the time it took: at the data sheet's rates, and at the measured ones.

Progress goes to stderr, the table to stdout; --json PATH is written anew after every stage. Exit status: 0 done, 2 wrong usage
or no CUDA GPU. --cpu goes on without one, for a test of this program with small settings: its figures mean nothing.
"""

import copy
import dataclasses
import glob
import json
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy as np
import torch
from torch import Tensor
from torch.autograd import DeviceType

from data import common
from train_gpt import (BLOCK, GPT, PEAK_TFLOPS, SHARD_HEADER_INTS, SHARD_MAGIC, SHARD_VERSION, Adam, Hyperparameters, Muon, TrainLoader,
                       UserError, block_sparse, check_settings, check_shard, evaluate, flex, fp8_matmul, norm, optimizer_groups,
                       parse_flags, plan_spans, read_tokens, resolve, start_ranks, to_fp8, train_flops, train_step, warm_up, window_tokens)

MATMUL = r"gemm|gemv|nvjet|cutlass|splitk|_scaled_mm|aten::(mm|bmm|addmm|baddbmm)$"
RULES = [  # what was run, pattern of a kernel's name, its part of the step: the first that fits
    ("", r"memcpy|memset", "data and copies"),
    ("data", r"", "data and copies"),
    ("model", r"flex_attention|triton_tem", "attention"),  # without autotuning Inductor uses templates for nothing else
    ("model", MATMUL, "block matmuls"),
    ("model", r"", "norms, embeddings, elementwise"),
    ("optimizer", r"adam", "Adam"),
    ("optimizer", MATMUL, "Newton-Schulz matmuls"),
    ("optimizer", r"", "Muon's elementwise"),
]
READ_STEPS = 4  # steps that are read ahead at a time: few, so that reading goes on during the timed steps
NO_KERNEL = re.compile(r"(Context|Device|Stream|Event|Unknown) Sync|Stream Wait Event")  # the profiler lists them with the kernels


def by_part(region: str, kernels: list[tuple[str, float]]) -> Counter:
    """Seconds by part, from the names and seconds of the kernels of what was run."""
    parts = Counter()
    for name, seconds in kernels:
        parts[next(part for where, pattern, part in RULES if where in ("", region) and re.search(pattern, name, re.I))] += seconds
    return parts


def split(wall: float, model: Counter, head: Counter, optimizer: Counter, data: Counter) -> dict:
    """Seconds of a step by part, from the kernels' seconds by part. head is measured by itself and taken out of model, whose
    kernels it repeats; the gaps are what the kernels leave of the wall time."""
    parts = Counter({part: 0.0 for _, _, part in RULES})
    for kernels in (model, optimizer, data):
        parts.update(kernels)
    parts.subtract(head)
    parts["head and loss"] = sum(head.values())
    parts["gaps between kernels"] = wall - sum(parts.values())
    return dict(parts)


def weighted(windows: list[int], seconds: list[float], hp: Hyperparameters) -> float:
    """The mean over the schedule's steps of what was measured at some windows, linear between them."""
    steps = [window_tokens(step, hp) for step in range(max(1, hp.num_iterations))]
    return float(np.interp(steps, windows, seconds).mean())


def floor_seconds(tokens: int, flops: tuple[float, float], rates: tuple[float, float]) -> float:
    """Seconds that (blocks, head) FLOPs a token take at (blocks, head) FLOP/s."""
    return tokens * (flops[0] / rates[0] + flops[1] / rates[1])


class Report:
    """Figures, each with its unit; add prints them to stderr as they come, save writes all of them."""

    def __init__(self, path: Path | None, about: dict):
        self.path, self.about, self.figures, self.began = path, about, {}, time.perf_counter()

    def add(self, name: str, value: float, unit: str):
        self.figures[name] = dict(value=value, unit=unit)

    def save(self, stage: str):
        print(f"{time.perf_counter() - self.began:6.1f} s  {stage}", file=sys.stderr, flush=True)
        if self.path:
            self.path.write_text(json.dumps(dict(about=self.about, figures=self.figures), indent=1) + "\n")

    def table(self) -> str:
        return "\n".join([*(f"{name}: {value}" for name, value in self.about.items()), "",
                          *(f"{name:<66} {f['value']:>14,.6g} {f['unit']}" for name, f in self.figures.items())])


def timed(function, device, repeat: int, warmup: int = 1) -> float:
    """Median seconds of a call, by the device's clock."""
    times = []
    for _ in range(warmup + repeat):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            times.append(lambda begin=begin, end=end: begin.elapsed_time(end) / 1000)
        else:
            began = time.perf_counter()
            function()
            times.append(lambda seconds=time.perf_counter() - began: seconds)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return statistics.median(t() for t in times[warmup:])


def profiled(function, device) -> list[tuple[str, float]]:
    """(name, seconds) of each kernel that a call runs; on a CPU, of each operator without those that it calls."""
    kind = device.type.upper()
    activity = getattr(torch.profiler.ProfilerActivity, kind)
    if activity not in torch.profiler.supported_activities():
        return []
    with torch.profiler.profile(activities=[activity]) as profiler:
        function()
        if kind == "CUDA":
            torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == getattr(DeviceType, kind)
              and not event.is_user_annotation and not NO_KERNEL.fullmatch(event.name)]
    return [(event.name, (event.time_range.elapsed_us() if kind == "CUDA" else event.self_cpu_time_total) / 1e6) for event in events]


def ceilings(hp: Hyperparameters, device, repeat: int, report: Report) -> tuple[float, float]:
    """FLOP/s of matrix products in the activations' type and in FP8 (the former where the head does without)."""
    cuda, dtype, best = device.type == "cuda", getattr(torch, hp.dtype), {}
    for n in (4096, 8192, 16384) if cuda else (64, 128):
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        products = {hp.dtype: lambda: a @ b.T}
        if hp.use_fp8 or not cuda:
            a8, b8 = (to_fp8(x, 64.0, torch.float8_e4m3fn) for x in (a, b))
            products["FP8"] = lambda: fp8_matmul(a8, b8, 4096.0, torch.bfloat16, fast=True)
        for name, product in products.items():
            rate = 2 * n**3 / timed(product, device, 2 * repeat, warmup=3)
            report.add(f"matrix products, {name}, {n} x {n}", rate / 1e12, "TFLOP/s")
            best[name] = max(best.get(name, 0), rate)
    source = torch.randn(2**28 if cuda else 2**16, device=device)
    target = torch.empty_like(source)
    seconds = timed(lambda: target.copy_(source), device, 2 * repeat, warmup=3)
    report.add("copies on the device, read and written", 2 * source.nbytes / seconds / 1e9, "GB/s")
    return best[hp.dtype], best["FP8"] if hp.use_fp8 else best[hp.dtype]


def write_documents(path: Path, num_tokens: int, vocab_size: int):
    """A shard of random documents: lengths log-normal with a mean of some 700 tokens, as web pages have; tokens by Zipf's law,
    since gradients of the same embedding wait for each other."""
    chance, eot = np.random.default_rng(0), vocab_size - 1
    tokens = (float(eot) ** chance.random(num_tokens)).astype("<u2") - 1
    begins = np.cumsum(np.maximum(2, chance.lognormal(np.log(420), 1.0, 1 + num_tokens // 100)).astype(np.int64))
    tokens[np.concatenate([[0], begins[begins < num_tokens]])] = eot
    header = np.zeros(SHARD_HEADER_INTS, dtype="<i4")
    header[:3] = SHARD_MAGIC, SHARD_VERSION, num_tokens
    path.write_bytes(header.tobytes() + tokens.tobytes())


class HeadAndLoss(GPT):
    """A model that takes the features for its tokens: what is left of forward is the head and the loss."""

    def features(self, x_TD: Tensor, window: Tensor) -> Tensor:
        return x_TD


class Training:
    """What train_gpt.train builds, and the parts of its step by themselves."""

    def __init__(self, hp: Hyperparameters, ranks, loader: TrainLoader):
        self.hp, self.ranks, self.device, self.loader = hp, ranks, ranks.device, loader
        cuda, dtype = self.device.type == "cuda", getattr(torch, hp.dtype)
        self.model = GPT(hp, flex if cuda else block_sparse, dtype).to(self.device)
        head = copy.copy(self.model)  # the same parameters
        head.__class__ = HeadAndLoss
        self.compiled, self.head = (torch.compile(m, dynamic=False, fullgraph=True) if cuda else m for m in (self.model, head))
        matrices, adam_groups = optimizer_groups(self.model, hp)
        self.muon, self.adam = Muon(matrices, 0, 1, dtype), Adam(adam_groups, 1)
        self.x = norm(torch.randn(hp.train_seq_len, hp.model_dim, device=self.device)).to(dtype).requires_grad_()
        self.set_window(hp.window_start)
        self.batches = loader.next_step()
        warm_up(self.compiled, dict(self.model.named_parameters()), self.muon, self.adam, hp, ranks)
        self.run_head()
        self.run_optimizer()
        if cuda:
            torch.cuda.synchronize()
            torch.compiler.set_stance("fail_on_recompile")  # a recompile among the timed steps is an error, as in a run

    def set_window(self, tokens: int):
        self.window = torch.tensor(tokens, dtype=torch.int32).to(self.device)

    def run_data(self):
        self.batches = self.loader.next_step()

    def run_micro_batch(self, index: int = 0):
        self.compiled(*self.batches[index], self.window).backward()

    def run_model(self):
        for index in range(self.hp.micro_batches):
            self.run_micro_batch(index)

    def run_head(self):
        self.x.grad = None
        self.head(self.x, self.batches[0][1], self.window).backward()

    def run_optimizer(self):
        train_step(self.compiled, [], self.window, self.muon, self.adam, 0, self.hp)  # a step without micro-batches

    def run_step(self):
        self.run_data()
        self.loss = train_step(self.compiled, self.batches, self.window, self.muon, self.adam, 0, self.hp)


def flops_at(window: int, training: Training) -> tuple[float, float]:
    """FLOPs a token in the blocks and in the head, at a long window."""
    return train_flops(training.model, dataclasses.replace(training.hp, window_start=window, window_end=window))


def measure_steps(training: Training, windows: list[int], repeat: int, measured_rates: tuple, report: Report):
    """Steps at each window and over the schedule."""
    hp, device = training.hp, training.device
    names = [name for name in PEAK_TFLOPS if device.type == "cuda" and name in torch.cuda.get_device_name(device)]
    sheet = [rate * 1e12 for rate in PEAK_TFLOPS[names[0]]] if names and hp.dtype == "bfloat16" else None
    rates = {"measured ceilings": measured_rates}
    if sheet:
        rates["data sheet"] = (sheet[0], sheet[1] if hp.use_fp8 else sheet[0])
    tokens, steps, micro_batches = hp.micro_batches * hp.train_seq_len, {}, {}

    def add(where: str, step: float, micro_batch: float, flops: tuple):
        report.add(f"micro-batch, {where}", 1000 * micro_batch, "ms")
        report.add(f"step, {where}", 1000 * step, "ms")
        report.add(f"throughput, {where}", tokens / step, "tokens/s")
        report.add(f"FLOPs, {where}", sum(flops) / 1e6, "MFLOP/token")
        for name, pair in rates.items():
            report.add(f"share of the floor at the {name}, {where}", 100 * floor_seconds(tokens, flops, pair) / step, "%")

    for window in windows:
        training.set_window(window)
        steps[window] = timed(training.run_step, device, repeat)
        micro_batches[window] = timed(training.run_micro_batch, device, repeat)
        add(f"window {window}", steps[window], micro_batches[window], flops_at(window, training))
        report.save(f"window {window}: {1000 * steps[window]:.1f} ms a step")
    mean = weighted(windows, list(steps.values()), hp)
    add("mean of the schedule", mean, weighted(windows, list(micro_batches.values()), hp), train_flops(training.model, hp))
    report.add(f"{hp.num_iterations} steps at that mean", mean * hp.num_iterations, "s")
    report.add("training loss at the last step", float(training.loss) / hp.micro_batches, "nats")


def measure_parts(training: Training, window: int, repeat: int, report: Report):
    """A step's time by part, at a window; and, without the profiler's help, what its regions take by themselves."""
    hp, device, tokens = training.hp, training.device, training.hp.micro_batches * training.hp.train_seq_len
    training.set_window(window)
    wall = timed(training.run_step, device, repeat)
    for name, function in (("data", training.run_data), ("optimizer", training.run_optimizer),
                           ("head and loss of a micro-batch", training.run_head)):
        report.add(f"alone: {name}", 1000 * timed(function, device, repeat), "ms")
    training.run_optimizer()  # clears the head's gradient
    data, model, optimizer, head = (profiled(function, device) for function in (
        training.run_data, training.run_model, training.run_optimizer, training.run_head))
    report.add(f"parts: step, window {window}", 1000 * wall, "ms")
    if not model or not optimizer:
        return report.save("the profiler saw no kernels on this machine: no time by part")
    parts = split(wall, by_part("model", model), by_part("model", head * hp.micro_batches), by_part("optimizer", optimizer),
                  by_part("data", data))
    for part, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        report.add(f"part: {part}", 1000 * seconds, "ms")
    report.add("kernels in a step", len(data + model + optimizer), "launches")
    in_blocks, in_head = flops_at(window, training)
    in_matmuls = 6 * sum(p.numel() for p in training.model.blocks.parameters())
    for part, flops in (("block matmuls", in_matmuls), ("attention", in_blocks - in_matmuls), ("head and loss", in_head)):
        if parts[part] > 0:
            report.add(f"rate in {part}", flops * tokens / parts[part] / 1e12, "TFLOP/s")
    report.save(f"parts of a step at window {window}")


def measure_memory(name: str, device, function, report: Report):
    """Peak memory while function runs."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    function()
    for kind in ("allocated", "reserved"):
        peak = getattr(torch.cuda, f"max_memory_{kind}")() if device.type == "cuda" else 0
        report.add(f"peak memory {kind}, {name}", peak / 2**20, "MiB")


def cast_shares(x: Tensor, scale: float, dtype: torch.dtype) -> tuple[float, float, float]:
    """Shares of values that a cast to FP8 saturates, that it flushes to zero, and of the absolute sum that the latter held."""
    x, cast = x.float(), to_fp8(x, scale, dtype).float()
    size, flushed = x.abs(), (cast == 0) & (x != 0)
    saturated = (size * scale > torch.finfo(dtype).max).float().mean()
    return float(saturated), float(flushed.sum() / (x != 0).sum().clamp(min=1)), float(size[flushed].sum() / size.sum().clamp(min=1e-30))


def measure_casts(training: Training, report: Report):
    """What the head's FP8 casts lose at the weights that the steps here have led to, on the first tokens of a sequence."""
    hp, model, seen = training.hp, training.model, {}
    length = min(32 * BLOCK, hp.train_seq_len)

    def watch(module, inputs, output):
        seen.update(x=inputs[0].detach(), logits=output)

    attend, model.attend, hook = model.attend, block_sparse, model.lm_head.register_forward_hook(watch)  # FlexAttention wants a compiler
    model.eval()  # the head in the activations' type
    inputs, targets = (t[:length] for t in training.batches[0])
    loss = model(inputs, targets, training.window) * length / hp.train_seq_len  # as the mean over a whole sequence scales its gradient
    gradient, = torch.autograd.grad(loss, seen["logits"])
    model.train()
    hook.remove()
    model.attend = attend
    for name, x, scale, dtype in (("input", seen["x"], hp.fp8_x_scale, torch.float8_e4m3fn),
                                  ("weight", model.lm_head.weight.detach(), hp.fp8_w_scale, torch.float8_e4m3fn),
                                  ("gradient", gradient, hp.fp8_grad_scale, torch.float8_e5m2)):
        for what, share in zip(("saturated", "flushed to zero", "flushed, by absolute sum"), cast_shares(x, scale, dtype)):
            report.add(f"FP8 head's {name}: {what}", 100 * share, "%")


def find_data(hp: Hyperparameters, real: bool, folder: str, steps: int) -> tuple[list[str], list]:
    """Shards, and spans of at least so many steps; short ones."""
    step_tokens = hp.micro_batches * hp.train_seq_len
    if not real:
        hp = dataclasses.replace(hp, train_files=f"{folder}/bench_train_*.bin")
        write_documents(Path(folder) / "bench_train_000001.bin", max(steps * step_tokens, hp.val_seq_len) + 1, hp.vocab_size)
    files = sorted(glob.glob(hp.train_files, recursive=True))
    tokens = [check_shard(path, hp.vocab_size) for path in files[:2]]
    spans = [dataclasses.replace(span, start=span.start + first * step_tokens, steps=min(READ_STEPS, span.steps - first))
             for span in plan_spans(tokens, step_tokens, hp.train_seq_len, 1) for first in range(0, span.steps, READ_STEPS)]
    if not spans or tokens[0] <= hp.val_seq_len:
        raise UserError(f"--train_files={hp.train_files}: too few tokens for a step of {step_tokens} and for a validation sequence "
                        f"of {hp.val_seq_len}; name larger shards")
    return files, spans * -(-steps // sum(span.steps for span in spans))


def measure(hp: Hyperparameters, ranks, windows: list[int], rates: tuple, real: bool, folder: str, args, report: Report):
    device, repeat = ranks.device, args.repeat
    files, spans = find_data(hp, real, folder, (len(windows) + 2) * (repeat + 2) + repeat + 8)
    loader = TrainLoader(files, spans, hp, 0, 1, device)
    began = time.perf_counter()
    training = Training(hp, ranks, loader)
    report.add("compile and warmup, head by itself included", time.perf_counter() - began, "s")
    report.save("compiled")

    loader.wait_seconds = 0.0
    measure_memory("training", device, lambda: measure_steps(training, windows, repeat, rates, report), report)
    steps = len(windows) * (repeat + 1)
    report.add(f"waiting for data, shards read {READ_STEPS} steps at a time", 1000 * loader.wait_seconds / steps, "ms/step")
    report.save("steps")

    stream = read_tokens(files[0], hp.val_seq_len + 1).to(torch.int32)
    sequence = [(stream[:-1].to(device), stream[1:].long().to(device))]
    training.set_window(hp.window_end)
    one_sequence = dataclasses.replace(hp, val_tokens=hp.val_seq_len)

    def validate():
        seconds = timed(lambda: evaluate(training.compiled, sequence, training.window, one_sequence, ranks), device, min(3, repeat))
        report.add(f"validation sequence, window {hp.window_end}", 1000 * seconds, "ms")

    measure_memory(f"validation on {hp.val_seq_len} tokens", device, validate, report)
    report.save("validation")
    measure_casts(training, report)
    report.save("FP8 casts")
    measure_parts(training, args.profile_window or windows[len(windows) // 2], repeat, report)


def main():
    parser = common.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there, too")
    parser.add_argument("--repeat", type=int, default=5, help="timed calls of each kind; their median counts (5)")
    parser.add_argument("--profile_window", type=int, help="long window, in tokens, of the time by part (the middle one of the three)")
    parser.add_argument("--cpu", action="store_true", help="go on without a CUDA GPU")
    args, more = parser.parse_known_args()
    hp, _ = parse_flags(more, "speedrun")
    check_settings(hp, 1)
    if hp.deterministic or args.repeat < 1:
        raise UserError("--deterministic and a --repeat below 1 cannot be measured here")
    if not torch.cuda.is_available() and not args.cpu:
        raise UserError("there is no CUDA GPU; --cpu goes on without one, with small settings and for a test only")
    ranks = start_ranks()
    if ranks.world_size > 1:
        raise UserError("this measures one GPU; start it without torchrun")
    device = ranks.device
    hp, notes = resolve(hp, device)
    torch.manual_seed(0)
    windows = sorted({hp.window_start, -(-(hp.window_end // 2) // BLOCK) * BLOCK, hp.window_end})  # 128, 896, 1792 in the speedrun
    real = any(flag.startswith("--train_files") for flag in more)
    report = Report(args.json, dict(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU", torch=torch.__version__, cuda=torch.version.cuda,
        flags=" ".join(more), data=hp.train_files if real else "synthetic documents", dtype=hp.dtype, fp8_head=hp.use_fp8,
        micro_batches=hp.micro_batches, train_seq_len=hp.train_seq_len, val_seq_len=hp.val_seq_len, repeat=args.repeat, notes=notes))
    rates = ceilings(hp, device, args.repeat, report)
    report.save("ceilings")

    try:
        with tempfile.TemporaryDirectory() as folder:
            measure(hp, ranks, windows, rates, real, folder, args, report)
    finally:  # what was measured before an error is not lost
        print(report.table())


if __name__ == "__main__":
    sys.exit(common.run(main))
