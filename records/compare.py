#!/usr/bin/env python3
"""Read the logs of NanoGPT speedruns and say what was changed, whether it is faster, whether it is better, how surely.

    python records/compare.py records/*.log                        one setting: every run, mean, spread, p-value
    python records/compare.py NEW.log NEW2.log --vs records/base   two settings: what differs, loss, time, verdict
    python records/compare.py new/ --vs base/ --plot new.png       the same, drawn
    python records/compare.py --update-readme                      the table of this repository's records

A log is a file of this project (hyperparameters, environment, source, steps) or any published log of the speedrun since
May 2024; a folder stands for every .log and .txt below it. The runs named first are A, those after --vs are B, the
baseline: "B -> A" and A - B throughout. Only finished runs with a finite loss enter the statistics; the others are
listed and counted. Exit status: 0 all read, 1 some input was no log (the rest is still reported), 2 wrong usage.
"""

import argparse
import difflib
import glob
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from scipy import stats

TARGET, GPT2_VOCABS = 3.28, ("50257", "50304")  # the target is a loss over the GPT-2 vocabulary, and means nothing else
ALPHA = 0.01                                    # the speedrun's level of significance
WIDTH = 100
RECORDS = Path(__file__).resolve().parent
MARKERS = "<!-- table: compare.py --update-readme -->", "<!-- end of table -->"


class BadInput(Exception):
    """What a user can cause: the message is one line."""


# ----------------------------------------------------------------------------------------------------------------------
# Reading

LINE = "=" * 100
SEPARATOR = re.compile(LINE + r"(?<=\n={100})[ \t\r]*(?:\n|\Z)")  # patterns that begin with literal text search fast
STEP = re.compile(r"^step:(\d+)/(\d+) (?:(train|val)_loss:(\S+) )?(?:val_\w+:\S+ )*train_time:([\d.]+)(ms|s) "
                  r"step_avg:(nan|[\d.]+)ms((?: \S+:\S+)*)[ \t\r]*$", re.M)
LLMC = re.compile(r"^s:(\d+) (tel|trl):(\S+)(?: lr:\S+ norm:\S+)?[ \t\r]*$", re.M)  # 2024-05: no total, no clock
LOG_LINE = re.compile(r"^s(?:tep:\d+/\d+ .*train_time:|:\d+ t[er]l:)", re.M)
RESUMED = re.compile(r"\nresumed\b.*")
LISTING = re.compile(r"^(?:import |from \S+ import |\"\"\"|'''|#!|def |class |with open\()", re.M)  # begins a source
CODE = re.compile(r"^(?:    .*|(?:import|from|def|class|if|for|with|return) .*|[\"']{3})$", re.M)
HYPERPARAMETER = re.compile(r"^(\w+) = (.*?)\s*$", re.M)
KEY_VALUE = re.compile(r"^([A-Za-z][\w ./%-]{0,40}): +(\S.*?)\s*$", re.M)
GPU_ROW = re.compile(r"^\|\s+\d+\s+((?:NVIDIA|Tesla|GeForce|AMD).*?)\s+(?:On|Off)\s+\|", re.M)
FOREIGN_ENVIRONMENT = {"python": re.compile(r"^Running Python (\S+)", re.M | re.I),
                       "torch": re.compile(r"^Running PyTorch (\S+)", re.M | re.I),
                       "cuda": re.compile(r"^Running PyTorch .*CUDA (\S+)", re.M | re.I),
                       "triton": re.compile(r"^Running Triton version (\S+)", re.M | re.I),
                       "driver": re.compile(r"Driver Version: (\S+)")}


@dataclass
class Run:
    """One run. A validation is (step, seconds or None, tokens or None, loss)."""
    name: str
    path: str
    steps: int = 0                  # the last one logged
    total: int | None = None        # the steps it set out to do, where the log says so
    seconds: float | None = None
    tokens: int | None = None
    untimed: int = 0                # steps at the start that the clock left out
    diverged: bool = False          # the last loss in the log is not finite
    validations: list = field(default_factory=list)
    hyperparameters: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)
    end: dict = field(default_factory=dict)  # what the log says after the last step: peak memory, throughput
    source: str = ""

    @property
    def finished(self):
        return bool(self.validations) and (self.total is None or self.validations[-1][0] >= self.total)

    @property
    def loss(self):
        return self.validations[-1][3] if self.validations else None

    @property
    def counts(self):
        """Whether the run enters the statistics."""
        return self.finished and not self.diverged

    @property
    def ms_per_step(self):
        timed = self.steps - self.untimed
        return 1000 * self.seconds / timed if self.seconds and timed > 0 else None

    @property
    def hardware(self):
        env = self.environment
        found = next((env[key] for key in ("gpus", "cpu", "device") if env.get(key, "none") not in ("none", "0")), None)
        return found and re.sub(r"^(\d+) ?x ", r"\1x ", found.replace("NVIDIA ", ""))

    @property
    def place(self):
        """What must agree before times compare; a GPU's power limit and highest clocks where the log has them."""
        return (self.hardware, self.ranks, *(f"{key}: {value}" for key, value in sorted(self.environment.items())
                                             if key in ("nodes", "threads") or key.startswith("gpu ")))

    @property
    def validated_on(self):
        """What must agree before losses compare: vocabulary and validation tokens, by content and not by path."""
        data = re.findall(r"val\S* (\d+ tokens(?: sha\w* \w+)?)", self.environment.get("data", ""))
        return tuple(sorted(data)), self.hyperparameters.get("val_tokens"), self.hyperparameters.get("vocab_size")

    @property
    def ranks(self):
        return self.environment.get("ranks") or self.environment.get("world size")

    @property
    def seed(self):
        return self.environment.get("seed") or self.hyperparameters.get("seed")

    def reached(self, target):
        """(step, seconds or None) where the validation loss first meets the target, on the straight line from the
        validation before; None if it never does."""
        before = None
        for step, seconds, _, loss in self.validations:
            if loss <= target:
                if before is None or loss == before[2]:
                    return float(step), seconds
                part = (before[2] - target) / (before[2] - loss)
                return (before[0] + part * (step - before[0]),
                        None if seconds is None else before[1] + part * (seconds - before[1]))
            before = (step, seconds, loss) if math.isfinite(loss) else None
        return None


