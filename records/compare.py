"""Read the logs of NanoGPT speedruns: what was changed, is it faster, is it better, how surely.

    python records/compare.py records/*.log                       one setting: runs, spread, p-value
    python records/compare.py NEW.log NEW2.log --vs records/base  two settings and a verdict
    python records/compare.py new/ --vs base/ --plot new.png      the same, drawn
    python records/compare.py NEW.log --plot new.png              a run, alive or not: loss, speed
    python records/compare.py --update-readme                     the table in records/README.md

A log holds one run: of this project, or published by the speedrun since October 2024, or captured
from a console. A folder stands for every .log and .txt below it. The runs named first are A, those
after --vs are B, the baseline: "B -> A" and A - B throughout. Only finished runs with finite losses
enter the statistics, and none that was resumed with other settings as long as there are others;
what is left out is named. --update-readme keeps the table's last column, which is written by hand.
Exit status: 0 all read, 1 some input was no log (the rest is still reported), 2 wrong usage.

--json prints one object, with null for what the logs do not say or too few runs cannot say:
  version: 3; target: the loss to reach; unread: a line for each input that was no log
  sides: A, or A and B: label, warnings, independent, used (names of the runs in the statistics),
    loss and seconds (n, mean, sd, interval: 95 % of the mean; of loss p: one-sided t-test), runs
  runs: name, path, steps, total, seconds, tokens, ms_per_step, loss, finished, diverged, changed
    (on resuming), reached (step and seconds at the target), validations (rows of step, total,
    kind, loss, seconds, ms_per_step, tokens, lr, window), hardware, torch, ranks, seed, timed_on
    and validated_on (what must agree before times, losses compare), source (its sha256),
    hyperparameters and environment (as logged)
  comparison: hyperparameters, environment (rows of name, values in B, in A), source (a diff), loss
    and seconds (difference A - B, interval, p), verdict
"""

import argparse
import difflib
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import textwrap
import warnings
from collections import Counter, namedtuple
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
from scipy import stats

TARGET = 3.28                     # a loss over the GPT-2 vocabulary; over another it means nothing
ALPHA = 0.01                      # the speedrun's level of significance
WIDTH = 100
RECORDS = Path(__file__).resolve().parent
MARKERS = ("<!-- table: compare.py --update-readme -->", "<!-- end of table -->")

class BadInput(Exception):
    """What a user can cause: the message is one line."""

# ---- The sections of a log -----------------------------------------------------------------------

SEPARATOR = "=" * 100
OWN_HEAD = re.compile(rf"((?:\w+ = .*\n)+){SEPARATOR}\n((?:\w+:.*\n)+){SEPARATOR}\n")
SCRIPT = re.compile(r"(?m)^script: sha256 ([0-9a-f]{64}) ([0-9]{1,9}) lines$")
VERSION = re.compile(r"(?i)\b(?:py)?(python|torch|triton|cuda|driver)(?: version)?:? (\d[\w.+]*)")
NVIDIA_SMI_ROW = re.compile(r"(?m)^\| +\d+ +(NVIDIA(?: \S+)*) +(?:On|Off) +\|")

Sections = namedtuple("Sections", "hyperparameters environment source steps")

def own_sections(text):
    """The sections of this project's log; None if it is none."""
    head = OWN_HEAD.match(text)
    if not head:
        return None
    hyperparameters = dict(re.findall(r"(\w+) = (.*)\n", head[1]))
    source, steps = source_and_steps(text[head.end():], SCRIPT.search(head[2]))
    return Sections(hyperparameters, environment_of(head[2]), source, steps)

def source_and_steps(text, script):
    """A source may quote a whole log, so it ends where its hash and number of newlines say."""
    if script:
        lines = text.split("\n")
        count = int(script[2])
        for end, last in ((count, "\n"), (count + 1, "")):  # with a last newline, or without one
            source = "\n".join(lines[:end]) + last
            same = hashlib.sha256(source.encode()).hexdigest() == script[1]
            if same and lines[end:end + 1] == [SEPARATOR]:
                return source, "\n".join([*lines[end + 1:-1], ""])  # without half a line
        raise BadInput("no log (its source is cut or changed: the SHA-256 is another)")
    parts = text.split(f"\n{SEPARATOR}\n")
    if len(parts) != 2:
        raise BadInput("no log (it does not say where its source ends)")
    return f"{parts[0]}\n", parts[1].partition("\nsample:\n")[0]  # old logs end in a model's text

