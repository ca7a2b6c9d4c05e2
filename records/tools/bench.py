"""Measures training steps of scripts side by side, on the GPU at hand or on a CPU:

    ./run.sh bench [my_record.py ...] [--vs=train_gpt.py] [preset] [flags of train_gpt.py]
    ./run.sh bench --vs=record.txt             # train_gpt.py beside a published log's script

Each script runs as it is, in a process of its own, and trains --steps=20 steps, in turns of five
with the others, so that a machine that changes its speed changes it for all. They are the steps of
a whole run that is shortened to them: the attention window grows through its whole schedule, so
the mean step is that of a run. Two steps before them are not timed.

On a GPU the scripts first compile with empty caches, side by side where memory holds several. Then
they start again, and nothing else runs while steps are timed. Inductor's coordinate descent tuning
is off for all, unless TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1 turns it on for all.

A file without a `train_step` is a published script, or a published log, which begins with one and a
line of 100 `=`. It is changed only where PUBLISHED says. Tokens are made up, the same everywhere,
unless --train_files names shards.

  a step, a micro-batch   by events on the GPU, without waiting for it
  start to step 1         of the process, with compiling (train_gpt.py compiles validation as well)
  memory                  the most that tensors took, and that PyTorch reserved
  parts, kernels          of two more steps, by the profiler; parts are told by kernels' names
  GB/s                    by the bytes that Inductor counts, of kernels whose name is unique

--json prints an object with all of this in place of the table.
"""

import contextlib
import glob
import importlib.util
import json
import os
import re
import resource
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
import numpy as np
import torch
from torch.utils.benchmark import Timer

from data.common import ArgumentParser, UserError, require, run, shard_header

SETTLE = 1  # steps after the first one that are not timed either
TURN = 5  # steps of one script before the next one's turn
PROFILED = 2
GIB = 2**30
PROCESS = 45 * GIB  # what a script of full size may reserve: 43.5 were seen
CHILD = [sys.executable, "-W", "ignore", str(Path(__file__).resolve())]
# What was measured on a GPU of this name: TFLOP/s of 4,096 x 4,096 in bfloat16, TB/s of copies.
ELSEWHERE = {"H200": (720, 4.2)}

PUBLISHED = [  # (pattern, what runs here instead)
    (r"(num_iterations\s*(?::\s*int\s*)?=\s*)\d+", r"\g<1>{steps}"),
    (r"(val_loss_every\s*(?::\s*int\s*)?=\s*)\d+", r"\g<1>0"),
    # Eight sequences a step on one GPU. Their gradients are summed, where eight GPUs average them;
    # the optimizers of record 2025-01-26 take no notice of a factor.
    (r"(train_batch_size = )world_size( \* args\.seq_len)", r"\g<1>8\2"),
    (r"(coordinate_descent_tuning = )True", r"\g<1>{tuned}"),
    # The strides that this operator really has. Without them torch 2.11 refuses it.
    (r"(return x_f8\.to\(torch\.bfloat16\), w_f8)(\.to\(torch\.float32\))",
     r"\1.t().contiguous().t()\2"),
]

# The part of a step that a kernel belongs to: the first whose pattern fits its name. Inductor names
# a kernel after the operators that it fuses.
LIBRARY = r"^(?!triton).*"
PARTS = [
    ("exchange", r"nccl|gloo"),
    ("copies", r"^memcpy|^memset|aten::(copy_|fill_|zero_)$"),
    ("attention", r"flex_attention|^triton_tem|scaled_dot_product|flash_attention"),
    ("FP8 matmuls", LIBRARY + r"(nvjet_sm\d+_q|_scaled_mm|e4m3|e5m2)"),
    ("matmuls", LIBRARY + r"(gemm|gemv|nvjet|cutlass|splitk|aten::(mm|bmm|addmm|baddbmm)$)"),
    ("optimizers, elementwise", r"adam|lerp"),
    ("loss and softcap", r"softmax|nll_loss|cross_entropy|sigmoid|logsumexp|_exp_|aten::exp$"),
    ("FP8 casts", r"scaled_mm(?!.*rms_norm)"),
    ("embeddings and masks", r"embedding|cumsum|sort|index_put|aten::(index|eq|bitwise)"),
    ("activation", r"relu|threshold|gelu|silu"),
    ("rotary with its norm", r"rms_norm.*_(cat|neg)"),
    ("other norms", r"rms_norm|rsqrt"),
    ("other", r""),
]