def key_values(text):
    """`key: value` lines; the values of a key that comes several times, joined."""
    found = {}
    for key, value in KEY_VALUE.findall(text):
        found[key.lower()] = f"{found[key.lower()]}; {value}" if key.lower() in found else value
    return found


def own_environment(text):
    """The environment section of this project's log; of its table of GPUs, what does not change from minute to minute."""
    found = key_values(text)
    if "," in (rows := found.pop("gpu", "")):
        for column, *values in zip(*(row.split(", ") for row in rows.split("; "))):
            if not column.startswith(("index", "name", "clocks.current", "temperature")):
                found[f"gpu {column}"] = ", ".join(sorted(set(values)))
    return found


def foreign_environment(text):
    found = {key: pattern.search(text) for key, pattern in FOREIGN_ENVIRONMENT.items()}
    found = {key: match[1].rstrip("|") for key, match in found.items() if match}
    gpus = GPU_ROW.findall(text)
    return found | {"gpus": ", ".join(f"{n}x {name}" for name, n in Counter(gpus).items())} if gpus else found


def foreign_hyperparameters(source):
    body = re.search(r"^class Hyperparameters.*?:\n((?:[ \t]+.*\n|[ \t\r]*\n)*)", source, re.M)
    return dict(re.findall(r"^[ \t]+(\w+)[ \t]*(?::[^=\n]+)?=[ \t]*(.*?)[ \t]*(?:#.*)?$", body[1], re.M)) if body else {}


def sections(text):
    """Yield (hyperparameters, environment, source, steps) for each stretch of step lines in the text of a file."""
    blocks = SEPARATOR.split("\n" + text)
    blocks[0] = blocks[0][1:]
    if len(blocks) >= 4 and HYPERPARAMETER.search(blocks[0]) and not LISTING.search(blocks[0]):
        # This project's log. The source may hold anything, separators included, so the steps follow the last of them.
        source = (LINE + "\n").join(blocks[2:-1])
        yield dict(HYPERPARAMETER.findall(blocks[0])), own_environment(blocks[1]), source.rstrip("\n"), blocks[-1]
        return
    source, environment, known = "", "", {}
    while blocks:
        block = blocks.pop(0)
        starts, first = LISTING.search(block), LOG_LINE.search(block)
        if starts and (not first or starts.start() < first.start()):  # a source, and the log lines in it are quotations
            while block.count('"""') % 2 and (closing := next((i for i, b in enumerate(blocks, 1) if '"""' in b), 0)) and (
                    not any(map(foreign_environment, blocks[:closing]))):  # the separators before it stand in a string
                block, blocks = f"{LINE}\n".join([block, *blocks[:closing]]), blocks[closing:]
            # where no separator ends it, what follows its last line of code can still be the log
            end = len(block) if blocks else max((m.end() for m in CODE.finditer(block)), default=0)
            source, environment, known, block, starts = block[:end].rstrip("\n"), "", {}, block[end:], None
        head = block[:starts.start()] if starts and blocks else block
        if first := LOG_LINE.search(head):
            known = foreign_environment(environment + head[:first.start()]) or known
            yield foreign_hyperparameters(source), known, source, head
            environment = ""
        else:
            environment += head
        if starts and blocks:                               # the run is over and the source of a further one begins
            source, environment, known = block[starts.start():].rstrip("\n"), "", {}


def split_runs(text):
    """The step lines of a text, a list a run: (step, total, "train" or "val", loss, time, unit, step_avg, extras)."""
    runs = []
    for i, piece in enumerate(RESUMED.split(text)):
        resumed = i > 0
        lines = STEP.findall(piece) or [(step, "", {"tel": "val", "trl": "train"}[kind], loss, "", "", "nan", "")
                                        for step, kind, loss in LLMC.findall(piece)]
        for line in lines:
            step, validates = int(line[0]), line[2] == "val"
            if not runs or not resumed and (step < last or validates and step == validated):
                runs.append([])
                validated = None
            elif resumed and step <= last:  # the steps after the checkpoint are done again
                runs[-1] = [old for old in runs[-1] if int(old[0]) < step]
            runs[-1].append(line)
            last, resumed = step, False
            if validates:
                validated = step
    return runs