def environment_of(text):
    """key -> value of `key: value` lines; the values of a key that comes several times, joined."""
    found = {}
    for key, value in re.findall(r"(\w+):(.*)\n", text):
        found.setdefault(key, []).append(value.strip())
    found.pop("script", None)  # the source itself is compared
    gpus = [row.split(", ") for row in found.pop("gpu", [])]
    for column, *values in zip(*gpus):
        if not column.startswith(("clocks.current", "temperature")):  # which change all the time
            found[f"gpu {column}"] = sorted(set(values))
    return {key: "; ".join(values) for key, values in found.items()}

def published_sections(text):
    """The sections of a log that the speedrun has published, or of a captured console, as far as
    it has them: the source, the versions, nvidia-smi's table, the steps."""
    running = re.search(r"(?m)^Running [Pp]y", text)
    if not running:
        source, _, steps = text.rpartition(f"{SEPARATOR}\n")
        return Sections({}, {}, source.strip("=\n"), steps)
    source = text[:running.start()]
    steps = text[running.start():]
    said = steps.partition("\nstep:")[0]
    environment = {key.lower(): value for key, value in VERSION.findall(said)}
    gpus = NVIDIA_SMI_ROW.findall(said)
    if gpus:
        environment["gpus"] = f"{len(gpus)} x {gpus[0].rstrip()}"
    return Sections({}, environment, source.strip("=\n"), steps)

# ---- Runs ----------------------------------------------------------------------------------------

NUMBER = r"\d{1,15}(?:\.\d{0,15})?"
STEP = re.compile(
    r"(?ma)^step:(?P<step>\d{1,15})/(?P<total>\d{1,15}) "
    rf"(?:(?P<kind>train|val)_loss:(?P<loss>nan|-?inf|-?{NUMBER}) )?(?:val_\w+:\S+ )*"
    rf"train_time:(?P<time>{NUMBER})(?P<unit>ms|s) step_avg:(?P<average>nan|{NUMBER})ms"
    rf"(?: tokens:(?P<tokens>\d{{1,18}}))?(?: lr:(?P<lr>{NUMBER}))?"
    r"(?: window:(?P<window>\d{1,18}))?(?: .*)?$")
CHANGED = re.compile(  # on resuming; not where the run lies
    r"(?m)^changed: (?!(?:name|records|save_every) )(.*)$")

Line = namedtuple("Line", "step total kind loss seconds ms_per_step tokens lr window")

def finite(text):
    """The number; None if there is none or it is not finite."""
    value = float(text or "nan")
    return value if math.isfinite(value) else None

def step_lines(text):
    found = []
    for line in STEP.finditer(text):
        seconds = float(line["time"]) / (1000 if line["unit"] == "ms" else 1)
        tokens, window = (int(line[key]) if line[key] else None for key in ("tokens", "window"))
        found.append(Line(int(line["step"]), int(line["total"]), line["kind"], finite(line["loss"]),
                          seconds, finite(line["average"]), tokens, finite(line["lr"]), window))
    return found

