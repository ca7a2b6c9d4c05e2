#!/usr/bin/env python3
"""What a training step costs on one CUDA GPU, where its time goes, and how far that is from what
the GPU can do.

    python tests/bench_gpu.py --json bench.json
    python tests/bench_gpu.py --train_files='data/fineweb10B/fineweb_train_*.bin'
    python tests/bench_gpu.py --train_seq_len=8192 --val_seq_len=8192 --micro_batches=48

The first takes synthetic documents, the second real shards. Flags that are not this program's own
go to train_gpt.py.

First it measures the GPU's ceilings: the rate of matrix products in bfloat16 and FP8, and of
copies. Then it takes train_gpt.py's own model, loader, optimizers and step, compiled as the script
compiles them, and measures: steps at five long windows, weighted over the schedule; the time of
each part of a step, from the profiler's kernel times; peak memory, beside the estimate that could
be made in advance; and what the FP8 casts lose. Times are medians after a warmup. "Share of the
floor" is the time that the step's FLOPs would take at full rate, divided by the time that the step
took: at the rates of the data sheet, and at the measured ones.

--predicted FILE is JSON, {"part": milliseconds}, of one process's share of a step, which has one
micro-batch: that of eight GPUs. It is shown beside what was measured, divided by the number of
micro-batches. --trace FILE takes three steps as a trace for https://ui.perfetto.dev.

Progress goes to stderr, the table to stdout; --json PATH is written anew after every stage. Exit
status: 0 when done, 2 for wrong usage or where there is no CUDA GPU. --cpu runs without one, as a
test of this program with small settings. Its figures mean nothing.
"""

import copy
import dataclasses
import json
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy as np
import torch
from torch import Tensor
from torch.autograd import DeviceType

from data import common
from records.memory_plan import estimated_peaks, kept_bytes
from train_gpt import (BLOCK, GPT, Hyperparameters, Shard, UserError, World, build_optimizers,
                       check_settings, draw_weights, evaluate, find_shards, fp8_matmul,
                       load_validation, norm, parse_flags, resolve, step_starts, to_fp8,
                       train_batches, train_step, warm_up, window_tensor, window_tokens,
                       world_of_this_process)

# The data sheets' dense TFLOP/s in bfloat16 and in FP8, by a part of the GPU's name.
PEAK_TFLOPS = {
    "H200": (989, 1979),
    "H100 80GB HBM3": (989, 1979),
    "H100 PCIe": (756, 1513),
    "A100": (312, 312),
    "L40S": (362, 733),
    "RTX 4090": (165, 330),
}
MATMUL = r"^(?!triton).*(gemm|gemv|nvjet|cutlass|splitk|::_scaled_mm)|aten::(mm|bmm|addmm|baddbmm)$"
# (what was run, pattern of a kernel's name, the part of the step that it belongs to); the first row
# that fits counts. Inductor's kernels are named by the operators that they fuse.
RULES = [
    ("", r"memcpy|memset", "other: data and copies"),
    ("", r"nccl", "exchange"),
    ("data", r"", "other: data and copies"),
    # Without autotuning, Inductor uses templates for FlexAttention only.
    ("model", r"flex_attention|triton_tem", "attention"),
    ("model", MATMUL, "products"),
    ("model", r"embedding|cumsum|sort|index_put", "embeddings and masks"),
    ("model", r"softmax|nll_loss|sigmoid", "loss and softcap"),  # and the cast of its gradient
    ("model", r"scaled_mm(?!.*rsqrt)", "head"),  # casts; its products are found by `split`
    ("model", r"relu|threshold", "ReLU^2"),
    ("model", r"rms_norm|pow|rsqrt|cat|neg", "norms and rotary"),
    ("model", r"", "other"),
    ("optimizer", r"adam", "optimizer: Adam"),
    ("optimizer", MATMUL, "optimizer: Newton-Schulz products"),
    ("optimizer", r"", "optimizer: Muon's elementwise"),
]
# The profiler lists these among the kernels.
NO_KERNEL = re.compile(r"(Context|Device|Stream|Event|Unknown) Sync|Stream Wait Event")


# --------------------------------------------------------------------------------------------------
# Arithmetic