def seconds_of(line):
    return float(line[4]) / (1000 if line[5] == "ms" else 1) if line[4] else None


def tokens_of(line):
    found = re.search(r" tokens:(\d+)", line[7])
    return int(found[1]) if found else None


def loss_of(line):
    try:
        return float(line[3])
    except ValueError:
        return math.nan


def untimed_steps(lines):
    """10 or 0: until 2025-01 the first ten steps were free, the clock restarts at step 11 and step_avg excludes them."""
    for line in lines:
        if int(line[0]) > 11 and line[6] != "nan" and float(line[6]) > 0:
            return 10 if abs(int(line[0]) - 1000 * seconds_of(line) / float(line[6]) - 10) < 2 else 0
    return 0


def runs_in(path, name):
    """The runs a file holds, in order."""
    try:
        data = Path(path).read_bytes()
    except OSError as e:
        raise BadInput(f"{path}: cannot be read ({e.strerror})") from None
    if b"\0" in data[:4096]:
        raise BadInput(f"{path}: no log (not a text file)")
    runs = []
    for hyperparameters, environment, source, text in sections(data.decode("utf-8", "replace")):
        for lines in split_runs(text):
            untimed = untimed_steps(lines)
            runs.append(Run(
                name, str(path), int(lines[-1][0]), int(lines[-1][1] or 0) or None, seconds_of(lines[-1]),
                tokens_of(lines[-1]), untimed, bool(lines[-1][2]) and not math.isfinite(loss_of(lines[-1])),
                [(int(line[0]), 0.0 if untimed and int(line[0]) <= untimed else seconds_of(line), tokens_of(line),
                  loss_of(line)) for line in lines if line[2] == "val"],
                hyperparameters, environment, source=source))
        if runs:
            last = max(text.rfind("\nstep:"), text.rfind("\ns:"))
            runs[-1].end = key_values(text[text.find("\n", last + 1):].partition("\nsample:")[0])
    if not runs:
        raise BadInput(f"{path}: no log (no line of a step in it)")
    if len(runs) > 1:
        for i, run in enumerate(runs):
            run.name = f"{name}#{i + 1}"
    return runs


def files_of(argument):
    """The files an argument stands for: itself, the logs below a folder, or what a pattern matches."""
    if os.path.isdir(argument):
        found = sorted(p for suffix in ("log", "txt") for p in Path(argument).rglob(f"*.{suffix}") if p.is_file())
        if not found:
            raise BadInput(f"{argument}: no .log or .txt file in this folder")
        return found
    if not os.path.exists(argument) and glob.has_magic(argument):
        found = sorted(p for p in glob.glob(argument, recursive=True) if os.path.isfile(p))
        if not found:
            raise BadInput(f"{argument}: no file matches")
        return found
    return [argument]


def read(arguments, complain):
    """The runs of one side, each file once; complain(line) is called for what cannot be read."""
    paths = {}
    for argument in arguments:
        try:
            paths |= {os.path.realpath(p): str(p) for p in files_of(argument)}
        except BadInput as e:
            complain(str(e))
    folder = os.path.commonpath([os.path.dirname(p) for p in paths]) if paths else ""
    runs = []
    for real, path in paths.items():
        try:
            runs += runs_in(path, os.path.splitext(os.path.relpath(real, folder))[0])
        except BadInput as e:
            complain(str(e))
    return runs


# ----------------------------------------------------------------------------------------------------------------------
# Statistics

def differ(values):
    """Whether there is a spread at all, beyond the rounding of an interpolation."""
    return len(values) > 1 and np.ptp(values) > 1e-9


def spread(values):
    """n, mean, SD and the 95 % interval of the mean (Student's t)."""
    n = len(values)
    mean = float(np.mean(values)) if n else None
    if n < 2:
        return dict(n=n, mean=mean, sd=None, interval=None)
    sd = float(np.std(values, ddof=1)) if differ(values) else 0.0
    half = float(stats.t.ppf(0.975, n - 1)) * sd / math.sqrt(n)
    return dict(n=n, mean=mean, sd=sd, interval=(mean - half, mean + half))


def p_below(values, target):
    """One-sided t-test against the hypothesis that the mean is at or above the target; None where there is no spread."""
    return float(stats.ttest_1samp(values, target, alternative="less").pvalue) if differ(values) else None


def runs_needed(margin, sd, most=100_000):
    """The least number of runs that gives p < 0.01 at this margin below the target and this SD; None if there is none."""
    if margin <= 0 or not sd:
        return None
    n = np.arange(2, most + 1)
    enough = stats.t.sf(margin * np.sqrt(n) / sd, n - 1) < ALPHA
    return int(n[np.argmax(enough)]) if enough.any() else None