class Run:
    """One run, as its log tells it."""

    def __init__(self, name, path, sections):
        lines = step_lines(sections.steps)
        if not lines and not sections.hyperparameters:
            raise BadInput("no log (no line of a step in it)")
        if any(line.step < before.step for before, line in pairwise(lines)):
            raise BadInput("several runs in one file (its steps go back)")
        last = lines[-1] if lines else Line(0, 0, *[None] * 7)  # before the first step
        self.name = name
        self.path = path
        self.lines = lines
        self.steps = last.step
        self.total = last.total  # the steps it set out to do
        self.seconds = last.seconds
        self.tokens = last.tokens
        self.ms_per_step = last.ms_per_step
        self.validations = [line for line in lines if line.kind == "val"]
        self.loss = None
        self.finished = False
        if self.validations:
            self.loss = self.validations[-1].loss
            self.finished = self.validations[-1].step >= self.total
        self.diverged = any(line.kind and line.loss is None for line in lines)
        self.changed = CHANGED.findall(sections.steps)
        self.reached = None  # where it meets the target
        self.hyperparameters = sections.hyperparameters
        self.environment = sections.environment
        self.source = sections.source
        given = self.hyperparameters
        said = self.environment
        device = said.get("gpus") or said.get("cpu", "")
        self.hardware = re.sub(r"^(\d+) x (NVIDIA )?", r"\1x ", device) or None
        self.torch = said.get("torch", "").partition(",")[0] or None
        self.ranks = said.get("ranks")
        self.seed = given.get("seed")
        # What must agree before times compare, and before losses do: data by content, not by path.
        gpus = [value for key, value in said.items() if key.startswith("gpu ")]
        self.timed_on = (self.hardware, self.ranks, said.get("threads"), self.free_steps(), *gpus)
        shards = re.findall(r"val\S* (\d+ tokens)", said.get("data", ""))
        self.validated_on = (given.get("val_tokens"), given.get("vocab_size"), *shards)

    def free_steps(self):
        """10 or 0: until January 2025 the first ten steps were outside the clock and step_avg."""
        if not self.ms_per_step:
            return 0
        timed = 1000 * self.seconds / self.ms_per_step
        return 10 if abs(self.steps - timed - 10) < 2 else 0

    def find_target(self, target):
        """Set reached to the (step, seconds) where the validation loss first meets the target, on
        the straight line from the validation before."""
        points = [point for point in self.validations if point.loss is not None]
        for i, point in enumerate(points):
            if point.loss <= target:
                line = [point, *points[max(i - 1, 0):i]]
                losses = [end.loss for end in line]
                step = np.interp(target, losses, [end.step for end in line])
                seconds = np.interp(target, losses, [end.seconds for end in line])
                self.reached = (float(step), float(seconds))
                return

def read(arguments):
    """The runs of one side, each file once, and a line for each input that is no log."""
    files = {}
    unread = []
    for argument in arguments:
        paths = [Path(argument)]
        if paths[0].is_dir():
            paths = sorted([*paths[0].rglob("*.log"), *paths[0].rglob("*.txt")])
        if not paths:
            unread.append(f"{argument}: no .log or .txt file in this folder")
        files |= {os.path.realpath(path): str(path) for path in paths}
    top = os.path.commonpath([os.path.dirname(file) for file in files]) if files else ""
    runs = []
    for file, path in files.items():
        name = os.path.splitext(os.path.relpath(file, top))[0]
        try:
            runs.append(read_run(path, name))
        except BadInput as error:
            unread.append(str(error))
    return runs, unread

def read_run(path, name):
    try:
        text = Path(path).read_bytes().decode("utf-8-sig", "replace").replace("\r\n", "\n")
        return Run(name, str(path), own_sections(text) or published_sections(text))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from None
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None

# ---- Statistics ----------------------------------------------------------------------------------

def spread(values):
    """n, mean, SD and the 95 % interval of the mean (Student's t); None where n is too small."""
    n = len(values)
    found = {"n": n, "mean": None, "sd": None, "interval": None}
    if n > 0:
        found["mean"] = float(np.mean(values))
    if n > 1:
        found["sd"] = float(np.std(values, ddof=1))
        half = float(stats.t.ppf(0.975, n - 1)) * found["sd"] / math.sqrt(n)
        found["interval"] = (found["mean"] - half, found["mean"] + half)
    return found

def p_below(values, target):
    """p of a one-sided t-test that the mean is below the target; None where there is no spread."""
    if target is None or len(set(values)) < 2:
        return None
    return float(stats.ttest_1samp(values, target, alternative="less").pvalue)