def part_of(region: str, kernel: str) -> str:
    """The part of a step that a kernel belongs to."""
    for where, pattern, part in RULES:
        if where in ("", region) and re.search(pattern, kernel, re.I):
            return part


def by_part(region: str, kernels: list[tuple[str, float]]) -> Counter:
    """Seconds by part, from the names and the seconds of the kernels."""
    parts = Counter()
    for name, seconds in kernels:
        parts[part_of(region, name)] += seconds
    return parts


def split(wall: float, model: Counter, head_products: float, optimizer: Counter,
          data: Counter) -> dict:
    """Seconds of a step by part, from the kernels' seconds by part. The head's products cannot be
    told from others by their names, so they were measured alone. The gaps are the wall time without
    the kernels."""
    parts = Counter({part: 0.0 for _, _, part in RULES})
    for kernels in (model, optimizer, data):
        parts.update(kernels)
    parts["products"] -= head_products
    parts["head"] += head_products
    parts["other: gaps between kernels"] = wall - sum(parts.values())
    return dict(parts)


def compared(parts: dict, micro_batches: int, predicted: dict) -> str:
    """A table of the milliseconds that were predicted and measured for each part, of one
    micro-batch and its share of the optimizers' work."""
    measured = Counter()
    for part, seconds in parts.items():
        measured[part.partition(":")[0]] += 1000 * seconds / micro_batches
    parts = dict.fromkeys([*sorted(measured, key="other".__eq__), *predicted])
    rows = [(part, predicted.get(part), measured.get(part)) for part in parts]
    rows.append(("sum", sum(predicted.values()) if predicted else None, sum(measured.values())))
    lines = [f"| {'ms per micro-batch':<22} | predicted | measured |", "|---|---|---|"]
    for part, *numbers in rows:
        cells = ["" if x is None else f"{x:.2f}" for x in numbers]
        lines.append(f"| {part:<22} | {cells[0]:>9} | {cells[1]:>8} |")
    return "\n".join(lines)


def weighted(windows: list[int], seconds: list[float], hp: Hyperparameters) -> float:
    """The mean over the steps of the schedule of what was measured at some windows, interpolated
    between them."""
    steps = [window_tokens(step, hp) for step in range(max(1, hp.num_iterations))]
    return float(np.interp(steps, windows, seconds).mean())


