"""Predict how long a training step takes on eight H100 GPUs, on a machine that has none:

    ./run.sh predict my_record.py [--vs=train_gpt.py] [flags]
    ./run.sh predict my_record.py --gpus=1 --gpu=h200

gpu_step.py notes what a step launches: the kernels that Inductor generates for the script, matrix
products, collectives. Here each launch gets a time. A kernel takes as long as its bytes take at the
memory's rate, or its exponentials on the units that compute them; a matrix product as long as its
multiplications at a rate that cuBLAS reaches. Collectives share a link beside that, and the step
is longer by what it has to wait for them. FlexAttention costs by the blocks that it visits, which
follow from the window and from made-up documents of FineWeb's lengths. So the step grows with the
window, and the mean is over steps from all parts of the run.

The rates come from published measurements, given below; records/techniques/README.md says how well
published scripts are predicted that no rate was fitted to. What cannot be seen: random reads of
large tables, how well a kernel is tiled, registers that spill, processors that NCCL takes from
other kernels, clocks that fall with the temperature, a host that is too slow, and the lengths of
real documents. So trust the ratio of two scripts more than a time.

A script is a copy of train_gpt.py, or one that the speedrun published from December 2024 to July
2025, in one file and with FlexAttention. The script runs, so do not predict one that you do not
trust. Flags go to the copies, whose preset is speedrun. Needs a CPU build of torch 2.13 with
Triton, and about a minute for each script. The last line is
    predicted: 93.4 ms a step on 8 H100

--json prints one object instead: ms (a step's mean), at (rows of done: the part of the run, window
in tokens, ms, parts in ms), parts (their means, in ms), memory (bytes at most), gpus, gpu; and with
--vs: vs (the same of the other script), ratio, uncertainty (of the ratio).
"""

import importlib.metadata
import json
import math
import multiprocessing
import re
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist, fmean

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from data.common import ArgumentParser, UserError, require, run

# ---- What a step launches, as gpu_step.py notes it -----------------------------------------------

@dataclass
class Launch:
    """What the GPU's stream does: a kernel, or `count` kernels of one kind."""
    name: str
    part: str  # of the step
    bytes: float  # read and written
    product: tuple = ()  # (batch, m, n, k) of a matrix product
    fp8: bool = False
    special: float = 0  # uses of the units that compute exponentials, roots and quotients
    attention: str = ""  # forward or backward, of FlexAttention
    heads: tuple = ()  # (number, width), of FlexAttention
    count: int = 1

@dataclass
class Collective:
    """A collective that starts once the stream gets there; each process sends so many bytes."""
    sent: float

@dataclass
class Wait:
    """The stream waits for a collective, by its number in the step."""
    number: int

@dataclass
class Step:
    """The notes of a training step."""
    at: float  # the part of the run that was done before it
    window: int = 0  # in tokens; 0 if it is not known
    blocks: float = 0  # pairs of a query block and a key block that FlexAttention visits
    notes: list = field(default_factory=list)
    collectives: int = 0

@dataclass
class Notes:
    """What gpu_step.py found out about a script."""
    steps: list[Step]
    memory: int  # bytes: what is kept, and the most that a program takes besides

# ---- Rates ---------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Rates:
    """How fast an H100 SXM does what. "Trace": the one of rank 0 that the speedrun published with
    its record of 2025-10-31 (modded-nanogpt-current-gpu-rank-00-chrome-trace.json.gz), with 32,768
    tokens on each GPU. "January": the logs of the records of 2025-01-04, -13, -16 and -26.
    No other time was fitted."""
    bf16: float = 690e12  # FLOP/s; trace: all products of 11 MLPs and 10 attentions, 640 to 790
    fp8: float = 1380e12  # FLOP/s; trace: the head's three products, 1150 to 1540
    memory: float = 2.9e12  # bytes/s; trace: ReLU^2 3.0 and 3.1, norms, rotary, casts 2.7 to 2.9
    special: float = 3.66e12  # uses/s; trace: the softmax of 1.65e9 logits, 7 uses each, in 3.15 ms
    launch: float = 1.5e-6  # s between two kernels; trace: the median
    link: float = 280e9  # bytes/s that a process sends; trace: gathers and scatters, 267 to 291
    latency: float = 15e-6  # s before a collective's first byte; trace: the small ones, 12 to 48
    flex_forward: float = 473e12  # FLOP/s; January: the growth of a step with the window
    flex_backward: float = 368e12  # FLOP/s; the same, at a ratio that was assumed
    unseen: float = 1.041  # factor on the time of all launches; January: the means