def welch(a, b):
    """Difference of the means of a and b, Welch's 95 % interval and two-sided p; None where they cannot be had."""
    difference = float(np.mean(a) - np.mean(b)) if len(a) and len(b) else None
    if min(len(a), len(b)) < 2 or not (differ(a) or differ(b)):
        return dict(difference=difference, interval=None, p=None)
    of_a, of_b = np.var(a, ddof=1) / len(a), np.var(b, ddof=1) / len(b)
    freedom = (of_a + of_b)**2 / (of_a**2 / (len(a) - 1) + of_b**2 / (len(b) - 1))
    error = math.sqrt(of_a + of_b)
    half = float(stats.t.ppf(0.975, freedom)) * error
    return dict(difference=difference, interval=(difference - half, difference + half),
                p=float(2 * stats.t.sf(abs(difference) / error, freedom)))


AXES = {"step": 0, "training time": 1, "tokens": 2}


def curve(run, axis):
    """The validations as (positions, losses) over an axis; None where the log does not give that axis."""
    points = [(v[AXES[axis]], v[3]) for v in run.validations if math.isfinite(v[3])]
    return np.array(points).T if points and all(x is not None for x, _ in points) else None


def at_equal(a, b, axis, rows=5):
    """Rows {x, n of each side, A and B mean loss, difference, interval, p} over the range that every run covers, on the
    straight lines between validations."""
    a, b = ([c for run in side if (c := curve(run, axis)) is not None] for side in (a, b))
    if not a or not b:
        return []
    end = min(c[0][-1] for c in a + b)
    xs = [x for x in a[0][0] if 0 < x <= end]               # where A validated, so that A is not interpolated
    if axis == "training time" or not xs:
        xs = list(np.linspace(0, end, rows + 1)[1:])
    out = []
    for x in [xs[i] for i in sorted({round((i + 1) * len(xs) / rows) - 1 for i in range(rows)} - {-1})]:
        of_a, of_b = ([float(np.interp(x, *c)) for c in side if c[0][0] <= x] for side in (a, b))
        if of_a and of_b:
            out.append(dict(x=float(x), n=[len(of_a), len(of_b)], a=float(np.mean(of_a)), b=float(np.mean(of_b)),
                            **welch(of_a, of_b)))
    return out


# ----------------------------------------------------------------------------------------------------------------------
# One side, two sides

RUN_ITSELF = {"seed", "name", "records", "command"}  # differ from run to run and are no setting


def values_of(runs, kind):
    """key -> the sorted set of its values over the runs, for the hyperparameters or the environment."""
    keys = {key: None for run in runs for key in getattr(run, kind)}
    return {key: sorted({getattr(run, kind).get(key, "(not given)") for run in runs})
            for key in keys if key not in RUN_ITSELF}


def side_of(label, runs, target):
    """Everything the tables, the picture and --json say about one side."""
    used = [run for run in runs if run.counts]
    losses, seconds = [run.loss for run in used], [run.seconds for run in used if run.seconds is not None]
    loss, warnings = spread(losses), []
    if target is not None:
        loss["p"] = p_below(losses, target)
        loss["needed"] = runs_needed(target - loss["mean"], loss["sd"]) if loss["sd"] else None
    seeds = Counter(run.seed for run in used if run.seed)
    shared = [f"{seed} ({n} runs)" for seed, n in seeds.items() if n > 1]
    copies = len(used) - len({tuple(v[3] for v in run.validations) + ((run.seconds,) if len(run.validations) < 6 else ())
                              for run in used})  # a few losses can agree by chance
    if shared:
        warnings.append(f"runs of {label} share a seed and are not independent: {', '.join(shared)}")
    if copies:
        warnings.append(f"{copies} of the runs of {label} repeat another one's losses digit for digit; one run counted "
                        "twice?")
    diverged = sum(run.diverged for run in runs)
    stopped = sum(not run.finished and not run.diverged for run in runs)
    if diverged:
        warnings.append(f"{diverged} of the runs of {label} ended with a loss that is not finite; the mean is over the "
                        "others")
    if stopped:
        warnings.append(f"{stopped} of the runs of {label} stopped early or never validated at the end; left out of the "
                        "statistics")
    mixed = [key for key, values in values_of(used, "hyperparameters").items() if len(values) > 1]
    if len({run.source for run in used}) > 1:
        mixed.append("source")
    if len({run.place for run in used}) > 1:
        mixed.append("hardware")
    if mixed:
        warnings.append(f"runs of {label} differ from each other in: {', '.join(mixed)}")
    return dict(label=label, runs=runs, used=used, loss=loss, seconds=spread(seconds), warnings=warnings,
                independent=not shared and not copies, mixed=mixed, diverged=diverged)


def differences(a, b, kind):
    """[(key, values of B, values of A)] for what tells the sides apart."""
    of_a, of_b = values_of(a, kind), values_of(b, kind)
    none = ["(not given)"]
    return [(key, of_b.get(key, none), of_a.get(key, none)) for key in {**of_b, **of_a}
            if of_a.get(key, none) != of_b.get(key, none)]


def source_diff(a, b):
    """Unified diff from B's source to A's (each side's first run); None where a log carries no source."""
    before, after = b[0].source, a[0].source
    if not before or not after:
        return None
    return list(difflib.unified_diff(before.splitlines(), after.splitlines(), f"B {b[0].name}", f"A {a[0].name}",
                                     lineterm="", n=2))