def train_flops(model: GPT, hp: Hyperparameters) -> tuple[float, float]:
    """FLOPs per token (in the blocks, in the head), forward and backward, averaged over the steps'
    windows. Attention is counted where the window and the diagonal leave keys visible; the borders
    of documents, which hide more, are not subtracted."""
    sampled = range(0, max(1, hp.num_iterations), max(1, hp.num_iterations // 50))
    long = np.array([-(-window_tokens(step, hp) // BLOCK) for step in sampled])
    window_blocks = {"L": long, "S": np.maximum(1, long // 2)}
    # A token in the n-th block sees n blocks, or those of the window if they are fewer, and of its
    # own block one half.
    blocks_so_far = np.arange(1, hp.train_seq_len // BLOCK + 1)
    keys = 0.0
    for kind, has_attention in zip(hp.windows, hp.attention):
        if has_attention == "x":
            seen = np.minimum.outer(window_blocks[kind], blocks_so_far).mean()
            keys += seen * BLOCK - (BLOCK - 1) / 2
    in_matrices = 6 * matrix_elements(model)
    in_attention = 12 * hp.num_heads * hp.head_dim * keys
    return in_matrices + in_attention, 6 * model.lm_head.weight.numel()


def matrix_elements(model: GPT) -> int:
    return sum(p.numel() for p in model.blocks.parameters() if p.ndim > 1)


def floor_seconds(tokens: int, flops: tuple[float, float], rates: tuple[float, float]) -> float:
    """Seconds that FLOPs per token (in the blocks, in the head) take at FLOP/s of the same two."""
    return tokens * (flops[0] / rates[0] + flops[1] / rates[1])


def at_window(hp: Hyperparameters, tokens: int) -> Hyperparameters:
    """The settings with this long window in every step."""
    return dataclasses.replace(hp, window_start=tokens, window_end=tokens)


def cast_shares(x: Tensor, scale: float, dtype: torch.dtype) -> tuple[float, float, float]:
    """Of a cast to FP8: the share of the values that saturate, the share that is flushed to zero,
    and their share of the sum of absolute values."""
    x = x.float()
    size = x.abs()
    flushed = (to_fp8(x, scale, dtype).float() == 0) & (x != 0)
    saturated = (size * scale > torch.finfo(dtype).max).float().mean()
    flushed_share = flushed.sum() / (x != 0).sum().clamp(min=1)
    flushed_mass = size[flushed].sum() / size.sum().clamp(min=1e-30)
    return float(saturated), float(flushed_share), float(flushed_mass)


class Report:
    """Figures with their units. `save` writes those that there are so far, and prints the stage on
    stderr."""

    def __init__(self, path: Path | None, about: dict):
        self.path = path
        self.about = about
        self.figures = {}
        self.comparison = ""  # with what was predicted
        self.began = time.perf_counter()

    def add(self, name: str, value: float, unit: str):
        self.figures[name] = dict(value=value, unit=unit)

    def save(self, stage: str):
        print(f"{time.perf_counter() - self.began:6.1f} s  {stage}", file=sys.stderr, flush=True)
        if self.path:
            content = dict(about=self.about, figures=self.figures)
            self.path.write_text(json.dumps(content, indent=1) + "\n")

    def table(self) -> str:
        lines = [f"{name}: {value}" for name, value in self.about.items()]
        lines.append("")
        for name, figure in self.figures.items():
            lines.append(f"{name:<66} {figure['value']:>14,.6g} {figure['unit']}")
        return "\n".join([*lines, "", self.comparison])

    def summary(self) -> str:
        """The figures that matter most, of those that there are."""
        names = ["step, mean of the schedule", "share of the floor at the data sheet, mean of the "
                 "schedule", "peak memory allocated, training", "compile and warmup, with a cache"]
        words = [f"{name} {figure['value']:.4g} {figure['unit']}"
                 for name in names if (figure := self.figures.get(name))]
        return "; ".join(words)


# --------------------------------------------------------------------------------------------------
# Measuring

def timed(function, device: torch.device, repeat: int, warmup: int = 1) -> float:
    """Median seconds of a call, by the device's clock."""
    for _ in range(warmup):
        function()
    if device.type == "cpu":
        times = []
        for _ in range(repeat):
            began = time.perf_counter()
            function()
            times.append(time.perf_counter() - began)
        return statistics.median(times)
    stretches = []
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        stretches.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) / 1000 for begin, end in stretches)


def profiled(function, device: torch.device) -> list[tuple[str, float]]:
    """(name, seconds) of each kernel that a call runs; on a CPU, of each operator, without the
    operators that it calls."""
    cuda = device.type == "cuda"
    activity = getattr(torch.profiler.ProfilerActivity, device.type.upper())
    where = getattr(DeviceType, device.type.upper())
    if activity not in torch.profiler.supported_activities():
        return []
    with torch.profiler.profile(activities=[activity]) as profiler:
        function()
        if cuda:
            torch.cuda.synchronize()
    kernels = []
    for event in profiler.events():
        waits = event.is_user_annotation or NO_KERNEL.fullmatch(event.name)
        if event.device_type == where and not waits:
            took = event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
            kernels.append((event.name, took / 1e6))
    return kernels


def ceilings(hp: Hyperparameters, device: torch.device, repeat: int,
             report: Report) -> tuple[float, float]:
    """FLOP/s of matrix products in the dtype of the activations and in that of the head."""
    cuda = device.type == "cuda"
    best = {}
    for n in (4096, 8192, 16384) if cuda else (64, 128):
        a, b = (torch.randn(n, n, device=device).to(getattr(torch, hp.dtype)) for _ in range(2))
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
    report.save("ceilings")
    return best[hp.dtype], best["FP8"] if hp.use_fp8 else best[hp.dtype]


def write_documents(path: Path, num_tokens: int, vocab_size: int):
    """Writes a shard of random documents. Their lengths are log-normal with a mean of some 700
    tokens, as those of web pages. Tokens follow Zipf's law, because gradients of the same embedding
    wait for each other."""
    chance = np.random.default_rng(0)
    eot = vocab_size - 1
    tokens = (float(eot) ** chance.random(num_tokens)).astype("<u2") - 1
    lengths = chance.lognormal(np.log(420), 1.0, 1 + num_tokens // 100)
    begins = np.cumsum(np.maximum(2, lengths).astype(np.int64))
    tokens[np.concatenate([[0], begins[begins < num_tokens]])] = eot
    path.write_bytes(common.shard_header(num_tokens) + tokens.tobytes())


def find_data(hp: Hyperparameters, real: bool, folder: str,
              steps: int) -> tuple[list[Shard], Hyperparameters]:
    """Shards, and the settings with enough passes over them for this number of steps."""
    step_tokens = hp.micro_batches * hp.train_seq_len
    if not real:
        hp = dataclasses.replace(hp, train_files=f"{folder}/bench_train_*.bin")
        num_tokens = max(steps * step_tokens, hp.val_seq_len) + 1
        write_documents(Path(folder, "bench_train_000001.bin"), num_tokens, hp.vocab_size)
    hp = dataclasses.replace(hp, epochs=steps)
    shards = find_shards(hp.train_files)
    available = sum(1 for _ in islice(step_starts(shards, hp), steps))
    if available < steps or sum(shard.tokens for shard in shards) <= hp.val_seq_len:
        raise UserError(f"--train_files={hp.train_files}: too few tokens for a step of "
                        f"{step_tokens} and for a validation sequence of {hp.val_seq_len}; name "
                        "larger shards")
    return shards, hp


class HeadAndLoss(GPT):
    """The head and the loss alone, called with the features in place of the tokens."""

    def features(self, x_TD: Tensor, window: Tensor) -> Tensor:
        return x_TD


class Training:
    """What train_gpt.main builds, and the parts of its step, each to be run alone."""

    def __init__(self, hp: Hyperparameters, world: World, shards: list[Shard]):
        self.hp = hp
        self.world = world
        self.device = world.device
        self.batches_of_steps = train_batches(shards, hp, world, 0)
        self.host_seconds = []  # of each step's data
        cuda = self.device.type == "cuda"
        dtype = getattr(torch, hp.dtype)
        self.model = GPT(hp, dtype, flex=cuda)
        draw_weights(self.model, hp.seed)
        self.model.to(self.device)
        self.params = list(self.model.parameters())
        self.compiled = self.model
        self.head = copy.copy(self.model)  # which shares the parameters
        self.head.__class__ = HeadAndLoss
        if cuda:
            self.compiled = torch.compile(self.model, dynamic=False, fullgraph=True)
            self.head = torch.compile(self.head, dynamic=False, fullgraph=True)
        self.optimizers = build_optimizers(self.model, hp, world)
        features = norm(torch.randn(hp.train_seq_len, hp.model_dim, device=self.device))
        self.x = features.to(dtype).requires_grad_()
        self.set_window(hp.window_start)
        self.run_data()
        with estimated_peaks() as self.training_peaks:
            self.run_micro_batch()
        with estimated_peaks() as self.validation_peaks:  # and those of the optimizers, far lower
            warm_up(self.compiled, self.optimizers, hp, world)
        self.run_head()
        self.clear_gradients()
        if cuda:
            torch.cuda.synchronize()
            # As in a run, a recompile among the timed steps is an error.
            torch.compiler.set_stance("fail_on_recompile")

    def set_window(self, tokens: int):
        self.settings = at_window(self.hp, tokens)
        self.window = window_tensor(0, self.settings, self.device)

    def clear_gradients(self):
        self.model.zero_grad(set_to_none=True)

    def keep_gradients(self):
        """Computes the gradients on which run_optimizer works."""
        self.clear_gradients()
        self.run_model()
        self.gradients = [p.grad for p in self.params]

    def run_data(self):
        began = time.perf_counter()
        self.batches = next(self.batches_of_steps)
        self.host_seconds.append(time.perf_counter() - began)

    def run_micro_batch(self, index: int = 0):
        loss = self.compiled(*self.batches[index], self.window) / self.hp.micro_batches
        loss.backward()

    def run_model(self):
        for index in range(self.hp.micro_batches):
            self.run_micro_batch(index)

    def run_head(self):
        self.x.grad = None
        loss = self.head(self.x, self.batches[0][1], self.window) / self.hp.micro_batches
        loss.backward()

    def run_optimizer(self):
        for p, gradient in zip(self.params, self.gradients):
            p.grad = gradient
        train_step(self.compiled, [], self.optimizers, 0, self.settings, self.world)

    def run_step(self):
        self.run_data()
        self.loss = train_step(self.compiled, self.batches, self.optimizers, 0, self.settings,
                               self.world)


def peak_rates(hp: Hyperparameters, device: torch.device) -> tuple[float, float] | None:
    """The data sheet's FLOP/s of this GPU in bfloat16 and in the head's dtype, where known."""
    if device.type == "cuda" and hp.dtype == "bfloat16":
        for name, (bf16, fp8) in PEAK_TFLOPS.items():
            if name in torch.cuda.get_device_name(device):
                return bf16 * 1e12, (fp8 if hp.use_fp8 else bf16) * 1e12
    return None


def measure_steps(training: Training, windows: list[int], repeat: int,
                  measured_rates: tuple[float, float], report: Report):
    """Measures steps at each window, and their mean over the schedule."""
    hp, device = training.hp, training.device
    tokens = hp.micro_batches * hp.train_seq_len
    rates = {"measured ceilings": measured_rates}
    sheet = peak_rates(hp, device)
    if sheet:
        rates["data sheet"] = sheet

    def add(where: str, step: float, micro_batch: float, flops: tuple[float, float]):
        report.add(f"micro-batch, {where}", 1000 * micro_batch, "ms")
        report.add(f"step, {where}", 1000 * step, "ms")
        report.add(f"throughput, {where}", tokens / step, "tokens/s")
        report.add(f"FLOPs, {where}", sum(flops) / 1e6, "MFLOP/token")
        for name, pair in rates.items():
            share = 100 * floor_seconds(tokens, flops, pair) / step
            report.add(f"share of the floor at the {name}, {where}", share, "%")

    steps = []
    micro_batches = []
    training.host_seconds.clear()
    for window in windows:
        training.set_window(window)
        steps.append(timed(training.run_step, device, repeat))
        micro_batches.append(timed(training.run_micro_batch, device, repeat))
        training.clear_gradients()
        flops = train_flops(training.model, at_window(hp, window))
        add(f"window {window}", steps[-1], micro_batches[-1], flops)
        report.save(f"window {window}: {1000 * steps[-1]:.1f} ms a step")
    mean = weighted(windows, steps, hp)
    mean_micro_batch = weighted(windows, micro_batches, hp)
    add("mean of the schedule", mean, mean_micro_batch, train_flops(training.model, hp))
    report.add(f"{hp.num_iterations} steps at that mean", mean * hp.num_iterations, "s")
    report.add("training loss at the last step", float(training.loss), "nats")
    host = statistics.median(training.host_seconds)
    report.add("a step's data, on the host", 1000 * host, "ms")


def measure_parts(training: Training, window: int, repeat: int, predicted: dict, report: Report):
    """Measures a step's time by part, at one window, and shows it beside what was predicted; and,
    without the profiler, how long the regions of a step take when they run alone."""
    hp, device = training.hp, training.device
    tokens = hp.micro_batches * hp.train_seq_len
    training.set_window(window)
    wall = timed(training.run_step, device, repeat)
    training.keep_gradients()
    alone = {"data": training.run_data, "optimizer": training.run_optimizer,
             "head and loss of a micro-batch": training.run_head}
    for name, function in alone.items():
        report.add(f"alone: {name}", 1000 * timed(function, device, repeat), "ms")
    head = profiled(training.run_head, device)
    training.clear_gradients()
    data = profiled(training.run_data, device)
    model = profiled(training.run_model, device)
    optimizer = profiled(training.run_optimizer, device)
    report.add(f"parts: step, window {window}", 1000 * wall, "ms")
    if not model or not optimizer:
        report.save("the profiler saw no kernels on this machine: no time by part")
        return
    head_products = hp.micro_batches * by_part("model", head)["products"]
    parts = split(wall, by_part("model", model), head_products, by_part("optimizer", optimizer),
                  by_part("data", data))
    report.comparison = compared(parts, hp.micro_batches, predicted)
    for part, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        report.add(f"part: {part}", 1000 * seconds, "ms")
    report.add("kernels in a step", len(data + model + optimizer), "launches")
    in_blocks, in_head = train_flops(training.model, at_window(hp, window))
    in_matrices = 6 * matrix_elements(training.model)
    flops = {"products": in_matrices, "attention": in_blocks - in_matrices, "head": in_head}
    for part, flops_a_token in flops.items():
        if parts[part] > 0:
            rate = flops_a_token * tokens / parts[part]
            report.add(f"rate in {part}", rate / 1e12, "TFLOP/s")
    report.save(f"parts of a step at window {window}")


def trace_steps(training: Training, window: int, path: Path, report: Report):
    """Writes a Chrome trace of three steps, gzipped if the path ends so."""
    training.set_window(window)
    activities = torch.profiler.supported_activities()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(3):
            training.run_step()
        if training.device.type == "cuda":
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    report.save(f"trace of three steps: {path}")


def measure_validation(training: Training, shards: list[Shard], repeat: int, report: Report):
    """Measures one validation sequence, at the last window."""
    hp = at_window(training.hp, training.hp.window_end)
    hp = dataclasses.replace(hp, val_tokens=hp.val_seq_len)
    sequences = load_validation(shards, hp, training.world)

    def validate():
        evaluate(training.compiled, sequences, 0, hp, training.world)

    seconds = timed(validate, training.device, min(3, repeat))
    report.add(f"validation sequence, window {hp.window_end}", 1000 * seconds, "ms")


def measure_memory(name: str, device: torch.device, function, report: Report):
    """Measures the peak memory while a function runs."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    function()
    allocated = torch.cuda.max_memory_allocated() if cuda else 0
    reserved = torch.cuda.max_memory_reserved() if cuda else 0
    report.add(f"peak memory allocated, {name}", allocated / 2**20, "MiB")
    report.add(f"peak memory reserved, {name}", reserved / 2**20, "MiB")


def fp8_scales(hp: Hyperparameters) -> tuple[float, float, float]:
    """The script's own scales for a model of these settings, also where its head does not use
    FP8."""
    hp = dataclasses.replace(hp, use_fp8=True, train_seq_len=BLOCK, val_seq_len=BLOCK)
    with torch.device("meta"):
        return GPT(hp, torch.bfloat16, flex=False).lm_head.fp8_scales


def measure_casts(training: Training, report: Report):
    """Measures what the head's FP8 casts lose, with the weights after the steps before, on the
    first tokens of a sequence."""
    hp, model = training.hp, training.model
    length = min(32 * BLOCK, hp.train_seq_len)
    seen = {}

    def watch(module, inputs, output):
        seen["x"] = inputs[0].detach()
        seen["logits"] = output

    flex = model.flex
    model.flex = False  # FlexAttention would have to be compiled
    hook = model.lm_head.register_forward_hook(watch)
    model.eval()  # so that the head computes in the dtype of the activations
    inputs, targets = (t[:length] for t in training.batches[0])
    # In a step the loss is a mean over the whole sequence, divided by the number of micro-batches.
    loss = model(inputs, targets, training.window) * length / hp.train_seq_len / hp.micro_batches
    gradient, = torch.autograd.grad(loss, seen["logits"])
    model.train()
    hook.remove()
    model.flex = flex
    operands = (("input", seen["x"], torch.float8_e4m3fn),
                ("weight", model.lm_head.weight.detach(), torch.float8_e4m3fn),
                ("gradient", gradient, torch.float8_e5m2))
    for (name, x, dtype), scale in zip(operands, fp8_scales(hp)):
        saturated, flushed, mass = cast_shares(x, scale, dtype)
        report.add(f"FP8 head's {name}: saturated", 100 * saturated, "%")
        report.add(f"FP8 head's {name}: flushed to zero", 100 * flushed, "%")
        report.add(f"FP8 head's {name}: flushed, by absolute sum", 100 * mass, "%")
    report.save("FP8 casts")


def report_estimates(training: Training, report: Report):
    """Reports the memory that could be told before anything ran: what is kept from step to step,
    and with it the most that the compiled programs take."""
    kept = kept_bytes(training.hp, training.world.size)
    report.add("memory kept between steps, estimate", kept / 2**20, "MiB")
    for name, peaks in (("training", training.training_peaks),
                        ("validation", training.validation_peaks)):
        if peaks:  # there are none on a CPU, where nothing is compiled
            report.add(f"peak memory, {name}, estimate", (kept + max(peaks)) / 2**20, "MiB")


def measure(hp: Hyperparameters, world: World, real: bool, folder: str, args, report: Report):
    device, repeat = world.device, args.repeat
    # 128, 640, 1024, 1408 and 1792 in the speedrun
    even = np.linspace(hp.window_start, hp.window_end, 5)
    windows = sorted({int(-(-window // BLOCK) * BLOCK) for window in even})
    rates = ceilings(hp, device, repeat, report)

    steps = (len(windows) + 2) * (repeat + 1) + 5  # run_data is called so often below
    shards, hp = find_data(hp, real, folder, steps)
    began = time.perf_counter()
    training = Training(hp, world, shards)
    cache = "with" if args.use_cache else "without"
    report.add(f"compile and warmup, {cache} a cache", time.perf_counter() - began, "s")
    report_estimates(training, report)
    report.save("compiled")

    measure_memory("training", device,
                   lambda: measure_steps(training, windows, repeat, rates, report), report)
    report.save("steps")
    window = args.profile_window or windows[len(windows) // 2]
    predicted = json.loads(args.predicted.read_text()) if args.predicted else {}
    measure_parts(training, window, repeat, predicted, report)
    if args.trace:
        trace_steps(training, window, args.trace, report)
    measure_memory(f"validation on {hp.val_seq_len} tokens", device,
                   lambda: measure_validation(training, shards, repeat, report), report)
    report.save("validation")
    measure_casts(training, report)


def main():
    parser = common.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there, too")
    parser.add_argument("--repeat", type=int, default=5,
                        help="timed calls of each kind; their median counts (5)")
    parser.add_argument("--profile_window", type=int, metavar="TOKENS",
                        help="long window of the time by part (the middle one)")
    parser.add_argument("--predicted", type=Path, metavar="FILE", help="JSON, {part: milliseconds}")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="for a trace, as trace.json.gz")
    parser.add_argument("--use_cache", action="store_true",
                        help="take what the compiler finds in its cache, without memory estimates")
    parser.add_argument("--cpu", action="store_true", help="go on without a CUDA GPU")
    args, more = parser.parse_known_args()
    hp, command = parse_flags(["--preset=speedrun", *more])  # a preset in `more` comes later
    check_settings(hp, 1)
    if args.repeat < 1 or command.check or command.resume:
        raise UserError("--repeat counts from 1; --check and --resume are for runs")
    if not torch.cuda.is_available() and not args.cpu:
        raise UserError("there is no CUDA GPU; --cpu runs without one, as a test with small "
                        "settings")
    world = world_of_this_process()
    if world.size > 1:
        raise UserError("this measures one GPU; start it without torchrun")
    hp = dataclasses.replace(resolve(hp, world.device), seed=0)
    torch.manual_seed(0)
    # The compiler estimates the memory of what it compiles, and not of what it finds in its cache.
    torch.compiler.config.force_disable_caches = not args.use_cache
    real = "train_files" in command.named
    cuda = world.device.type == "cuda"
    report = Report(args.json, dict(
        device=torch.cuda.get_device_name(world.device) if cuda else "CPU",
        torch=torch.__version__, cuda=torch.version.cuda, flags=" ".join(more),
        data=hp.train_files if real else "synthetic documents", dtype=hp.dtype, fp8_head=hp.use_fp8,
        micro_batches=hp.micro_batches, train_seq_len=hp.train_seq_len, val_seq_len=hp.val_seq_len,
        repeat=args.repeat))
    try:
        with tempfile.TemporaryDirectory() as folder:
            measure(hp, world, real, folder, args, report)
    finally:  # after an error, too
        print(report.table())
        print("figure:", report.summary())


if __name__ == "__main__":
    sys.exit(common.run(main, errors=(UserError,)))