# How wrong each may be, as a factor, and by what else two predictions differ by chance. The last is
# the root mean square error of the ratios of the five steps from 2025-02-01 to 2025-05-30 in
# records/techniques/predicted.csv.
DOUBT = dict(bf16=0.05, fp8=0.1, memory=0.05, special=0.3, launch=0.3, link=0.3, latency=0.5,
             flex_forward=0.2, flex_backward=0.2)
RATIO_ERROR = 0.01

@dataclass(frozen=True)
class GPU:
    """Data-sheet values. Another GPU's rates are those of the H100, by the ratio of these; none has
    been measured."""
    capability: int
    bf16: float  # FLOP/s of dense products, summed in float32
    fp8: float  # FLOP/s
    memory: float  # bytes/s
    link: float  # bytes/s to the other GPUs, in one direction
    processors: int

GPUS = {
    "h100": GPU(90, 989e12, 1979e12, 3.35e12, 450e9, 132),
    "h200": GPU(90, 989e12, 1979e12, 4.8e12, 450e9, 132),
    "a100": GPU(80, 312e12, 312e12, 2.04e12, 300e9, 108),
    "4090": GPU(89, 165e12, 330e12, 1.01e12, 32e9, 128),
}
BLOCK = 128  # tokens, of FlexAttention's blocks
TILE = 128  # rows and columns of a matrix product that a processor computes at a time

def rates_of(gpu: GPU, rates: Rates) -> Rates:
    h100 = GPUS["h100"]
    factors = {"bf16": gpu.bf16 / h100.bf16, "fp8": gpu.fp8 / h100.fp8,
               "memory": gpu.memory / h100.memory, "link": gpu.link / h100.link,
               "special": gpu.processors / h100.processors, "flex_forward": gpu.bf16 / h100.bf16,
               "flex_backward": gpu.bf16 / h100.bf16}
    return replace(rates, **{name: getattr(rates, name) * factor
                             for name, factor in factors.items()})

# ---- Times ---------------------------------------------------------------------------------------

def product_seconds(launch: Launch, rates: Rates, processors: int) -> float:
    """A matrix product's tiles fill whole rounds of the processors; a long sum may be split."""
    batch, m, n, k = launch.product
    tiles = batch * math.ceil(m / TILE) * math.ceil(n / TILE)
    splits = [1, *(s for s in range(2, 17) if k / s >= 1024)]
    filled = max(s * tiles / (math.ceil(s * tiles / processors) * processors) for s in splits)
    return 2 * math.prod(launch.product) / (rates.fp8 if launch.fp8 else rates.bf16) / filled

def seconds(launch: Launch, blocks: float, rates: Rates, processors: int) -> float:
    """`blocks`: those that each launch of FlexAttention visits."""
    work = 0.0
    if launch.attention:
        # Two products forward; seven backward, of which two are computed again.
        heads, width = launch.heads
        products, rate = ((2, rates.flex_forward) if launch.attention == "forward"
                          else (7, rates.flex_backward))
        work = products * 2 * BLOCK**2 * width * heads * blocks / rate
        return (work + launch.bytes / rates.memory) * rates.unseen + rates.launch
    if launch.product:
        work = product_seconds(launch, rates, processors)
    work = max(work, launch.bytes / rates.memory, launch.special / rates.special)
    return work * rates.unseen + launch.count * rates.launch

def step_parts(step: Step, rates: Rates, processors: int) -> Counter:
    """Milliseconds of each part of a step, of which "exchange" is what the stream waits."""
    parts = Counter()
    now = link_free = 0.0
    arrivals = []
    layers = sum(getattr(note, "attention", "") == "forward" for note in step.notes)
    for note in step.notes:
        if isinstance(note, Launch):
            time = seconds(note, step.blocks / max(layers, 1), rates, processors)
            parts[note.part] += time
            now += time
        elif isinstance(note, Collective):
            link_free = max(link_free, now) + rates.latency + note.sent / rates.link
            arrivals.append(link_free)
        else:
            time = max(0.0, arrivals[note.number] - now)
            parts["exchange"] += time
            now += time
    return Counter({part: 1000 * time for part, time in parts.items()})