def compare(a, b, target):
    """Everything that is said about two sides."""
    runs_a, runs_b = a["used"], b["used"]
    out = dict(hyperparameters=differences(a["runs"], b["runs"], "hyperparameters"),
               environment=differences(a["runs"], b["runs"], "environment"),
               source=source_diff(a["runs"], b["runs"]),
               loss=welch([r.loss for r in runs_a], [r.loss for r in runs_b]),
               seconds=welch(*([r.seconds for r in runs if r.seconds is not None] for runs in (runs_a, runs_b))),
               equal={axis: at_equal(runs_a, runs_b, axis) for axis in ("step", "tokens", "training time")},
               warnings=[])
    out["same_batch"] = len({run.tokens / run.steps if run.tokens else None for run in runs_a + runs_b}) == 1
    if both := {os.path.realpath(r.path) for r in a["runs"]} & {os.path.realpath(r.path) for r in b["runs"]}:
        out["warnings"].append(f"{len(both)} of the files stand on both sides")
    out["verdict"] = verdict(a, b, out, target)
    return out


def claim(what, test, size, words):
    """One sentence about a difference A - B, as strong as its p-value and no stronger."""
    word, p = words[test["difference"] > 0], test["p"]
    if p is None:
        return f"no difference in {what} can be tested, the runs do not spread"
    if p < ALPHA:
        return f"A is {word} by {size} (p = {p:.2g})"
    if p < 0.05:
        return f"A may be {word} by {size}, not surely (p = {p:.2g})"
    return f"no difference in {what} is shown (p = {p:.2g})"


def verdict(a, b, result, target):
    """One line, never more than the runs support."""
    n_a, n_b = a["loss"]["n"], b["loss"]["n"]
    if result["warnings"]:
        return f"Nothing is shown: {result['warnings'][0]}."
    if min(n_a, n_b) < 2:
        return (f"Nothing is shown: {n_a} finished run{'s' * (n_a != 1)} of A against {n_b} of B, and spread takes at "
                "least 2 a side.")
    if not (a["independent"] and b["independent"]):
        return "Nothing is shown: the runs of a side are not independent (see the warnings), so no p-value holds."
    runs = a["used"] + b["used"]
    if min(a["seconds"]["n"], b["seconds"]["n"]) < 2 or not b["seconds"]["mean"]:
        time = "the logs give no times"
    elif len({run.place for run in runs}) > 1:
        time = "times do not compare, the hardware differs"
    elif len({run.untimed for run in runs}) > 1:
        time = "times do not compare, one side's first ten steps were free"
    else:
        difference = abs(result["seconds"]["difference"]) / b["seconds"]["mean"]
        time = claim("time", result["seconds"], f"{100 * difference:.1f} %", ("faster", "slower"))
        time += " on the same kind of hardware" if runs[0].hardware else "; the logs do not name the hardware"
    if len({run.validated_on for run in runs}) > 1:
        loss = "losses do not compare, the validation data or the vocabulary differ"
    else:
        loss = claim("loss", result["loss"], f"{abs(result['loss']['difference']):.4f}", ("better", "worse"))
    text = f"{time[0].upper()}{time[1:]}; {loss}; {n_a} against {n_b} runs."
    if target is not None:
        text += f" Below {target:g} at p < {ALPHA}: " + ", ".join(
            f"{side['label']} {'yes' if side['loss']['p'] is not None and side['loss']['p'] < ALPHA else 'not shown'}"
            for side in (a, b)) + "."
    for side in (a, b):
        if side["mixed"]:
            text += f" But {side['label']} mixes settings."
        if side["diverged"]:
            text += f" But {side['label']} has runs that diverged."
    return text


# ----------------------------------------------------------------------------------------------------------------------
# Text

def seconds_text(seconds):
    return "-" if seconds is None else f"{seconds:.2f} s"


def tokens_text(tokens):
    if tokens is None:
        return "-"
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if tokens >= size:
            return f"{tokens / size:.4g}{unit}"
    return f"{tokens:.0f}"


def p_text(p):
    return "-" if p is None else f"{p:.2g}"


def table(header, rows, shrinkable=()):
    """Lines of at most WIDTH columns; the widest of the shrinkable columns give way, cut in the middle."""
    rows = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    while sum(widths) + 2 * (len(widths) - 1) > WIDTH and any(widths[i] > 6 for i in shrinkable):
        widths[max(shrinkable, key=lambda i: widths[i])] -= 1

    def cut(text, width):
        return text if len(text) <= width else f"{text[:(width - 1) // 2]}…{text[len(text) - width // 2:]}"

    return ["  ".join(cut(cell, w).ljust(w) if i in shrinkable else cell.rjust(w)
                      for i, (cell, w) in enumerate(zip(row, widths))).rstrip() for row in [header, *rows]]


def interval_text(interval, digits):
    return "-" if interval is None else f"{interval[0]:.{digits}f} .. {interval[1]:.{digits}f}"