def say(text: str):
    print(f"bench: {text}", file=sys.stderr, flush=True)

# ---- In the process of a script ------------------------------------------------------------------

class Done(BaseException):
    """Ends a script from within a step, past its `except Exception`."""

class Meter:
    """Notes when steps and micro-batches end. After as many steps as it was told, it reports all so
    far in a line of JSON, and waits for the next order: `run N`, `profile N`, or the end."""

    def __init__(self, reports):
        self.reports = reports
        self.cuda = torch.cuda.is_available()
        self.counts = True  # not while a script warms up
        self.found = dict(tokens=None, step_ms=[], micro_ms=[], losses=[], kernels={})
        self.profiler = None
        self.begin(1)

    def begin(self, steps: int):
        self.left = steps
        if self.cuda:
            torch.cuda.synchronize()
        self.ends = [[self.now()]]  # for each step, of its micro-batches and then its own
        self.micro_losses = []
        self.losses = []

    def now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def after_backward(self, loss: torch.Tensor):
        if self.counts:
            self.ends[-1].append(self.now())
            self.micro_losses.append(loss.detach())

    def end_of_step(self, loss=None):
        """A step ends where gradients are cleared after a backward pass."""
        if not self.counts or not self.micro_losses:
            return
        self.losses.append(torch.stack(self.micro_losses).mean() if loss is None else loss)
        self.micro_losses = []
        self.ends.append([self.now()])
        self.left -= 1
        if self.left:
            return
        self.collect()
        print(json.dumps(self.found), file=self.reports, flush=True)
        order, *steps = sys.stdin.readline().split() or ["end"]
        if order == "end":
            raise Done
        if order == "profile":
            kind = torch.profiler.ProfilerActivity
            self.profiler = torch.profiler.profile(
                activities=[kind.CUDA if self.cuda else kind.CPU])
            self.profiler.start()
        self.begin(int(steps[0]))

    def collect(self):
        def took(begin, end):
            return begin.elapsed_time(end) if self.cuda else 1000 * (end - begin)

        if self.cuda:
            torch.cuda.synchronize()
            self.found["peak memory, tensors"] = torch.cuda.max_memory_allocated()
            self.found["peak memory, reserved"] = torch.cuda.max_memory_reserved()
        else:
            kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self.found["peak memory, process"] = 1024 * kib
        self.found["losses"] += map(float, self.losses)
        for ends, (next_begin, *_) in pairwise(self.ends):
            self.found["step_ms"].append(took(ends[0], next_begin))
            self.found["micro_ms"].append([took(*pair) for pair in pairwise(ends)])
        if self.profiler:
            self.profiler.stop()
            self.found["kernels"] = kernels_of(self.profiler.events(), len(self.losses), self.cuda)

def kernels_of(events, steps: int, cuda: bool) -> dict:
    """{name of a kernel, or on a CPU of an operator: [ms a step, launches a step]}"""
    found = {}
    for event in events:
        on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
        no_kernel = event.is_user_annotation or re.search(r"\bSync$|\bWait\b", event.name)
        if on_gpu == cuda and not no_kernel:
            took = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
            ms, launches = found.get(event.name, (0, 0))
            found[event.name] = ms + took / 1000 / steps, launches + 1 / steps
    return found

def load_script(path):
    spec = importlib.util.spec_from_file_location("script_under_bench", path)
    script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script

def has_train_step(path: Path) -> bool:
    return "\ndef train_step(" in path.read_text(encoding="utf-8")

