"""Measures training steps of scripts side by side, on the GPU at hand or on a CPU:

    ./run.sh bench [my_record.py ...] [--vs=train_gpt.py] [preset] [flags of train_gpt.py]
    ./run.sh bench --vs=record.txt             # train_gpt.py beside a published log's script

Each script runs as it is, in a process of its own, and trains --steps=20 steps, in turns of five
with the others, so that a machine that changes its speed changes it for all. They are the steps of
a whole run that is shortened to them, with all its windows. Two steps before are not timed. Where
a GPU's memory does not hold all scripts, they run one after the other. One GPU cannot show what
eight take to exchange gradients and weights.

A published script, or that of a published log, is changed where PUBLISHED says. Tokens are made up
unless --train_files names shards. Two more steps are profiled, for the slowest kernels.
"""

import contextlib
import glob
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
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, pstdev

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from records.tools.load import (ROOT, ArgumentParser, UserError, between, load_script, require,
                                run)

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from data.common import shard_header

UNTIMED = 2  # the first steps, a turn each
TURN = 5  # steps of one script before the next one's turn
PROFILED = 2  # the last steps
CHILD = [sys.executable, "-W", "ignore", str(Path(__file__).resolve())]

PUBLISHED = [  # (pattern, what runs here instead)
    (r"(num_iterations\s*(?::\s*int\s*)?=\s*)\d+", r"\g<1>{steps}"),
    (r"(val_loss_every\s*(?::\s*int\s*)?=\s*)\d+", r"\g<1>0"),
    # Eight sequences a step on one GPU. Their gradients are summed, where eight GPUs average them;
    # the optimizers of record 2025-01-26 take no notice of a factor.
    (r"(train_batch_size = )world_size( \* args\.seq_len)", r"\g<1>8\2"),
    # Off, as in train_gpt.py, unless TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1 turns it on for all
    (r"torch\._inductor\.config\.coordinate_descent_tuning = True", "pass"),
    # A backward pass that is none of a step, and what not every machine has
    (r"torch\.empty\(1, device=\"cuda\", requires_grad=True\)\.backward\(\)", "pass"),
    (r"\[\"nvidia-smi\"\]", "['true']"),
    # The strides that this operator really has. Without them torch 2.11 refuses it.
    (r"(return x_f8\.to\(torch\.bfloat16\), w_f8)(\.to\(torch\.float32\))",
     r"\1.t().contiguous().t()\2")]

# ---- In the process of a script ------------------------------------------------------------------

