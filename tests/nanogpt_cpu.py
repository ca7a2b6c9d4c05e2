"""nanoGPT's documented run on a CPU, as the peer in tests/bench_cpu.py.

The command is that of nanoGPT's README, "I only have a macbook", and the program is the one in the
user's checkout, which stays as it is: train.py and what it reads are copied beside the data. A
token is a byte of the text, as in our runs; for a text in ASCII, this is what nanoGPT's own
prepare.py makes. nanoGPT prints how long each iteration took, and counts a validation into the
iteration that follows. Here such an iteration counts as long as the median of the others, since our
clock stops for validation too.
"""

import csv
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.common import UserError, require, sha256

COMMAND = """train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20
    --log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128
    --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"""
READ_BY_IT = ("train.py", "model.py", "configurator.py", "config/train_shakespeare_char.py")
TOKENS = re.compile(r"tokens per iteration will be: ([\d,]+)")
LINE = re.compile(r"step (\d+): train loss \S+, val loss (\S+)|iter (\d+): .*time ([\d.]+)ms")


class Point(NamedTuple):
    """A validation."""
    step: int
    tokens: int  # trained on before it
    seconds: float  # of training before it
    loss: float  # nats per byte


class Side(NamedTuple):
    """What is trained, and the validations of each of its runs."""
    name: str
    what: str  # in a line
    flags: list[str]
    runs: list[list[Point]]

    def reached(self, target: float) -> list[Point]:
        """Of each run that reached the target, the first validation at or below it."""
        found = [[point for point in points if point.loss <= target] for points in self.runs]
        return [points[0] for points in found if points]

    def medians(self, target: float) -> tuple[float, float]:
        """Tokens and seconds to the target."""
        points = self.reached(target)
        return (statistics.median(point.tokens for point in points),
                statistics.median(point.seconds for point in points))


def side(flags: list[str]) -> Side:
    """nanoGPT, with flags after those of its documented run."""
    values = dict(flag.partition("=")[::2] for flag in [*COMMAND.split(), *flags])
    return Side("nanoGPT", f"{values['--n_layer']} layers of width {values['--n_embd']}, float32; "
                f"attention over {values['--block_size']} bytes, from random places of the "
                "text", flags, [])


TABLE = f"{'step':>6} {'tokens':>10} {'val loss':>9} {'train time':>11}"


def row(point: Point) -> str:
    return f"{point.step:6} {point.tokens:10} {point.loss:9.4f} {point.seconds:9.2f} s"


def make_folder(checkout: Path, text: bytes, folder: Path):
    """Copies the program into a folder and writes the data that it expects there."""
    for name in READ_BY_IT:
        require((checkout / name).is_file(), f"--nanogpt={checkout} has no {name}: name a checkout "
                "of https://github.com/karpathy/nanoGPT")
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(checkout / name, folder / name)
    data = folder / "data" / "shakespeare_char"
    data.mkdir(parents=True)
    occurring, ids = np.unique(np.frombuffer(text, np.uint8), return_inverse=True)
    cut = len(text) * 9 // 10
    ids[:cut].astype(np.uint16).tofile(data / "train.bin")
    ids[cut:].astype(np.uint16).tofile(data / "val.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(occurring)}))


def points_of(output: str) -> list[Point]:
    """The validations in what nanoGPT has printed, with the training time before each."""
    found = [match.groups() for match in map(LINE.match, output.splitlines()) if match]
    validated = {int(step) for step, _, _, _ in found if step}
    times = {int(step): float(ms) / 1000 for _, _, step, ms in found if step}
    tokens = TOKENS.search(output)
    require(tokens and validated and len(times) > len(validated), "nanoGPT's output lacks its "
            "lines `tokens per iteration will be: N`, `step N: train loss ..., val loss ...` or "
            f"`iter N: ... time ...`; it ends {output[-300:]!r}")
    each = int(tokens[1].replace(",", ""))
    median = statistics.median(times[step] for step in times if step not in validated)
    return [Point(int(step), each * int(step),
                  sum(median if done in validated else seconds
                      for done, seconds in times.items() if done < int(step)), float(loss))
            for step, loss, _, _ in found if step]


def train(folder: Path, environment: dict[str, str], more: list[str]) -> list[Point]:
    """One run; prints its table at the end."""
    done = subprocess.run([sys.executable, *COMMAND.split(), *more], cwd=folder, text=True,
                          env=os.environ | environment, capture_output=True, check=False)
    if done.returncode:
        raise UserError(f"nanoGPT failed: {done.stderr.strip()[-2000:]}")
    points = points_of(done.stdout)
    print(f"nanoGPT:\n{TABLE}")
    for point in points:
        print(row(point), flush=True)
    return points


def write_csv(path: Path, theirs: Side, checkout: Path, text: Path):
    """The runs' validations, below lines that say what was trained on what."""
    commit = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], text=True,
                            capture_output=True, check=False).stdout.strip() or "unknown"
    with open(path, "w", newline="", encoding="utf-8") as f:
        print(f"# nanoGPT, commit {commit}: {' '.join([*COMMAND.split(), *theirs.flags])}",
              file=f)
        print(f"# text: {text.name}, {text.stat().st_size} bytes, sha256 {sha256(text)}", file=f)
        rows = csv.writer(f, lineterminator="\n")
        rows.writerow(["run", "step", "tokens", "seconds", "val_loss"])
        for run, points in enumerate(theirs.runs, start=1):
            rows.writerows([run, point.step, point.tokens, f"{point.seconds:.3f}",
                            f"{point.loss:.4f}"] for point in points)


def draw(path: Path, sides: list[Side], target: float, text: str, threads: int):
    """Draws the loss against seconds of training, of nanoGPT first. The run of each side whose time
    to the target is the median is drawn thick, the others thin."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axes = pyplot.subplots(figsize=(9, 5.6), layout="constrained")
    final = max(points[-1].loss for points in sides[0].runs)
    meaning = "the target, which is nanoGPT's final loss" if target == final else "the target"
    axes.axhline(target, color="black", linewidth=0.8, linestyle=":", label=meaning)
    styles = (("dimgray", "-"), ("tab:blue", (0, (5, 1.5))), ("tab:orange", (0, (2, 1))))
    for number, side in enumerate(sides):
        color, dashes = styles[min(number, len(styles) - 1)]
        points_reached = sorted(side.reached(target), key=lambda point: point.seconds)
        middle = points_reached[len(points_reached) // 2] if points_reached else side.runs[0][-1]
        for points in side.runs:
            later = [point for point in points if point.seconds > 0]  # the axis has no 0
            thick = middle in points
            axes.plot([point.seconds for point in later], [point.loss for point in later],
                      color=color, linestyle=dashes, linewidth=2.2 if thick else 0.7,
                      alpha=1 if thick else 0.6, zorder=3 if thick else 2,
                      label=f"{side.name}: {side.what}" if thick else None)
        if len(points_reached) == len(side.runs):
            axes.plot(middle.seconds, middle.loss, "o", color=color, zorder=4)
            axes.annotate(f"{side.medians(target)[1]:.1f} s", (middle.seconds, middle.loss),
                          (0, -20), textcoords="offset points", ha="center", color=color,
                          weight="bold", fontsize="large")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(y=0.12)
    axes.set_xlabel("training time in seconds (logarithmic)")
    axes.set_ylabel("validation loss in nats per byte")
    axes.set_title(f"Training time to a validation loss of {target:.4g}, "
                   f"with {threads} thread(s) of a CPU; text: {text}", fontsize="medium")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize="small", frameon=False)
    figure.savefig(path, dpi=144)
    pyplot.close(figure)
