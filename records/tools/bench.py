"""Measures training steps of scripts side by side, on the GPU at hand or on a CPU:

    ./run.sh bench [my_record.py ...] [--vs=train_gpt.py] [preset] [flags of train_gpt.py]
    ./run.sh bench --vs=record.txt             # train_gpt.py beside a published log's script

Each script runs as it is, in a process of its own, and trains --steps=20 steps, in turns of five
with the others, so that a machine that changes its speed changes it for all. They are the steps of
a whole run that is shortened to them: the attention window grows through its whole schedule. Two
steps before them are not timed. On a GPU the scripts first compile with empty caches, side by side
where memory holds several; then they start again, and nothing else runs while steps are timed.

A file without a `train_step` is a published script, or a published log, which begins with one and a
line of 100 `=`. It is changed only where PUBLISHED says. Inductor's coordinate descent tuning is
off for all, unless TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1 turns it on for all. Tokens are made
up, the same everywhere, unless --train_files names shards.

  a step, a micro-batch   by events on the GPU, without waiting for it
  start to step 1         of the process, with compiling (train_gpt.py compiles validation as well)
  memory                  the most that tensors took, and that PyTorch reserved
  parts, slowest          of two more steps, by the profiler; parts are told by kernels' names
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
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, pstdev

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
import numpy as np
import torch
from torch.utils.benchmark import Timer

from data.common import ArgumentParser, UserError, require, run, shard_header

UNTIMED = 2  # the first steps
TURN = 5  # steps of one script before the next one's turn
PROFILED = 2
GIB = 2**30
PROCESS = 45 * GIB  # what a script of full size may reserve: 43.5 were seen
CHILD = [sys.executable, "-W", "ignore", str(Path(__file__).resolve())]
# What was measured on a GPU of this name: TFLOP/s of 4,096 x 4,096 in bfloat16, TB/s of copies.
ELSEWHERE = {"H200": {"TFLOP/s": 720, "TB/s": 4.2}}

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
    ("loss and softcap", r"softmax|nll_loss|cross_entropy|sigmoid|logsumexp|_exp2?_|::exp2?_?$"),
    ("FP8 casts", r"scaled_mm"),
    ("embeddings and masks", r"embedding|cumsum|sort|index_put|aten::(index|eq|bitwise)"),
    ("activation", r"relu|threshold|gelu|silu"),
    ("rotary with its norm", r"^triton.*_(cat|flip)_"),
    ("other norms", r"rms_norm|rsqrt|_pow_"),
    ("other", r""),
]

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
        self.ends = [[self.now()]]  # for each step, of the one before and of its micro-batches
        self.micro_losses = []
        self.losses = []

    def now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end_of_micro_batch(self, loss):
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
            activities = torch.profiler.ProfilerActivity
            activity = activities.CUDA if self.cuda else activities.CPU
            self.profiler = torch.profiler.profile(activities=[activity])
            self.profiler.start()
        self.begin(int(steps[0]))

    def collect(self):
        def took(begin, end):
            return begin.elapsed_time(end) if self.cuda else 1000 * (end - begin)

        if self.cuda:
            torch.cuda.synchronize()
            self.found["peak memory, tensors"] = torch.cuda.max_memory_allocated()
            self.found["peak memory, reserved"] = torch.cuda.max_memory_reserved()
        elif not self.profiler:  # which takes much itself
            usage = resource.getrusage(resource.RUSAGE_SELF)
            self.found["peak memory, process"] = 1024 * usage.ru_maxrss
        self.found["time"] = time.time()
        self.found["losses"] += map(float, self.losses)
        for ends, next_ends in pairwise(self.ends):
            self.found["step_ms"].append(took(ends[0], next_ends[0]))
            self.found["micro_ms"].append([took(*pair) for pair in pairwise(ends)])
        if self.profiler:
            self.profiler.stop()
            self.found["kernels"] = kernels_of(self.profiler.events(), len(self.losses), self.cuda)

def kernels_of(events, steps: int, cuda: bool) -> dict:
    """{name of a kernel, or on a CPU of an operator: (ms a step, launches a step)}"""
    found = {}
    for event in events:
        on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
        no_kernel = event.is_user_annotation or re.search(r"\bSync$|\bWait\b", event.name)
        if on_gpu == cuda and not no_kernel:
            took = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
            ms, launches = found.get(event.name, (0, 0))
            found[event.name] = ms + took / 1000 / steps, launches + 1 / steps
    return found

def write_documents(path: str, tokens: int, vocab_size: int):
    """Writes a shard of made-up documents, unless it is there: of 700 tokens on average, as web
    pages have, and by Zipf's law, since gradients of the same embedding wait for each other."""
    if os.path.exists(path):
        return
    chance = np.random.default_rng(tokens)
    drawn = (float(vocab_size - 1) ** chance.random(tokens)).astype("<u2") - 1
    drawn[chance.random(tokens) < 1 / 700] = vocab_size - 1
    drawn[0] = vocab_size - 1
    Path(path).write_bytes(shard_header(tokens) + drawn.tobytes())