def mean_ms(notes: Notes, rates: Rates, processors: int) -> float:
    return fmean(step_parts(step, rates, processors).total() for step in notes.steps)

def ratio_of(notes: Notes, other: Notes, gpu: GPU) -> tuple[float, float]:
    """The ratio of two scripts' times, and its uncertainty: how far it moves if a rate is wrong."""
    def ratio(rates):
        rates = rates_of(gpu, rates)
        return mean_ms(notes, rates, gpu.processors) / mean_ms(other, rates, gpu.processors)

    best = ratio(Rates())
    moves = [ratio(replace(Rates(), **{name: getattr(Rates(), name) * (1 + doubt)})) - best
             for name, doubt in DOUBT.items()]
    same = best == 1 and not any(moves)
    return best, 0.0 if same else math.hypot(*moves, RATIO_ERROR)

def full_run(notes: Notes, other: Notes, row: dict) -> dict:
    """What a race in miniature and the two predictions say together, as race.py's verdict.json has
    it. `row`: that race's object in verdict.json. A full run saves as large a part of its steps."""
    ratio, doubt = ratio_of(notes, other, GPUS["h100"])
    found = {"ratio": ratio, "uncertainty": doubt, "time": None, "p": None}
    for name, one in (("ms", notes), ("baseline_ms", other)):
        found[name] = mean_ms(one, Rates(), GPUS["h100"].processors)
    if row["steps_later"] is not None and row["steps_later"] > -row["baseline_steps"]:
        steps = 1 + row["steps_later"] / row["baseline_steps"]
        found["time"] = steps * ratio
        if row["steps_error"] is not None:
            error = math.hypot(row["steps_error"] / row["baseline_steps"] / steps, doubt / ratio)
            if error:
                found["p"] = NormalDist().cdf(-abs(math.log(found["time"])) / error)
    return found

def about_full_run(row: dict) -> str:
    """A race's object in verdict.json, with the prediction, in a sentence."""
    found = row["predicted"]
    ratio, doubt = found["ratio"], found["uncertainty"]
    slower = sorted(100 * (x - 1) for x in (ratio - doubt, ratio + doubt))
    text = (f"a step on 8 H100 is predicted {100 * (ratio - 1):.1f} % slower ({slower[0]:+.1f} to "
            f"{slower[1]:+.1f})")
    if found["time"] is None:
        return f"{text}; what the difference in loss is in steps is not known."
    fewer = [-100 * steps / row["baseline_steps"]
             for steps in (row["steps_later"], *(row["steps_interval"] or ()))]
    between = " ({:.1f} to {:.1f})".format(*sorted(fewer[1:])) if fewer[1:] else ""
    change = 100 * (found["time"] - 1)
    p = f", p = {found['p']:.2g}" if found["p"] is not None else ""
    return (f"In miniature {fewer[0]:.1f} % fewer steps{between}; {text}; so a full run may take "
            f"{abs(change):.1f} % {'less' if change < 0 else 'more'}{p}.")

# ---- Scripts -------------------------------------------------------------------------------------