def welch(a, b):
    """Difference of the means of a and b, Welch's 95 % interval and two-sided p; None where they
    cannot be had."""
    found = {"difference": None, "interval": None, "p": None}
    if a and b:
        found["difference"] = float(np.mean(a) - np.mean(b))
    if min(len(a), len(b)) > 1 and max(len(set(a)), len(set(b))) > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a side whose values are all the same
            test = stats.ttest_ind(a, b, equal_var=False)
            low, high = test.confidence_interval()
        found["interval"] = (float(low), float(high))
        found["p"] = float(test.pvalue)
    return found

# ---- One side, two sides -------------------------------------------------------------------------

RUN_ITSELF = {"seed", "name", "records", "command"}  # differ from run to run and are no setting
NOT_GIVEN = "(not given)"

class Side:
    """The runs of one setting, and what their tables, picture and JSON say of them."""

    def __init__(self, label, runs, target):
        self.label = label
        self.runs = runs
        whole = [run for run in runs if run.finished and not run.diverged]
        self.used = [run for run in whole if not run.changed] or whole
        losses = [run.loss for run in self.used]
        self.loss = spread(losses) | {"p": p_below(losses, target)}
        self.seconds = spread([run.seconds for run in self.used])
        self.independent = True
        self.warnings = []
        if target is not None:
            for run in runs:
                run.find_target(target)
        self.warn_about_runs()
        self.warn_about_settings()

    def warn_about_runs(self):
        label = self.label
        for run in self.runs:
            if run.changed:
                kept = "kept, for there is no other" if run in self.used else "left out"
                self.warnings.append(f"run {run.name} of {label} was resumed with other settings, "
                                     f"{kept}: {'; '.join(run.changed)}")
        seeds = Counter(run.seed for run in self.used if run.seed)
        shared = [seed for seed, n in seeds.items() if n > 1]
        copies = len(self.used) - len(distinct(self.used))
        diverged = sum(run.diverged for run in self.runs)
        stopped = sum(not run.finished and not run.diverged for run in self.runs)
        if shared:
            self.warnings.append(f"runs of {label} share a seed: {', '.join(shared)}")
        if copies:
            self.warnings.append(f"{copies} of the runs of {label} are copies of another")
        if diverged:
            self.warnings.append(f"{diverged} of the runs of {label} had a loss that is not finite")
        if stopped:
            self.warnings.append(f"{stopped} of the runs of {label} stopped before a last loss")
        self.independent = not shared and not copies

    def warn_about_settings(self):
        settings = values_of(self.used, "hyperparameters")
        mixed = [key for key, values in settings.items() if len(values) > 1]
        if len({run.source for run in self.used}) > 1:
            mixed.append("source")
        if len({run.timed_on for run in self.used}) > 1:
            mixed.append("hardware")
        if mixed:
            self.warnings.append(f"runs of {self.label} differ from each other in: "
                                 f"{', '.join(mixed)}")

def distinct(runs):
    """The runs' losses and times: those of a copy are the same, digit for digit."""
    return {tuple(run.validations) for run in runs}

def values_of(runs, kind):
    """key -> the sorted values it has over the runs; kind is "hyperparameters" or "environment"."""
    tables = [getattr(run, kind) for run in runs]
    found = {}
    for key in dict.fromkeys(chain(*tables)):
        if key not in RUN_ITSELF:
            found[key] = sorted({table.get(key, NOT_GIVEN) for table in tables})
    return found

def differences(a, b, kind):
    """Rows of key, values in B, values in A for what tells the sides apart."""
    in_a = values_of(a.runs, kind)
    in_b = values_of(b.runs, kind)
    rows = [[key, in_b.get(key, [NOT_GIVEN]), in_a.get(key, [NOT_GIVEN])] for key in in_b | in_a]
    return [row for row in rows if row[1] != row[2]]