def is_published(path: Path) -> bool:
    """Whether it is a published script or log, or else a copy of train_gpt.py."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); name a script or a log") from None
    ours = "\ndef train_step(" in text
    published = re.search(PUBLISHED[0][0], text) and "backward()" in text
    require(ours or published, f"{path}: is neither a copy of train_gpt.py nor a published script "
            "or log, which sets num_iterations; name one of these")
    return not ours

def run_script(path: str, steps: int, flags: list[str], meter: Meter):
    """Runs the main of train_gpt.py or of a copy."""
    sys.path.insert(0, os.path.dirname(path))
    spec = importlib.util.spec_from_file_location("script_under_bench", path)
    script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    here = os.getcwd()
    flags = [f"--train_files={here}/train.bin", f"--val_files={here}/val.bin", "--seed=1", *flags,
             "--val_tokens=0", f"--num_iterations={steps}", "--epochs=1000", "--val_loss_every=0",
             "--save_every=0", f"--records={here}"]
    hp, _ = script.parse_flags(flags)
    step_tokens = hp.micro_batches * hp.train_seq_len
    write_documents("train.bin", (steps + 1) * step_tokens, hp.vocab_size)
    write_documents("val.bin", hp.val_seq_len + 1, hp.vocab_size)
    meter.found["tokens"] = step_tokens

    def train_step(*args, plain=script.train_step, **options):
        loss = plain(*args, **options)
        meter.end_of_step(loss)
        return loss

    def warm_up(*args, plain=script.warm_up, **options):
        meter.counts = False
        plain(*args, **options)
        meter.counts = True
        meter.begin(1)

    script.train_step, script.warm_up = train_step, warm_up
    sys.argv = [path, *flags]
    script.main(flags)

def run_published(path: Path, steps: int, flags: list[str], meter: Meter):
    """Runs a published script, or that of a published log, from its first line on."""
    source = path.read_text(encoding="utf-8").partition("\n" + "=" * 100 + "\n")[0]
    tuned = os.environ.get("TORCHINDUCTOR_COORDINATE_DESCENT_TUNING") == "1"
    for pattern, new in PUBLISHED:
        source = re.sub(pattern, new.format(steps=steps, tuned=tuned), source)
    Path("published.py").write_text(source, encoding="utf-8")
    shards = Path("data", "fineweb10B")  # where such scripts look for them
    shards.mkdir(parents=True, exist_ok=True)
    named = [flag.partition("=")[2] for flag in flags if flag.startswith("--train_files=")]
    files = sorted(glob.glob(named[-1])) if named else []
    for i in range(0 if list(shards.iterdir()) else 100 * len(files)):  # they may be short
        (shards / f"fineweb_train_{i:06}.bin").symlink_to(files[i % len(files)])
    if not files:
        write_documents(f"{shards}/fineweb_train_000000.bin", (steps + 1) * 8 * 48 * 1024, 50257)

    def zero_grad(self, *args, plain=torch.nn.Module.zero_grad, **options):
        plain(self, *args, **options)
        meter.found["tokens"] = getattr(sys.modules["__main__"], "train_batch_size", None)
        meter.end_of_step()

    torch.nn.Module.zero_grad = zero_grad
    sys.argv = ["published.py"]
    runpy.run_path("published.py", run_name="__main__")

def contest(path: str, steps: str, *flags: str):
    """What a script's process does. What the script prints goes to stderr."""
    def backward(tensors, *args, plain=torch.autograd.backward, **options):
        plain(tensors, *args, **options)
        meter.end_of_micro_batch(tensors if isinstance(tensors, torch.Tensor) else tensors[0])

    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    meter = Meter(reports)
    torch.autograd.backward = backward
    status = 1
    try:
        if is_published(Path(path)):
            run_published(Path(path), int(steps), list(flags), meter)
        else:
            run_script(path, int(steps), list(flags), meter)
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