class Meter:
    """Notes when steps end. After each of `turns`, which are numbers of steps, it reports all so
    far in a line of JSON, and waits for a line. The last turn is profiled."""

    def __init__(self, turns: list[int]):
        self.turns = turns
        self.reports = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what the script prints goes to stderr
        self.cuda = torch.cuda.is_available()
        self.found = dict(step_ms=[], losses=[])
        self.micro_losses = None  # until the script has warmed up

    def begin(self, *_):
        """The first of self.turns."""
        self.profiler = None
        if len(self.turns) == 1:
            kind = ProfilerActivity.CUDA if self.cuda else ProfilerActivity.CPU
            self.profiler = profile(activities=[kind])
            self.profiler.start()
        self.ends = [self.now()]
        self.losses = []
        self.micro_losses = []

    def now(self):
        if not self.cuda:
            return time.perf_counter()
        return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))

    def end_of_micro_batch(self, _, loss, *rest):
        if self.micro_losses is not None:
            self.micro_losses.append(loss.detach())

    def end_of_step(self, loss, *_):
        """A step ends where gradients are cleared after a backward pass."""
        if not self.micro_losses:
            return
        self.losses.append(torch.stack(self.micro_losses).mean() if loss is None else loss)
        self.micro_losses = []
        self.ends.append(self.now())
        if len(self.losses) == self.turns[0]:
            self.collect()
            print(json.dumps(self.found), file=self.reports, flush=True)
            if not sys.stdin.readline():
                os._exit(0)
            self.turns.pop(0)
            self.begin()

    def collect(self):
        def took(begin, end):
            return begin.elapsed_time(end) if self.cuda else 1000 * (end - begin)

        threads = f"CPU, {torch.get_num_threads()} threads"
        self.found["device"] = torch.cuda.get_device_name() if self.cuda else threads
        self.found["torch"] = torch.__version__
        if self.cuda:
            torch.cuda.synchronize()
            self.found["peak_memory"] = torch.cuda.max_memory_allocated()
        elif not self.profiler:  # which takes much itself
            self.found["peak_memory"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.found.setdefault("tokens", getattr(sys.modules["__main__"], "train_batch_size", None))
        self.found["losses"] += map(float, self.losses)
        self.found["step_ms"] += [took(*ends) for ends in pairwise(self.ends)]
        if self.profiler:
            self.profiler.stop()
            self.found["slowest"] = slowest_of(self.profiler.events(), len(self.losses), self.cuda)

def slowest_of(events, steps: int, cuda: bool) -> list[tuple[str, float, float]]:
    """(name, ms a step, launches a step) of the ten slowest kernels, or operators on a CPU."""
    found = {}
    for event in events:
        on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
        wait = event.is_user_annotation or re.search(r"\bSync$|\bWait\b", event.name)
        if on_gpu == cuda and not wait:
            took = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
            _, ms, launches = found.get(event.name, ("", 0, 0))
            found[event.name] = event.name, ms + took / 1000 / steps, launches + 1 / steps
    return sorted(found.values(), key=lambda kernel: -kernel[1])[:10]

def write_documents(path, tokens: int, vocab_size: int):
    """Writes made-up documents: of 700 tokens on average, as web pages have, and by Zipf's law,
    since gradients of the same embedding wait for each other."""
    chance = np.random.default_rng(tokens)
    drawn = (float(vocab_size - 1) ** chance.random(tokens)).astype("<u2") - 1
    drawn[chance.random(tokens) < 1 / 700] = vocab_size - 1
    drawn[0] = vocab_size - 1
    Path(path).write_bytes(shard_header(tokens) + drawn.tobytes())

def is_published(path: Path) -> bool:
    """Whether it is a published script or log, or else a copy of train_gpt.py."""
    require(path.is_file() and os.access(path, os.R_OK), f"{path}: cannot be read; name a script "
            "or a log")
    text = path.read_text(errors="replace")
    ours = "\ndef train_step(" in text
    published = re.search(PUBLISHED[0][0], text) and "backward()" in text
    require(ours or published, f"{path}: is neither a copy of train_gpt.py nor a published script "
            "or log, which sets num_iterations; name one of these")
    return not ours

def followed(function, then):
    """The function, and after it `then`, which gets its result and its arguments."""
    def both(*args, **options):
        result = function(*args, **options)
        then(result, *args)
        return result
    return both

def run_script(path: Path, steps: int, flags: list[str], meter: Meter):
    """Runs the main of train_gpt.py or of a copy."""
    sys.path.insert(0, str(path.parent))
    script = load_script(path)
    here = os.getcwd()
    flags = [f"--train_files={here}/train.bin", f"--val_files={here}/val.bin", "--seed=1", *flags,
             "--val_tokens=0", f"--num_iterations={steps}", "--epochs=1000", "--val_loss_every=0",
             "--save_every=0", f"--records={here}"]
    hp, _ = script.parse_flags(flags)
    meter.found["tokens"] = script.tokens_seen(steps, hp) // steps
    write_documents("train.bin", (steps + 1) * meter.found["tokens"], hp.vocab_size)
    write_documents("val.bin", hp.val_seq_len + 1, hp.vocab_size)

    script.train_step = followed(script.train_step, meter.end_of_step)
    script.warm_up = followed(script.warm_up, meter.begin)
    sys.argv = [str(path), *flags]
    script.main(flags)

def run_published(path: Path, steps: int, flags: list[str], meter: Meter):
    """Runs a published script, or that of a published log, from its first line on."""
    source = path.read_text(encoding="utf-8").partition("\n" + "=" * 100 + "\n")[0]
    for pattern, new in PUBLISHED:
        source = re.sub(pattern, new.format(steps=steps), source)
    Path("published.py").write_text(source, encoding="utf-8")
    shards = Path("data", "fineweb10B")  # where such scripts look for them
    files = [file for flag in flags if flag.startswith("--train_files=")
             for file in sorted(glob.glob(flag.partition("=")[2]))]
    if not shards.exists():
        shards.mkdir(parents=True)
        for number, file in enumerate(100 * files):  # they may be short
            (shards / f"fineweb_train_{number:06}.bin").symlink_to(file)
        if not files:
            write_documents(shards / "fineweb_train_0.bin", (steps + 1) * 8 * 48 * 1024, 50257)

    torch.nn.Module.zero_grad = followed(torch.nn.Module.zero_grad, meter.end_of_step)
    sys.argv = ["published.py"]
    meter.begin()
    runpy.run_path("published.py", run_name="__main__")

def contest(path: str, turns: str, *flags: str):
    """What a script's process does."""
    meter = Meter(json.loads(turns))
    steps = sum(meter.turns) + 1  # the last one is not made
    torch.autograd.backward = followed(torch.autograd.backward, meter.end_of_micro_batch)
    try:
        start = run_published if is_published(Path(path)) else run_script
        start(Path(path), steps, list(flags), meter)
    except Exception as error:
        said = str(error) if type(error).__name__ == "UserError" else traceback.format_exc()
        print(json.dumps({"error": said}), file=meter.reports, flush=True)
    os._exit(1)

# ---- Measuring -----------------------------------------------------------------------------------

@dataclass
class Contestant:
    name: str
    command: list[str]  # that starts its process
    folder: Path  # of all that it writes

    def start(self):
        environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} | os.environ | dict(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        with open(self.folder / "output.txt", "w") as output:
            self.process = subprocess.Popen(
                self.command, cwd=self.folder, env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output)

    def read(self):
        """Waits for its next report. If there is none, its output says why."""
        line = self.process.stdout.readline()
        if not line:
            sys.stderr.write((self.folder / "output.txt").read_text(errors="replace")[-8000:])
        self.report = json.loads(line or '{"error": "ended, as is shown above"}')
        require("error" not in self.report, f"{self.name}: {self.report.get('error')}")

def measure(group: list[Contestant], turns: int):
    """Starts the scripts, each when the one before has compiled. Then they train in turns."""
    with contextlib.ExitStack() as stack:
        for one in group:
            began = time.monotonic()
            one.start()
            stack.enter_context(one.process)
            stack.callback(one.process.kill)
            one.read()
            print(f"{one.name}: compiled and did its first steps in "
                  f"{time.monotonic() - began:.1f} s", file=sys.stderr)
        for one in (turns - 1) * group:
            print(file=one.process.stdin, flush=True)
            one.read()

def figures_of(one: Contestant, steps: int) -> dict:
    """What was measured of a script in the timed steps."""
    timed = slice(UNTIMED, UNTIMED + steps)
    return one.report | dict(name=one.name, step_ms=one.report["step_ms"][timed])

def cells_of(one: dict) -> dict[str, str]:
    ms = one["step_ms"]
    cells = {"a step, ms: median (range)": f"{median(ms):.1f} ({min(ms):.1f} to {max(ms):.1f})"}
    if one["tokens"]:
        cells["tokens a step"] = f"{one['tokens']:,}"
        cells["tokens/s"] = f"{1000 * one['tokens'] / median(one['step_ms']):,.0f}"
    cells["peak memory"] = f"{one['peak_memory'] / 2**20:,.0f} MiB"
    for step in sorted({1, 2, min(12, len(one["losses"])), len(one["losses"])}):
        cells[f"loss, step {step}"] = f"{one['losses'][step - 1]:.4f}"
    return cells

def text_of(result: dict) -> str:
    scripts = result["scripts"]
    lines = ["{device}, torch {torch}".format(**scripts[0]), f"tokens: {result['data']}", ""]
    columns = [cells_of(one) for one in scripts]
    lines.append(" " * 30 + "".join(f"{one['name'][-23:]:>25}" for one in scripts))
    for name in dict.fromkeys(name for column in columns for name in column):
        lines.append(f"{name:<30}" + "".join(f"{column.get(name, ''):>25}" for column in columns))
    for one in scripts:
        lines += ["", f"slowest in {one['name']}: ms a step, launches a step"]
        for name, ms, launches in one["slowest"]:
            lines.append(f"{ms:10.3f} {launches:8.1f}  {name[:60]}")
    lines.append("")
    for one in scripts:
        if ratios := one.get("ratios"):
            lines.append(f"{one['name']} takes {mean(ratios):.3f} times as long a token as "
                         f"{scripts[-1]['name']} (SD {pstdev(ratios):.3f}, {len(ratios)} steps "
                         f"{result['order']})")
    return "\n".join(lines)

def main(arguments=None):
    os.chdir(ROOT)
    parser = ArgumentParser(description=__doc__, prog="./run.sh bench")
    parser.add_argument("--vs", default="train_gpt.py", help="a script or a published log")
    parser.add_argument("--steps", type=between(1), default=20, help="timed steps")
    parser.add_argument("--json", action="store_true", help="print an object, not a table")
    options, words = parser.parse_known_args(arguments)
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
    turns = [min(TURN, options.steps - at) for at in range(0, options.steps, TURN)]
    turns = [*[1] * UNTIMED, *turns, PROFILED]
    contestants = []
    with tempfile.TemporaryDirectory() as folder:
        for script in scripts:
            command = [*CHILD, "--contest", os.path.abspath(script), json.dumps(turns), *flags]
            contestants.append(Contestant(script, command, Path(tempfile.mkdtemp(dir=folder))))
        order = "in turn"
        try:
            measure(contestants, len(turns))
        except UserError as error:  # memory, or the exclusive mode of many clusters
            if not torch.cuda.is_available():
                raise
            order = "one script after the other, since together they fail"
            print(f"{order}: {error}", file=sys.stderr)
            for one in contestants:
                measure([one], len(turns))
        found = [figures_of(one, options.steps) for one in contestants]
    other = found[-1]
    for one in found[:-1]:
        if one["tokens"] and other["tokens"]:  # times a token, of steps with equal windows
            factor = other["tokens"] / one["tokens"]
            one["ratios"] = [factor * a / b for a, b in zip(one["step_ms"], other["step_ms"])]
    data = [flag.partition("=")[2] for flag in flags if flag.startswith("--train_files=")]
    result = dict(data=" ".join(data) or "made up", order=order, scripts=found)
    print(json.dumps(result, indent=1) if options.json else text_of(result))

if __name__ == "__main__":
    if sys.argv[1:2] == ["--contest"]:
        contest(*sys.argv[2:])
    else:
        sys.exit(run(main))