def compare(a, b, target):
    """Everything that is said about two sides."""
    old = b.runs[0]
    new = a.runs[0]
    diff = difflib.unified_diff(old.source.splitlines(), new.source.splitlines(), f"B {old.name}",
                                f"A {new.name}", lineterm="", n=2)
    found = {
        "hyperparameters": differences(a, b, "hyperparameters"),
        "environment": differences(a, b, "environment"),
        "source": list(diff) if old.source and new.source else None,
        "loss": welch([run.loss for run in a.used], [run.loss for run in b.used]),
        "seconds": welch([run.seconds for run in a.used], [run.seconds for run in b.used]),
    }
    found["verdict"] = verdict(a, b, found, target)
    return found

def verdict(a, b, comparison, target):
    """A few sentences, never more than the runs support."""
    runs = a.used + b.used
    n_a = len(a.used)
    n_b = len(b.used)
    both = distinct(a.used) & distinct(b.used)
    if both:
        return f"Nothing is shown: {len(both)} of the runs stand on both sides."
    if min(n_a, n_b) < 2:
        return (f"Nothing is shown: {n_a} finished run{'s' * (n_a != 1)} of A against {n_b} of B, "
                "and spread takes at least 2 a side.")
    if not (a.independent and b.independent):
        return ("Nothing is shown: the runs of a side are not independent (see the warnings), so "
                "no p-value holds.")
    if len({run.timed_on for run in runs}) > 1:
        time = "times do not compare, the hardware, the ranks or the rules of the clock differ"
    else:
        percent = 100 * abs(comparison["seconds"]["difference"]) / max(b.seconds["mean"], 1e-9)
        time = claim("time", comparison["seconds"], f"{percent:.1f} %", ("faster", "slower"))
        if runs[0].hardware:
            time += " on the same kind of hardware"
        else:
            time += "; the logs do not name the hardware"
    if len({run.validated_on for run in runs}) > 1:
        loss = "losses do not compare, the validation data or the vocabulary differ"
    else:
        size = f"{abs(comparison['loss']['difference']):.4f}"
        loss = claim("loss", comparison["loss"], size, ("better", "worse"))
    text = f"{time[0].upper()}{time[1:]}; {loss}; {n_a} against {n_b} runs."
    if target is not None:
        said = ["yes" if below_target(side) else "not shown" for side in (a, b)]
        text += f" Below {target:g} at p < {ALPHA}: A {said[0]}, B {said[1]}."
    for side in (a, b):
        if side.warnings:
            text += f" But mind the warnings about {side.label}."
    return text

def below_target(side):
    return side.loss["p"] is not None and side.loss["p"] < ALPHA

def claim(what, test, size, words):
    """One sentence about a difference A - B, as strong as its p-value and no stronger."""
    word = words[test["difference"] > 0]
    p = test["p"]
    if p is None:
        return f"no difference in {what} can be tested, the runs do not spread"
    if p < ALPHA:
        return f"A is {word} by {size} (p = {p:.2g})"
    if p < 0.05:
        return f"A may be {word} by {size}, not surely (p = {p:.2g})"
    return f"no difference in {what} is shown (p = {p:.2g})"

# ---- Text ----------------------------------------------------------------------------------------

MEASURES = (("val loss", "loss", ".5f", ""), ("time", "seconds", ".3f", " s"))

def number(value, form, unit=""):
    return "-" if value is None else f"{value:{form}}{unit}"

def interval(bounds, form):
    return "-" if bounds is None else f"{bounds[0]:{form}} .. {bounds[1]:{form}}"

def tokens_text(tokens):
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if tokens is not None and tokens >= size:
            return f"{tokens / size:.4g}{unit}"
    return number(tokens, "d")