def run_script(path: str, flags: list[str], meter: Meter):
    """Runs the main of train_gpt.py or of a copy."""
    script = load_script(path)

    def train_step(model, batches, optimizers, step, hp, world, plain=script.train_step):
        loss = plain(model, batches, optimizers, step, hp, world)
        meter.found["tokens"] = hp.micro_batches * hp.train_seq_len
        meter.end_of_step(loss)
        return loss

    def warm_up(*args, plain=script.warm_up):
        meter.counts = False
        plain(*args)
        meter.counts = True
        meter.begin(1)

    script.train_step, script.warm_up = train_step, warm_up
    script.main(flags)

def run_published(path: str, meter: Meter):
    """Runs a published script from its first line on."""
    def zero_grad(self, *args, plain=torch.nn.Module.zero_grad, **options):
        plain(self, *args, **options)
        meter.found["tokens"] = getattr(sys.modules["__main__"], "train_batch_size", None)
        meter.end_of_step()

    torch.nn.Module.zero_grad = zero_grad
    runpy.run_path(path, run_name="__main__")

def contest(path: str, *flags: str):
    """What a script's process does. What the script prints goes to stderr."""
    def backward(self, *args, plain=torch.Tensor.backward, **options):
        plain(self, *args, **options)
        meter.after_backward(self)

    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    meter = Meter(reports)
    torch.Tensor.backward = backward
    sys.argv = [path, *flags]
    status = 1
    try:
        if has_train_step(Path(path)):
            run_script(path, list(flags), meter)
        else:
            run_published(path, meter)
    except Done:
        status = 0
    except Exception as error:
        if type(error).__name__ == "UserError":
            print(json.dumps({"error": str(error)}), file=reports, flush=True)
        else:
            traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)