def print_side(side, target):
    runs, rows = side["runs"], []
    for run in runs:
        reached = run.reached(target) if target is not None else None
        rows.append([run.name, "-" if run.loss is None else f"{run.loss:.4f}", seconds_text(run.seconds),
                     f"{run.ms_per_step:.2f}" if run.ms_per_step else "-",
                     str(run.steps) if run.finished or run.total is None else f"{run.steps}/{run.total}",
                     tokens_text(run.tokens), f"{reached[0]:.0f}" if reached else "-",
                     seconds_text(reached[1]) if reached else "-",
                     run.hardware or "-", run.ranks or "-", run.environment.get("torch", "-")])
    at_target = f"to {target:g}" if target is not None else "to target"
    header = ["run", "val loss", "time", "ms/step", "steps", "tokens", "step", at_target, "hardware", "ranks", "torch"]
    shared = [i for i in (8, 9, 10) if len({row[i] for row in rows}) == 1]  # said once, above the table
    print(f"{side['label']}: {len(runs)} run{'s' * (len(runs) != 1)}"
         + "".join(f", {header[i]} {rows[0][i]}" for i in shared if rows[0][i] != "-"))
    kept = [i for i in range(len(header)) if i not in shared]
    for line in table([header[i] for i in kept], [[row[i] for i in kept] for row in rows],
                      [kept.index(i) for i in (0, 8, 10) if i in kept]):
        print(line)
    print("")
    rows = [[what, summary["n"], f"{summary['mean']:.{digits}f}{unit}",
             "-" if summary["sd"] is None else f"{summary['sd']:.{digits}f}{unit}",
             interval_text(summary["interval"], digits)]
            for what, summary, digits, unit in (("val loss", side["loss"], 5, ""), ("time", side["seconds"], 3, " s"))
            if summary["n"]]
    for line in table(["over the runs", "n", "mean", "SD", "95 % interval of the mean"], rows, (0,)) if rows else []:
        print(line)
    print(textwrap.fill(target_text(side, target), WIDTH))
    for warning in side["warnings"]:
        print(textwrap.fill(f"warning: {warning}", WIDTH, subsequent_indent="  "))
    print("")


def target_text(side, target):
    loss = side["loss"]
    if target is None:
        return "no target: these runs have a vocabulary of their own (--target sets one)"
    if not loss["n"]:
        return "no finished run with a finite loss, so nothing can be said about the target"
    if loss["n"] < 2:
        return f"mean below {target:g}: one run gives no p-value"
    if not loss["sd"]:
        return f"mean below {target:g}: no p-value, the losses do not differ at all"
    text = f"mean below {target:g}: p = {p_text(loss['p'])} (one-sided t-test)"
    if loss["mean"] >= target:
        return f"{text}; the mean is not below it, more runs alone will not help"
    if loss["p"] < ALPHA:
        return f"{text}, below {ALPHA}" + ("" if side["independent"] else "; but the runs are not independent")
    more = f"{loss['needed'] - loss['n']} more runs" if loss["needed"] else "more than 100,000 runs"
    return f"{text}, not below {ALPHA}; {more} at this margin and SD would give it"


def print_differences(title, found):
    print(f"{title}: {'B -> A' if found else 'the same'}")
    for key, *sides in found:
        before, after = (" | ".join(values[:3]) + (f" | {len(values) - 3} more" if len(values) > 3 else "")
                         for values in sides)
        line = f"  {key}: {before} -> {after}"
        if len(line) <= WIDTH:
            print(line)
        else:
            print(f"  {key}:")
            for label, text in (("B", before), ("A", after)):
                print(textwrap.fill(text, WIDTH, initial_indent=f"    {label} ", subsequent_indent=" " * 6))
    print("")


def print_comparison(result, full_diff):
    print_differences("hyperparameters", result["hyperparameters"])
    print_differences("environment", result["environment"])
    diff, most = result["source"], 120
    print("source of the first run of each side: "
          + ("missing in a log, no diff" if diff is None else "B -> A" if diff else "the same"))
    for line in (diff or [])[:None if full_diff else most]:
        print(line)
    if diff and len(diff) > most and not full_diff:
        print(f"... {len(diff) - most} more lines of diff (--full-diff)")
    print("")
    forms = {"step": lambda x: f"{x:.0f}", "tokens": tokens_text, "training time": seconds_text}
    for axis, rows in result["equal"].items():
        if not rows:
            print(f"loss at equal {axis}: not in the logs of both sides")
            continue
        if axis == "tokens" and result["same_batch"]:
            print("loss at equal tokens: as at equal step, for a step has the same tokens on both sides")
            continue
        print(f"loss at equal {axis} (interpolated between validations)")
        for line in table([axis, "n", "A", "B", "A - B", "95 % interval", "p"],
                          [[forms[axis](row["x"]), f"{row['n'][0]}, {row['n'][1]}", f"{row['a']:.4f}", f"{row['b']:.4f}",
                            f"{row['difference']:+.4f}", interval_text(row["interval"], 4), p_text(row["p"])]
                           for row in rows]):
            print(line)
    print("")
    rows = [[name, "-" if test["difference"] is None else f"{test['difference']:+.{digits}f}{unit}",
             interval_text(test["interval"], digits), p_text(test["p"])]
            for name, test, digits, unit in (("val loss", result["loss"], 5, ""), ("time", result["seconds"], 3, " s"))]
    for line in table(["at the end", "A - B", "95 % interval (Welch)", "p (two-sided)"], rows, (0,)):
        print(line)
    for warning in result["warnings"]:
        print(f"warning: {warning}")
    print("")
    print(textwrap.fill(f"verdict: {result['verdict']}", WIDTH))