def require_compiler():
    """Refuses where the GPU's program cannot be generated."""
    needs = "predict needs Linux and a CPU build of torch 2.13 with Triton 3.7"
    versions = {}
    for package in ("torch", "triton"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise UserError(f"{needs}, and {package} is not installed: pip install torch==2.13.0 "
                            "triton==3.7.1") from None
    fits = versions["torch"].startswith("2.13.") and versions["triton"].startswith("3.7.")
    require(fits and not re.search(r"\+(cu|rocm)", versions["torch"]), f"{needs}, not torch "
            f"{versions['torch']} with Triton {versions['triton']}: pip install torch==2.13.0+cpu "
            "triton==3.7.1")
    require(sys.platform == "linux", f"{needs}, not {sys.platform}")

def read_notes(path: str, gpus: int, capability: int, flags: list[str]) -> Notes:
    """In a process of its own, for gpu_step.py changes torch beyond repair."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(read_notes_here, path, gpus, capability, flags).result()

def read_notes_here(*arguments) -> Notes:
    from records import gpu_step

    return gpu_step.notes_of(*arguments)

def notes_of(paths: list[str], gpus=8, gpu=GPUS["h100"], flags=()) -> list[Notes]:
    """What each script launches; two at a time."""
    require_compiler()
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot be read ({error})") from None
        require(re.search(r"(?m)^class GPT\b", text), f"{path}: has no class GPT; predict takes a "
                "copy of train_gpt.py, or a script that the speedrun published until July 2025")
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(read_notes, path, gpus, gpu.capability, list(flags)) for path in paths]
        return [job.result() for job in jobs]

def described(notes: Notes, gpu: GPU) -> dict:
    """A script's prediction, as --json has it."""
    rates = rates_of(gpu, Rates())
    rows = []
    for step in notes.steps:
        parts = step_parts(step, rates, gpu.processors)
        rows.append({"done": step.at, "window": step.window, "ms": parts.total(), "parts": parts})
    names = dict.fromkeys(name for row in rows for name in row["parts"])
    parts = {name: fmean(row["parts"][name] for row in rows) for name in names}
    return {"ms": sum(parts.values()), "at": rows, "parts": parts, "memory": notes.memory}

def print_table(found: dict):
    """By part, then over the run."""
    parts = sorted(found["parts"].items(), key=lambda part: -part[1])
    for name, ms in parts:
        print(f"  {name:24}{ms:7.1f} ms {100 * ms / found['ms']:5.0f} %")
    for row in found["at"]:
        window = f", window {row['window']:5d}" if row["window"] else ""
        print(f"  at {100 * row['done']:3.0f} % of the run{window}: {row['ms']:6.1f} ms")
    print(f"  memory: {found['memory'] / 2**30:.1f} GiB at most, without validation")

def parse(arguments):
    """The options, and the flags that are the script's."""
    parser = ArgumentParser(description=__doc__, prog="./run.sh predict",
                            usage="%(prog)s my_record.py [options] [flags]")
    parser.add_argument("script", metavar="my_record.py")
    parser.add_argument("--vs", metavar="SCRIPT", help="another script, to compare with")
    parser.add_argument("--gpus", type=int, default=8, help="how many (default: 8)")
    parser.add_argument("--gpu", choices=GPUS, default="h100", help="which (default: h100)")
    parser.add_argument("--json", action="store_true", help="print an object, for programs")
    options, flags = parser.parse_known_args(arguments)
    require(options.gpus > 0, f"--gpus={options.gpus}: takes a number above 0")
    return options, flags

def main(arguments=None):
    options, flags = parse(arguments)
    gpu = GPUS[options.gpu]
    scripts = [options.script, *([options.vs] if options.vs else [])]
    notes = notes_of(scripts, options.gpus, gpu, flags)
    found = [described(one, gpu) for one in notes]
    result = found[0] | {"gpus": options.gpus, "gpu": options.gpu}
    if options.vs:
        ratio, doubt = ratio_of(*notes, gpu)
        result |= {"vs": found[1], "ratio": ratio, "uncertainty": doubt}
    if options.json:
        print(json.dumps(result, indent=1))
        return
    on = f"{options.gpus} {options.gpu.upper()}"
    print(f"No GPU was used: torch {importlib.metadata.version('torch')} compiled for {on}.")
    if options.gpu != "h100":
        print(f"The rates of {options.gpu} are the H100's by the ratio of the data sheets.")
    for script, one in reversed(list(zip(scripts, found))):
        print(f"{script}: {one['ms']:.1f} ms a step")
        print_table(one)
    if options.vs:
        print(f"ratio: {options.script} takes {ratio:.3f} of the time of {options.vs} "
              f"({ratio - doubt:.3f} to {ratio + doubt:.3f})")
    print(f"predicted: {found[0]['ms']:.1f} ms a step on {on}")

if __name__ == "__main__":
    from records import predict  # under the name by which its classes travel between processes

    sys.exit(run(predict.main))