def machine():
    """Prints what this machine is, and what its GPU can do."""
    found = dict(device=f"CPU, {torch.get_num_threads()} threads", torch=torch.__version__)
    if torch.cuda.is_available():
        found |= dict(device=torch.cuda.get_device_name(), free=torch.cuda.mem_get_info()[0])
        a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        x = torch.zeros(GIB // 4, device="cuda")
        given = dict(a=a, x=x, y=x.clone())
        for name, statement, amount in (("TFLOP/s", "a @ a", 2 * 4096**3),
                                        ("TB/s", "y.copy_(x)", 2 * GIB)):
            timer = Timer(statement, globals=given)
            timer.timeit(10)
            found[name] = amount / timer.timeit(50).mean / 1e12
    print(json.dumps(found))

# ---- The scripts ---------------------------------------------------------------------------------

@dataclass
class Contestant:
    name: str
    command: list[str]  # that starts its process
    folder: Path  # of all that it writes
    process: subprocess.Popen | None = None
    seconds: dict = field(default_factory=dict)  # from its start to step 1, by the cache's state
    report: dict = field(default_factory=dict)  # its last one

    def start(self):
        self.began = time.perf_counter()
        cache = self.folder / "cache"
        environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} | os.environ | dict(
            TORCHINDUCTOR_CACHE_DIR=str(cache), TRITON_CACHE_DIR=str(cache / "triton"),
            TORCHINDUCTOR_BENCHMARK_KERNEL="1",  # so that kernels say how many bytes they touch
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        with open(self.folder / "output.txt", "w") as output:
            self.process = subprocess.Popen(
                self.command, cwd=self.folder, env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output)

    def read(self):
        """Waits for its next report. If there is none, its output says why."""
        line = self.process.stdout.readline()
        self.report = json.loads(line) if line else {"error": "failed, as is shown above"}
        if "error" in self.report:
            self.end()
            if not line:
                output = (self.folder / "output.txt").read_text(errors="replace")
                sys.stderr.write(output[-8000:])
            raise UserError(f"{self.name}: {self.report['error']}")

    def ask(self, order: str, steps: int):
        self.process.stdin.write(f"{order} {steps}\n")
        self.process.stdin.flush()
        self.read()

    def read_first(self, cache: str):
        self.read()
        self.seconds[cache] = time.perf_counter() - self.began
        say(f"{self.name}: {self.seconds[cache]:.1f} s to step 1, with {cache}")

    def end(self):
        """Ends its process, wherever that is."""
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

def published_source(path: Path, steps: int) -> str:
    """The script that a published log begins with, or a published script, as it runs here."""
    source = path.read_text(encoding="utf-8").partition("\n" + "=" * 100 + "\n")[0]
    tuned = os.environ.get("TORCHINDUCTOR_COORDINATE_DESCENT_TUNING") == "1"
    counts = []
    for pattern, new in PUBLISHED:
        source, count = re.subn(pattern, new.format(steps=steps, tuned=tuned), source)
        counts.append(count)
    require(counts[0] == 1 and ".backward()" in source, f"{path}: is neither a copy of "
            "train_gpt.py nor a published script or log that sets num_iterations once")
    return source

def write_documents(path: str, tokens: int, vocab_size: int):
    """Writes a shard of made-up documents. Their lengths are log-normal with a mean of some 700
    tokens, as those of web pages. Tokens follow Zipf's law, since gradients of the same embedding
    wait for each other."""
    chance = np.random.default_rng(tokens)
    drawn = (float(vocab_size - 1) ** chance.random(tokens)).astype("<u2") - 1
    begins = np.cumsum(2 + chance.lognormal(np.log(420), 1.0, 1 + tokens // 100).astype(np.int64))
    drawn[np.concatenate([[0], begins[begins < tokens]])] = vocab_size - 1
    Path(path).write_bytes(shard_header(tokens) + drawn.tobytes())

def settings_of(path: Path, flags: list[str]):
    """The settings that these flags give a copy of train_gpt.py; None for a published script."""
    try:
        if not has_train_step(path):
            return None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); name a script or a log") from None
    script = load_script(path)
    try:
        return script.parse_flags(flags)[0]
    except script.UserError as error:
        raise UserError(f"{path}: {error}") from None

def contestants_of(paths: list[Path], flags: list[str], steps: int,
                   folder: Path) -> tuple[list[Contestant], str]:
    """The contestants, and the glob of the shards that they train on."""
    train, val = (f"{folder}/{side}.bin" for side in ("train", "val"))
    flags = [f"--train_files={train}", f"--val_files={val}", "--seed=1", *flags]
    settings = [settings_of(path, flags) for path in paths]
    ours = [hp for hp in settings if hp]
    vocab_size = min([50257, *(hp.vocab_size for hp in ours)])
    step_tokens = max([8 * 2**16, *(hp.micro_batches * hp.train_seq_len for hp in ours)])
    write_documents(train, (steps + 1) * step_tokens, vocab_size)
    write_documents(val, 1 + max([1, *(hp.val_seq_len for hp in ours)]), vocab_size)
    if ours:
        train = str(ROOT / ours[0].train_files)
    found = []
    for number, (path, hp) in enumerate(zip(paths, settings)):
        place = folder / str(number)
        shards = place / "data" / "fineweb10B"  # where published scripts look for them
        shards.mkdir(parents=True)
        command = [str(path.resolve()), *flags, f"--train_files={train}", "--val_tokens=0",
                   f"--num_iterations={steps}", "--epochs=1000", "--val_loss_every=0",
                   "--save_every=0", f"--records={place}"]
        if hp is None:
            command = [str(place / "published.py")]
            Path(command[0]).write_text(published_source(path, steps), encoding="utf-8")
            for i, shard in enumerate(sorted(glob.glob(train))):
                (shards / f"fineweb_train_{i + 1:06}.bin").symlink_to(shard)
        found.append(Contestant(str(path), [*CHILD, "--contest", *command], place))
    return found, train

# ---- Measuring -----------------------------------------------------------------------------------

def compile_all(contestants: list[Contestant], at_once: int):
    """Starts each once with an empty cache, as many at once as fit."""
    for at in range(0, len(contestants), at_once):
        group = contestants[at:at + at_once]
        others = f", {len(group)} at once" if len(group) > 1 else ""
        for one in group:
            one.start()
        for one in group:
            one.read_first(f"an empty cache{others}")
            one.end()

def measure(contestants: list[Contestant], steps: int, cache: str, resident: bool):
    """In turns of a few steps if the scripts fit into memory together, else one after the other."""
    turns = [min(TURN, steps - at) for at in range(0, steps, TURN)] if resident else [steps]
    for number, count in enumerate(turns):
        for one in contestants:
            if one.process is None:
                one.start()
                one.read_first(cache)
                one.ask("run", SETTLE)
            one.ask("run", count)
            if number == len(turns) - 1:
                one.ask("profile", PROFILED)
                one.end()

def bytes_of_kernels(cache: Path) -> dict[str, float]:
    """GB that Inductor says a kernel touches, of those whose name stands for one kernel."""
    found = {}
    for path in cache.rglob("*.py"):
        for line in path.read_text(errors="replace").splitlines():
            name = re.search(r"'kernel_name': '(\w+)'", line)
            size = re.search(r"'kernel_num_gb': ([\d.e+-]+)", line)
            if name and size:
                found.setdefault(name[1], set()).add(float(size[1]))
    return {name: min(sizes) for name, sizes in found.items() if len(sizes) == 1}

def part_of(kernel: str) -> str:
    return next(part for part, pattern in PARTS if re.search(pattern, kernel, re.I))

def figures_of(one: Contestant, steps: int) -> dict:
    """What was measured of a script. What was not is not there."""
    found = {"name": one.name, "start to step 1": one.seconds} | one.report
    timed = slice(1 + SETTLE, 1 + SETTLE + steps)
    found["step_ms"] = found["step_ms"][timed]
    found["micro_ms"] = sum(found["micro_ms"][timed], [])
    if found["tokens"]:
        found["tokens/s"] = 1000 * found["tokens"] / statistics.median(found["step_ms"])
    parts = Counter()
    for kernel, (ms, _) in found["kernels"].items():
        parts[part_of(kernel)] += ms
    found["parts"] = dict(parts.most_common())
    gigabytes = bytes_of_kernels(one.folder / "cache")
    slowest = sorted(found["kernels"].items(), key=lambda item: -item[1][0])[:10]
    found["kernels"] = []
    for name, (ms, launches) in slowest:
        rate = {"GB/s": gigabytes[name] * launches / ms * 1000} if name in gigabytes else {}
        found["kernels"].append(dict(name=name, ms=ms, launches=launches) | rate)
    return found

def ratio_of(one: dict, other: dict) -> dict:
    """Of times a token, step by step, since equal steps have equal windows."""
    ratios = [a / one["tokens"] / b * other["tokens"]
              for a, b in zip(one["step_ms"], other["step_ms"])]
    return dict(to=other["name"], mean=statistics.mean(ratios), sd=statistics.pstdev(ratios))

# ---- What is printed -----------------------------------------------------------------------------

def cells_of(one: dict) -> dict[str, str]:
    cells = {}
    for name, key in (("a step, ms: median (range)", "step_ms"), ("a micro-batch, ms", "micro_ms")):
        values = one[key]
        cells[name] = f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
    if one["tokens"]:
        cells |= {"tokens a step": f"{one['tokens']:,}", "tokens/s": f"{one['tokens/s']:,.0f}"}
    for cache, seconds in one["start to step 1"].items():
        cells[f"start to step 1, with {cache}"] = f"{seconds:.1f} s"
    for name in filter(re.compile("peak").match, one):
        cells[name] = f"{one[name] / 2**20:,.0f} MiB"
    for step in sorted({1, 2, min(12, len(one["losses"])), len(one["losses"])}):
        cells[f"loss, step {step}"] = f"{one['losses'][step - 1]:.4f}"
    for part, ms in one["parts"].items():
        cells[f"ms a step, {part}"] = f"{ms:.2f}"
    return cells

def about_machine(found: dict) -> list[str]:
    lines = [f"{found['device']}, torch {found['torch']}"]
    if "TFLOP/s" in found:
        lines.append(f"matmuls of 4,096 x 4,096 in bfloat16 at {found['TFLOP/s']:.0f} TFLOP/s, "
                     f"copies at {found['TB/s']:.2f} TB/s read and written")
    for name, rates in ELSEWHERE.items():
        if name in found["device"]:
            shares = [100 * found[unit] / rate for unit, rate in zip(("TFLOP/s", "TB/s"), rates)]
            if min(shares) < 80:
                lines.append(f"SLOW: {shares[0]:.0f} and {shares[1]:.0f} % of what another {name} "
                             "reached: something else runs on this one, or its clocks are low")
    return lines

def text_of(result: dict) -> str:
    all_figures = result["scripts"]
    lines = [*about_machine(result["machine"]), f"tokens: {result['data']}", ""]
    columns = [cells_of(one) for one in all_figures]
    lines.append(" " * 44 + "".join(f"{one['name'][-26:]:>28}" for one in all_figures))
    for name in dict.fromkeys(name for column in columns for name in column):
        lines.append(f"{name:<44}" + "".join(f"{column.get(name, ''):>28}" for column in columns))
    for one in all_figures:
        lines += ["", f"slowest in {one['name']}: ms a step, launches a step"]
        for kernel in one["kernels"]:
            rate = f"{kernel['GB/s']:.0f} GB/s" if "GB/s" in kernel else ""
            lines.append(f"{kernel['ms']:10.3f} {kernel['launches']:8.1f} {rate:>10}  "
                         f"{kernel['name'][:110]}")
    lines.append("")
    for one in all_figures[:-1]:
        if found := one.get("ratio"):
            lines.append(f"{one['name']} takes {found['mean']:.3f} (SD {found['sd']:.3f}) times as "
                         f"long a token as {found['to']}, {result['order']}")
    if "TFLOP/s" in result["machine"]:
        lines.append("These are milliseconds on one GPU. Eight do a step's micro-batches at the "
                     "same time and then exchange gradients and weights, which one cannot show.")
    return "\n".join(lines)

def main(arguments=None):
    os.chdir(ROOT)
    parser = ArgumentParser(description=__doc__, prog="./run.sh bench",
                            usage="%(prog)s [my_record.py ...] [options] [preset] [flags]")
    parser.add_argument("--vs", default="train_gpt.py", metavar="SCRIPT", help="a script or a "
                        "published log (default: train_gpt.py)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps (default: 20)")
    parser.add_argument("--json", action="store_true", help="print an object, not a table")
    options, words = parser.parse_known_args(arguments)
    require(options.steps > 0, f"--steps={options.steps}: takes a number above 0")
    scripts = [word for word in words if re.fullmatch(r"[^-].*\.(py|txt|log)", word)]
    flags = [word if word.startswith("-") else f"--preset={word}" for word in words
             if word not in scripts]
    for flag in flags:
        require(not re.match("--(num_iterations|epochs|resume|check)", flag), f"{flag}: bench runs "
                "a whole schedule in --steps=N steps, from its start; leave it out")
    paths = list(dict.fromkeys(map(Path, [*(scripts or ["train_gpt.py"]), options.vs])))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        steps = 1 + SETTLE + options.steps + PROFILED + 1  # the last one is not made
        contestants, data = contestants_of(paths, flags, steps, Path(folder))
        for one in contestants:
            stack.callback(one.end)
        asked = subprocess.run([*CHILD, "--machine"], stdout=subprocess.PIPE, check=True)
        here = json.loads(asked.stdout)
        cache, resident = "nothing to compile", True
        if "free" in here:
            compile_all(contestants, max(1, here["free"] // PROCESS))
            taken = sum(one.report["peak memory, reserved"] + GIB for one in contestants)
            cache, resident = "a full cache", taken < here["free"]
        measure(contestants, options.steps, cache, resident)
        all_figures = [figures_of(one, options.steps) for one in contestants]
    for one in all_figures[:-1]:
        if one["tokens"] and all_figures[-1]["tokens"]:
            one["ratio"] = ratio_of(one, all_figures[-1])
    order = "step by step in turn" if resident else "one after the other, as memory holds one"
    data = "made up" if data.startswith(folder) else data
    result = dict(machine=here, data=data, order=order, scripts=all_figures)
    print(json.dumps(result, indent=1) if options.json else text_of(result))

if __name__ == "__main__":
    if sys.argv[1:2] == ["--contest"]:
        contest(*sys.argv[2:])
    elif sys.argv[1:2] == ["--machine"]:
        machine()
    else:
        sys.exit(run(main))