# ---- Measuring -----------------------------------------------------------------------------------

@dataclass
class Contestant:
    name: str
    command: list[str]  # that starts its process
    folder: Path  # of all that it writes
    process: subprocess.Popen | None = None
    seconds: dict = field(default_factory=dict)  # from its start to step 1, by the cache's state
    report: dict = field(default_factory=dict)  # its last one

    def start(self):
        self.began = time.time()
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
        if not line:
            output = (self.folder / "output.txt").read_text(errors="replace")
            sys.stderr.write(output[-8000:])
        require("error" not in self.report, f"{self.name}: {self.report.get('error')}")

    def ask(self, order: str):
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()
        self.read()

    def read_first(self, cache: str):
        self.read()
        self.seconds[cache] = self.report["time"] - self.began
        print(f"{self.name}: {self.seconds[cache]:.1f} s to step 1, with {cache}", file=sys.stderr)

    def end(self):
        """Ends its process, wherever that is."""
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

def compile_all(contestants: list[Contestant], at_once: int):
    """Starts each once with an empty cache, as many at once as fit."""
    for at in range(0, len(contestants), at_once):
        group = contestants[at:at + at_once]
        for one in group:
            one.start()
        for one in group:
            one.read_first(f"an empty cache, {len(group)} at once")
            one.end()

def measure(contestants: list[Contestant], steps: int, cache: str, resident: bool):
    """In turns of a few steps if the scripts fit into memory together, else one after the other."""
    turns = [min(TURN, steps - at) for at in range(0, steps, TURN)] if resident else [steps]
    for number, count in enumerate(turns):
        for one in contestants:
            if number == 0:
                one.start()
                one.read_first(cache)
                one.ask(f"run {UNTIMED - 1}")
            one.ask(f"run {count}")
            if number == len(turns) - 1:
                one.ask(f"profile {PROFILED}")
                one.end()

def bytes_of_kernels(cache: Path) -> dict[str, float]:
    """GB that Inductor says a kernel touches, of those whose name stands for one kernel."""
    found = {}
    for path in cache.rglob("*.py"):
        for name, size in re.findall(r"'kernel_name': '(\w+)'.*'kernel_num_gb': ([\d.e+-]+)",
                                     path.read_text(errors="replace")):
            found.setdefault(name, set()).add(float(size))
    return {name: min(sizes) for name, sizes in found.items() if len(sizes) == 1}

def part_of(kernel: str) -> str:
    return next(part for part, pattern in PARTS if re.search(pattern, kernel, re.I))

def figures_of(one: Contestant, steps: int) -> dict:
    """What was measured of a script. What was not is not there."""
    found = {"name": one.name, "start to step 1": one.seconds} | one.report
    del found["time"]
    timed = slice(UNTIMED, UNTIMED + steps)
    found["step_ms"] = found["step_ms"][timed]
    found["micro_ms"] = sum(found["micro_ms"][timed], [])
    parts = Counter()
    for kernel, (ms, _) in found["kernels"].items():
        parts[part_of(kernel)] += ms
    found["parts"] = dict(parts.most_common())
    gigabytes = bytes_of_kernels(one.folder / "cache")
    slowest = sorted(found.pop("kernels").items(), key=lambda item: -item[1][0])[:10]
    found["slowest"] = [dict(name=name, ms=ms, launches=launches)
                        for name, (ms, launches) in slowest]
    for kernel in found["slowest"]:
        if kernel["name"] in gigabytes:
            touched = gigabytes[kernel["name"]] * kernel["launches"]
            kernel["GB/s"] = 1000 * touched / kernel["ms"]
    return found

def ratios_of(one: dict, other: dict) -> list[float]:
    """Of times a token, step by step, since equal steps have equal windows."""
    if not one["tokens"] or not other["tokens"]:
        return []
    factor = other["tokens"] / one["tokens"]
    return [factor * a / b for a, b in zip(one["step_ms"], other["step_ms"])]

# ---- What is printed -----------------------------------------------------------------------------

