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
LINE = re.compile(r"step (\d+): train loss \S+, val loss (\S+)|iter (\d+): .*time ([\d.]+)ms")


class Point(NamedTuple):
    """A validation."""
    step: int
    seconds: float  # of training before it
    loss: float  # nats per byte


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
    require(validated and len(times) > len(validated), "nanoGPT's output lacks its lines `step N: "
            f"train loss ..., val loss ...` or `iter N: ... time ...`; it ends {output[-300:]!r}")
    median = statistics.median(times[step] for step in times if step not in validated)
    return [Point(int(step), sum(median if done in validated else seconds
                                 for done, seconds in times.items() if done < int(step)),
                  float(loss))
            for step, loss, _, _ in found if step]


def train(folder: Path, environment: dict[str, str], more: list[str]) -> list[Point]:
    """One run; prints its table at the end."""
    done = subprocess.run([sys.executable, *COMMAND.split(), *more], cwd=folder, text=True,
                          env=os.environ | environment, capture_output=True, check=False)
    if done.returncode:
        raise UserError(f"nanoGPT failed: {done.stderr.strip()[-2000:]}")
    points = points_of(done.stdout)
    print(f"{'step':>6} {'val loss':>9} {'train time':>11}  (nanoGPT)")
    for step, seconds, loss in points:
        print(f"{step:6} {loss:9.4f} {seconds:9.2f} s", flush=True)
    return points


def write_csv(path: Path, runs: list[list[Point]], checkout: Path, text: Path):
    """The runs' validations, below lines that say what was trained on what."""
    commit = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], text=True,
                            capture_output=True, check=False).stdout.strip() or "unknown"
    with open(path, "w", newline="", encoding="utf-8") as f:
        print(f"# nanoGPT, commit {commit}: {' '.join(COMMAND.split())}", file=f)
        print(f"# text: {text.name}, {text.stat().st_size} bytes, sha256 {sha256(text)}", file=f)
        rows = csv.writer(f, lineterminator="\n")
        rows.writerow(["run", "step", "seconds", "val_loss"])
        for run, points in enumerate(runs, start=1):
            rows.writerows([run, step, f"{seconds:.3f}", f"{loss:.4f}"]
                           for step, seconds, loss in points)


def draw(path: Path, theirs: list[list[Point]], ours: list[list[Point]], target: float, text: str,
         threads: int):
    """Draws the loss against seconds of training, a curve per run."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    axes.axhline(target, color="black", linewidth=0.8, linestyle=":",
                 label=f"nanoGPT's final loss, {target:g}")
    for runs, color, label in ((theirs, "tab:gray", "nanoGPT's documented run on a CPU"),
                               (ours, "tab:blue", "this repository")):
        reached = []
        for points in runs:
            later = [point for point in points if point.seconds > 0]  # the axis has no 0
            axes.plot([point.seconds for point in later], [point.loss for point in later],
                      color=color, marker="o", markersize=3, label=label)
            label = None  # the legend names each side once
            reached += [point for point in points if point.loss <= target][:1]
        if len(reached) == len(runs):
            middle = sorted(reached, key=lambda point: point.seconds)[len(reached) // 2]
            axes.annotate(f"{statistics.median(point.seconds for point in reached):.1f} s",
                          (middle.seconds, middle.loss), (0, -18), textcoords="offset points",
                          ha="center", color=color, weight="bold", fontsize="large")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(y=0.12)
    axes.set_xlabel("training time in seconds (logarithmic)")
    axes.set_ylabel("validation loss in nats per byte")
    axes.set_title(f"{threads} threads of a CPU train on {text}: time to nanoGPT's final loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=144)
    pyplot.close(figure)