def plain(value):
    """For JSON: no dataclass, no NaN, and of a source its SHA-256."""
    if isinstance(value, Run):
        found = asdict(value) | {key: getattr(value, key) for key in
                                 ("finished", "loss", "ms_per_step", "hardware", "ranks", "seed")}
        return plain(found | {"source": hashlib.sha256(value.source.encode()).hexdigest() if value.source else None})
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key != "used"}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ----------------------------------------------------------------------------------------------------------------------
# Picture

def plot(sides, target, path):
    """Validation loss against training time and tokens: a colour a side, a thin line a run, a thick one the mean."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    runs = [run for side in sides for run in side["runs"]]
    names = [axis for axis in ("training time", "tokens", "step") if any(curve(run, axis) is not None for run in runs)][:2]
    if not names:
        raise BadInput(f"{path}: no picture, for the logs hold no validation loss")
    minutes = max(run.seconds or 0 for run in runs) >= 180
    scales = {"training time": 60 if minutes else 1, "tokens": 1e6, "step": 1}
    labels = {"training time": f"training time ({'minutes' if minutes else 'seconds'})", "tokens": "tokens (millions)",
              "step": "step"}
    figure, panels = plt.subplots(1, len(names), figsize=(6.4 * len(names), 5.2), squeeze=False, layout="constrained")
    for panel, axis in zip(panels[0], names):
        end, late = 0, []  # the inset shows the last quarter, where runs differ by thousandths
        inset = panel.inset_axes([0.4, 0.42, 0.57, 0.54])
        for side, colour in zip(sides, ("tab:blue", "tab:orange")):
            curves = [c * [[1 / scales[axis]], [1]] for run in side["runs"] if (c := curve(run, axis)) is not None]
            whole = [c * [[1 / scales[axis]], [1]] for run in side["used"] if (c := curve(run, axis)) is not None]
            lines = [(x, y, dict(linewidth=0.7, alpha=0.6)) for x, y in curves]
            if whole:
                grid = np.unique(np.concatenate([c[0] for c in whole]))
                grid = grid[(grid >= max(c[0][0] for c in whole)) & (grid <= min(c[0][-1] for c in whole))]
                lines.append((grid, np.mean([np.interp(grid, *c) for c in whole], axis=0), dict(
                    linewidth=2.4, label=f"{side['label']}: mean of {len(whole)} run{'s' * (len(whole) != 1)}")))
            for x, y, look in lines:
                panel.plot(x, y, color=colour, **look)
                inset.plot(x, y, color=colour, **look)
            end = max([end, *(x[-1] for x, _ in curves)])
            late += curves
        start = 0.75 * end
        late = [np.concatenate([[np.interp(start, x, y)], y[x >= start]]) for x, y in late if x[-1] >= start]
        low, high = min(map(np.min, late)), max(map(np.max, late))
        if target is not None:
            for picture in (panel, inset):
                picture.axhline(target, color="black", linewidth=1, linestyle="--",
                                label=f"target {target:g}" if picture is panel else None)
            low, high = min(low, max(target, low - 0.5 * (high - low))), max(high, min(target, high + 0.5 * (high - low)))
        room = 0.08 * (high - low) or 0.01
        inset.set(xlim=(start, end), ylim=(low - room, high + room))
        inset.tick_params(labelsize=8)
        inset.grid(alpha=0.3)
        losses = np.concatenate([line.get_ydata() for line in panel.get_lines()])
        if losses.max() > 2 * losses.min() > 0:
            panel.set_yscale("log")
            panel.yaxis.set_major_locator(MaxNLocator(12, steps=[1, 2, 5, 10]))
            panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
            panel.yaxis.set_minor_locator(NullLocator())
        panel.set(xlabel=labels[axis], ylabel="validation loss")
        panel.grid(alpha=0.3)
    handles, texts = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside upper center", ncols=3, frameon=False)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as e:
        raise BadInput(f"{path}: the picture cannot be written ({e})") from None
    finally:
        plt.close(figure)


# ----------------------------------------------------------------------------------------------------------------------
# The table of this repository's records

def tracked_logs(records):
    """The logs under records/ that git tracks, and no others. Raises BadInput where this is no git checkout."""
    def git(*arguments):
        try:
            return subprocess.run(["git", "-C", str(records), *arguments], capture_output=True, text=True, check=True).stdout
        except FileNotFoundError:
            raise BadInput("git is not installed, and only git knows which logs are records") from None
        except subprocess.CalledProcessError as e:
            raise BadInput(f"{records}: {(e.stderr.strip() or 'git failed').splitlines()[0]}") from None

    if Path(git("rev-parse", "--show-toplevel").strip()).resolve() != Path(records).resolve().parent:
        raise BadInput(f"{records}: its parent is not the top of a git checkout, so no log is known to be a record")
    return [Path(records) / name for name in sorted(git("ls-files", "-z", "--", "*.log").split("\0")) if name]


def records_table(records, complain):
    """One row of markdown for each folder of tracked logs."""
    folders = {}
    for path in tracked_logs(records):
        folders.setdefault(path.parent.relative_to(records).as_posix(), []).append(path)
    if not folders:
        return "No records yet."
    lines = ["| record | runs | val loss, mean (SD) | time, mean (SD) | ms/step | steps | tokens | hardware | torch |",
             "|---|---|---|---|---|---|---|---|---|"]
    for name, paths in folders.items():
        runs = []
        for path in paths:
            try:
                runs += runs_in(path, path.stem)
            except BadInput as e:
                complain(str(e))
        side = side_of(name, runs, None)
        used = side["used"]
        if not used:
            lines.append(f"| [{name}]({name}/) | 0 of {len(runs)} finished |" + " - |" * 7)
            continue

        def every(texts):
            return ", ".join(sorted({str(text).replace("|", "/") for text in texts}))

        def mean_sd(summary, digits, unit=""):
            return "-" if not summary["n"] else f"{summary['mean']:.{digits}f}{unit}" + (
                "" if summary["sd"] is None else f" ({summary['sd']:.{digits}f})")

        n = f"{len(used)}" + (f" of {len(runs)}" if len(used) < len(runs) else "")
        step_times = [run.ms_per_step for run in used if run.ms_per_step]
        lines.append(f"| [{name}]({name}/) | {n} | {mean_sd(side['loss'], 4)} | {mean_sd(side['seconds'], 1, ' s')} | "
                     f"{f'{np.mean(step_times):.2f}' if step_times else '-'} | {every(run.steps for run in used)} | "
                     f"{every(tokens_text(run.tokens) for run in used)} | {every(run.hardware or '-' for run in used)} | "
                     f"{every(run.environment.get('torch', '-') for run in used)} |")
    return "\n".join(lines)


def readme_with_table(text, new_table):
    start, end = (text.find(marker) for marker in MARKERS)
    if start < 0 or end < start:
        raise BadInput(f"README.md: the markers {MARKERS[0]} and {MARKERS[1]} are not both in it, in this order")
    return f"{text[:start]}{MARKERS[0]}\n{new_table}\n{text[end:]}"


def update_readme(records, complain):
    readme = Path(records) / "README.md"
    try:
        readme.write_text(readme_with_table(readme.read_text(), records_table(records, complain)))
    except OSError as e:
        raise BadInput(f"{readme}: {e.strerror}") from None


# ----------------------------------------------------------------------------------------------------------------------

def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("logs", nargs="*", metavar="A", help="logs, folders or quoted patterns: the runs in question")
    parser.add_argument("--vs", nargs="+", metavar="B", help="the same for the baseline")
    parser.add_argument("--target", type=float, help=f"validation loss to reach (default {TARGET}; none where the logs "
                        "name another vocabulary than GPT-2's)")
    parser.add_argument("--plot", metavar="FILE", help="draw the losses into a .png or .svg")
    parser.add_argument("--full-diff", action="store_true", help="all of the source diff, however long")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    parser.add_argument("--update-readme", action="store_true", help="write the table of the logs that git tracks under "
                        "records/ into records/README.md")
    options = parser.parse_args(arguments)
    if not options.logs and not options.update_readme:
        parser.error("no log given")
    if options.target is not None and not math.isfinite(options.target):
        parser.error("--target must be a number")
    if options.plot and not options.plot.endswith((".png", ".svg")):
        parser.error("--plot takes a .png or an .svg")

    complaints = []

    def complain(line):
        complaints.append(line)
        print(line, file=sys.stderr)

    if options.update_readme:
        update_readme(RECORDS, complain)
        if not options.logs:
            return 1 if complaints else 0
    sides = [read(arguments, complain) for arguments in (options.logs, options.vs) if arguments]
    if not all(sides):
        raise BadInput("no run to report" + (" on one of the sides" if len(sides) > 1 else ""))
    target = options.target
    if target is None and all(run.hyperparameters.get("vocab_size", GPT2_VOCABS[0]) in GPT2_VOCABS
                              for runs in sides for run in runs):
        target = TARGET
    sides = [side_of(label, runs, target) for label, runs in zip("AB", sides)]
    result = compare(*sides, target) if len(sides) == 2 else None
    if options.json:
        for side in sides:
            side["target_reached"] = [run.reached(target) if target is not None else None for run in side["runs"]]
        print(json.dumps(plain(dict(target=target, sides=sides, comparison=result, unread=complaints)), indent=1))
    else:
        for side in sides:
            print_side(side, target)
        if result:
            print_comparison(result, options.full_diff)
    if options.plot:
        plot(sides, target, options.plot)
    return 1 if complaints else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BadInput as e:
        sys.exit(f"compare.py: {e}")  # status 1
    except BrokenPipeError:           # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