def cells_of(one: dict) -> dict[str, str]:
    cells = {}
    for name, key in (("a step, ms: median (range)", "step_ms"), ("a micro-batch, ms", "micro_ms")):
        cells[name] = f"{median(one[key]):.1f} ({min(one[key]):.1f} to {max(one[key]):.1f})"
    if one["tokens"]:
        cells["tokens a step"] = f"{one['tokens']:,}"
        cells["tokens/s"] = f"{1000 * one['tokens'] / median(one['step_ms']):,.0f}"
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
    if "free" in found:
        lines.append(f"matmuls of 4,096 x 4,096 in bfloat16 at {found['TFLOP/s']:.0f} TFLOP/s, "
                     f"copies at {found['TB/s']:.2f} TB/s read and written")
    for name in [name for name in ELSEWHERE if name in found["device"]]:
        low = [f"{found[unit]:.1f} of {rate} {unit}" for unit, rate in ELSEWHERE[name].items()
               if found[unit] < 0.8 * rate]
        if low:
            lines.append(f"SLOW: {' and '.join(low)} that another {name} reached; something else "
                         "runs on this one, or its clocks are low")
    return lines

def text_of(result: dict) -> str:
    scripts = result["scripts"]
    lines = [*about_machine(result["machine"]), f"tokens: {result['data']}", ""]
    columns = [cells_of(one) for one in scripts]
    lines.append(" " * 46 + "".join(f"{one['name'][-26:]:>28}" for one in scripts))
    for name in dict.fromkeys(name for column in columns for name in column):
        lines.append(f"{name:<46}" + "".join(f"{column.get(name, ''):>28}" for column in columns))
    for one in scripts:
        lines += ["", f"slowest in {one['name']}: ms a step, launches a step"]
        for kernel in one["slowest"]:
            rate = f"{kernel['GB/s']:.0f} GB/s" if "GB/s" in kernel else ""
            lines.append(f"{kernel['ms']:10.3f} {kernel['launches']:8.1f} {rate:>10}  "
                         f"{kernel['name'][:110]}")
    lines.append("")
    for one in scripts:
        if ratios := one.get("ratios"):
            lines.append(f"{one['name']} takes {mean(ratios):.3f} times as long a token as "
                         f"{scripts[-1]['name']} (SD {pstdev(ratios):.3f}, {len(ratios)} steps "
                         f"{result['order']})")
    if "free" in result["machine"]:
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
    # Scripts run in other folders than this one.
    flags = [re.sub("^(--(train|val)_files=)(?!/)", rf"\g<1>{ROOT}/", flag) for flag in flags]
    for flag in flags:
        require(not re.match("--(num_iterations|epochs|resume|check)", flag), f"{flag}: bench runs "
                "a whole schedule in --steps=N steps, from its start; leave it out")
    scripts = list(dict.fromkeys([*(scripts or ["train_gpt.py"]), options.vs]))
    for script in scripts:
        is_published(Path(script))  # or neither, which it refuses
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        steps = UNTIMED + options.steps + PROFILED + 1  # the last one is not made
        contestants = []
        for number, script in enumerate(scripts):
            place = Path(folder, str(number))
            place.mkdir()
            command = [*CHILD, "--contest", os.path.abspath(script), str(steps), *flags]
            contestants.append(Contestant(script, command, place))
            stack.callback(contestants[-1].end)
        asked = subprocess.run([*CHILD, "--machine"], stdout=subprocess.PIPE, check=True)
        here = json.loads(asked.stdout)
        cache, resident = "nothing to compile", True
        if "free" in here:
            compile_all(contestants, max(1, here["free"] // PROCESS))
            taken = sum(one.report["peak memory, reserved"] + GIB for one in contestants)
            cache, resident = "a full cache", taken < here["free"]
        measure(contestants, options.steps, cache, resident)
        found = [figures_of(one, options.steps) for one in contestants]
    for one in found[:-1]:
        one["ratios"] = ratios_of(one, found[-1])
    order = "in turn" if resident else "one script after the other, since memory holds one"
    named = [flag.partition("=")[2] for flag in flags if flag.startswith("--train_files=")]
    data = named[-1] if named else "made up"
    result = dict(machine=here, data=data, order=order, scripts=found)
    print(json.dumps(result, indent=1) if options.json else text_of(result))

if __name__ == "__main__":
    if sys.argv[1:2] == ["--contest"]:
        contest(*sys.argv[2:])
    elif sys.argv[1:2] == ["--machine"]:
        machine()
    else:
        sys.exit(run(main))