def print_table(rows):
    """Rows of text, the first of them the header; the first column stands to the left."""
    widths = [max(map(len, cells)) for cells in zip(*rows)]
    for first, *others in rows:
        print("  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]))

def print_side(side, target):
    runs = side.runs
    title = f"{side.label}: {len(runs)} run{'s' * (len(runs) != 1)}"
    for what in ("hardware", "ranks", "torch"):
        values = {getattr(run, what) or "-" for run in runs}
        if values != {"-"}:
            title += f", {what} {' | '.join(sorted(values))}"
    print(textwrap.fill(title, WIDTH, subsequent_indent="  "))
    to_target = "to target" if target is None else f"to {target:g}"
    rows = [["run", "val loss", "time", "ms/step", "steps", "tokens", "step", to_target]]
    for run in runs:
        step, seconds = run.reached or (None, None)
        of = "" if run.finished else f"/{run.total}"
        rows.append([run.name, number(run.loss, ".4f"), number(run.seconds, ".2f", " s"),
                     number(run.ms_per_step, ".2f"), f"{run.steps}{of}", tokens_text(run.tokens),
                     number(step, ".0f"), number(seconds, ".2f", " s")])
    print_table(rows)
    print()
    rows = [["over the runs", "n", "mean", "SD", "95 % interval of the mean"]]
    for what, key, form, unit in MEASURES:
        found = getattr(side, key)
        rows.append([what, str(found["n"]), number(found["mean"], form, unit),
                     number(found["sd"], form, unit), interval(found["interval"], form)])
    print_table(rows)
    print(textwrap.fill(target_text(side, target), WIDTH))
    for line in side.warnings:
        print(textwrap.fill(f"warning: {line}", WIDTH, subsequent_indent="  "))
    print()

def target_text(side, target):
    p = side.loss["p"]
    if target is None:
        return "no target: these runs have a vocabulary of their own (--target sets one)"
    if p is None:
        return f"mean below {target:g}: no p-value, which takes two finished runs that differ"
    found = "below" if below_target(side) else "not below"
    return f"mean below {target:g}: p = {p:.2g} (one-sided t-test), {found} {ALPHA}"

def print_comparison(comparison):
    for kind in ("hyperparameters", "environment"):
        rows = comparison[kind]
        print(f"{kind}: {'B -> A' if rows else 'no difference in the logs'}")
        for key, before, after in rows:
            line = f"  {key}: {' | '.join(before)} -> {' | '.join(after)}"
            print(textwrap.fill(line, WIDTH, subsequent_indent=" " * 6))
        print()
    diff = comparison["source"]
    if diff is None:
        print("source: missing in a log, no diff\n")
    elif not diff:
        print("source of the first run of each side: the same\n")
    else:
        print("source of the first run of each side: B -> A", *diff, "", sep="\n")
    rows = [["at the end", "A - B", "95 % interval (Welch)", "p (two-sided)"]]
    for what, key, form, unit in MEASURES:
        test = comparison[key]
        rows.append([what, number(test["difference"], f"+{form}", unit),
                     interval(test["interval"], form), number(test["p"], ".2g")])
    print_table(rows)
    print("\n" + textwrap.fill(f"verdict: {comparison['verdict']}", WIDTH))

def as_json(thing):
    """The fields of a Side or a Run, for json.dumps."""
    if isinstance(thing, Side):
        return vars(thing) | {"used": [run.name for run in thing.used]}
    source = thing.source and hashlib.sha256(thing.source.encode()).hexdigest()
    fields = {key: value for key, value in vars(thing).items() if key != "lines"}
    return fields | {"source": source or None}

# ---- Picture -------------------------------------------------------------------------------------

def curves(runs, axis):
    """[(positions, losses)] of each run over an axis, "seconds", "tokens" or "step"."""
    found = []
    for run in runs:
        points = [point for point in run.validations if point.loss is not None]
        found.append(([getattr(point, axis) for point in points],
                      [point.loss for point in points]))
    return found

def name_of(side):
    """The folder of its runs, where they have one of their own; else its first run."""
    folders = {Path(run.path).resolve().parent for run in side.runs}
    if len(folders) == 1 and RECORDS not in folders:
        return folders.pop().name
    return side.runs[0].name

def draw_training(run, amount, loss_panel, rate_panel, speed_panel):
    """The training losses; over the steps the factor of the learning rates, and the speed."""
    trained = [line for line in run.lines if line.kind == "train"]
    losses = [line.loss for line in trained]
    loss_panel.plot([line.seconds for line in trained], losses, color="silver", linewidth=0.5)
    rate_panel.plot([line.step for line in trained], [line.lr for line in trained], color="black")
    speeds = [(b.step, (getattr(b, amount) - getattr(a, amount)) / (b.seconds - a.seconds))
              for a, b in pairwise(run.lines[::len(run.lines) // 100 + 1]) if b.seconds > a.seconds]
    speed_panel.plot(*zip(*speeds), color="tab:green", linewidth=0.7)
    rate_panel.set(xlabel="training step", ylabel="learning-rate factor (black)", ylim=(0, 1.05))
    speed_panel.set(ylabel=f"{amount} a second (green)", ylim=(0, None))
    return [loss for loss in losses[len(losses) // 2:] if loss is not None]

def draw(sides, target):
    """Validation loss over training time and over tokens: a colour a side, a thin line a run, a
    thick one the mean of a side whose runs validated at the same steps. One side alone: with its
    training losses, and for the second panel its learning rates and its speed."""
    from matplotlib.figure import Figure

    runs = list(chain(*(side.runs for side in sides)))
    alone = len(sides) == 1
    what = "loss" if alone else "validation loss"
    counted = chain(*(run.lines if alone else run.validations for run in runs))
    amount = "step" if any(line.tokens is None for line in counted) else "tokens"
    figure = Figure(figsize=(12.8, 5), layout="constrained")
    figure.suptitle(f"{what.capitalize()}: " + " against ".join(map(name_of, sides)))
    panels = figure.subplots(1, 2, sharey=not alone)
    # The first losses are far above and do not set the range.
    late = list(chain(*(losses[len(losses) // 2:] for _, losses in curves(runs, "step"))))
    if alone:
        panels = [*panels, panels[1].twinx()]
        late += chain(*(draw_training(run, amount, *panels) for run in runs))
        panels[0].plot([], [], color="silver", label="training losses")
    if not late:
        raise BadInput("no picture, for the logs hold no loss")
    if target is not None and abs(target - np.mean(late)) < 2 * np.ptp(late):
        late.append(target)
    room = 0.05 * np.ptp(late) or 0.01
    for panel, axis in zip(panels[:1] if alone else panels, ("seconds", amount)):
        for side, colour in zip(sides, ("tab:blue", "tab:orange")):
            for positions, losses in curves(side.runs, axis):
                panel.plot(positions, losses, color=colour, linewidth=0.7, marker="." * alone)
            if len({tuple(steps) for steps, _ in curves(side.used, "step")}) == 1:
                positions, losses = np.mean(curves(side.used, axis), axis=0)
                panel.plot(positions, losses, color=colour, linewidth=2.4)
            label = f"{side.label}: {name_of(side)}, {len(side.runs)} run(s)"
            panel.plot([], [], color=colour, label=label)
        if target is not None:
            panel.axhline(target, color="black", linestyle="--", label=f"target {target:g}")
        panel.set(xlabel=f"training {axis}", ylabel=what, xlim=0,
                  ylim=(min(late) - room, max(late) + room))
        panel.grid(alpha=0.3)
        panel.legend()
    return figure

# ---- The table of this repository's records ------------------------------------------------------

HEADER = ("| record | runs | val loss, mean (SD) | time, mean (SD) | ms/step | steps | tokens | "
          "hardware | torch | what was asked, and what came out |")

def tracked_logs(records):
    """The logs under records/ that git tracks: a user's own runs are no records."""
    command = ["git", "-C", str(records), "ls-files", "-z", "*.log"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    if not found:
        raise BadInput(f"{records}: git tracks no log here")
    return [Path(records, name) for name in sorted(found.split("\0")) if name]

def records_table(records):
    """One row of markdown for each folder of tracked logs."""
    folders = {}
    for path in tracked_logs(records):
        folders.setdefault(path.parent, []).append(read_run(path, path.stem))
    rows = [HEADER, re.sub(r"[^|]+", "---", HEADER)]
    for folder, runs in folders.items():
        name = folder.relative_to(records).as_posix()
        side = Side(name, runs, None)
        used = side.used
        cells = [f"[{name}]({name}/)"]
        cells.append(f"{len(used)} of {len(runs)}" if len(used) < len(runs) else f"{len(used)}")
        for found, form, unit in ((side.loss, ".4f", ""), (side.seconds, ".1f", " s")):
            sd = "" if found["sd"] is None else f" ({found['sd']:{form}})"
            cells.append(f"{number(found['mean'], form, unit)}{sd}")
        ms_per_step = spread([run.ms_per_step for run in used if run.ms_per_step])
        cells.append(number(ms_per_step["mean"], ".2f"))
        for values in ([str(run.steps) for run in used], [tokens_text(run.tokens) for run in used],
                       [run.hardware for run in used], [run.torch for run in used]):
            texts = sorted({(value or "-").replace("|", "/") for value in values})
            cells.append(", ".join(texts) or "-")
        rows.append(f"| {' | '.join(cells)} | - |")
    return "\n".join(rows)

def readme_with_table(text, new_table):
    """The text with the table between its markers made anew; its last column stays."""
    start, end = (text.find(marker) for marker in MARKERS)
    if start < 0 or end < start:
        raise BadInput(f"README.md: the markers {' and '.join(MARKERS)} do not stand in it so")
    last = HEADER.count("|") - 2
    old = [row.split(" | ", last) for row in text[start:end].splitlines()]
    kept = {cells[0]: cells[last:] for cells in old if len(cells) > last}
    rows = [row.split(" | ") for row in new_table.splitlines()]
    rows = [" | ".join(cells[:last] + kept.get(cells[0], cells[last:])) for cells in rows]
    return "\n".join([text[:start] + MARKERS[0], *rows, text[end:]])

def update_readme(records):
    readme = Path(records) / "README.md"
    table = records_table(records)
    readme.write_text(readme_with_table(readme.read_text("utf-8"), table), "utf-8")

# ---- The command ---------------------------------------------------------------------------------

def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="*", metavar="A", help="logs, or folders of logs")
    parser.add_argument("--vs", nargs="+", metavar="B", help="the same for the baseline")
    parser.add_argument("--target", type=float, help=f"validation loss to reach (default {TARGET}; "
                        "none where the logs name another vocabulary than GPT-2's)")
    parser.add_argument("--plot", metavar="FILE", help="draw the losses into a .png or .svg")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    parser.add_argument("--update-readme", action="store_true", help="write the table of the logs "
                        "that git tracks under records/ into records/README.md")
    options = parser.parse_args(arguments)
    if not options.logs and not options.update_readme:
        parser.error("no log given")
    if options.target is not None and not math.isfinite(options.target):
        parser.error("--target must be a number")
    if options.plot and not options.plot.endswith((".png", ".svg")):
        parser.error("--plot takes a .png or an .svg")
    if options.update_readme:
        update_readme(RECORDS)
    return report(options) if options.logs else 0

def report(options):
    """Print what is asked for; returns the exit status."""
    runs, unread = read(options.logs)
    baseline, more_unread = read(options.vs or [])
    unread += more_unread
    for line in unread:
        print(line, file=sys.stderr)
    if not runs or (options.vs and not baseline):
        raise BadInput("no run to report" + (" on one of the sides" if options.vs else ""))
    target = options.target
    vocabularies = {run.hyperparameters.get("vocab_size") for run in runs + baseline}
    if target is None and vocabularies <= {None, "50257", "50304"}:  # GPT-2's
        target = TARGET
    sides = [Side("A", runs, target)]
    comparison = None
    if options.vs:
        sides.append(Side("B", baseline, target))
        comparison = compare(*sides, target)
    if options.plot:
        draw(sides, target).savefig(options.plot, dpi=120)
    if options.json:
        print(json.dumps({"version": 3, "target": target, "sides": sides, "comparison": comparison,
                          "unread": unread}, indent=1, default=as_json, allow_nan=False))
    else:
        for side in sides:
            print_side(side, target)
        if comparison:
            print_comparison(comparison)
    return 1 if unread else 0

if __name__ == "__main__":
    try:
        sys.stdout.reconfigure(errors="backslashreplace")  # for file names that are no text
        sys.exit(main())
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (BadInput, OSError) as error:
        sys.exit(f"compare.py: {error}")  # status 1
