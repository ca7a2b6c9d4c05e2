"""Read the logs of NanoGPT speedruns: what was changed, is it faster, is it better, how surely.

    python records/compare.py records/*.log                       one setting: runs, spread, p-value
    python records/compare.py NEW.log NEW2.log --vs records/base  two settings and a verdict
    python records/compare.py new/ --vs base/ --plot new.png      the same, drawn
    python records/compare.py --update-readme                     the table in records/README.md

A log is a file of this project (settings, environment, source, steps) or any published log of the
speedrun since May 2024; a folder stands for every .log and .txt below it. The runs named first are
A, those after --vs are B, the baseline: "B -> A" and A - B throughout. Only finished runs with a
finite loss enter the statistics, and none that was resumed with other settings as long as there are
others; what is left out is named. --update-readme keeps the table's last column, where one writes
by hand what a folder's runs were asked and what came out. Exit status: 0 all read, 1 some input was
no log (the rest is still reported), 2 wrong usage.

--json prints one object, with null for what the logs do not say or too few runs cannot say:
  version: 1; target: the loss to reach; unread: a line for each input that was no log
  sides: A, or A and B: label, warnings, independent, mixed, diverged, used (names of the runs in
    the statistics), target_reached (step and seconds of each run), loss and seconds (n, mean, sd,
    interval: 95 % of the mean; of loss p: one-sided t-test, and needed: runs for p < 0.01), runs:
    name, path, steps, total, seconds, untimed (steps), tokens, ms_per_step, loss, finished,
    diverged, changed (on resuming), validations (rows of step, seconds, tokens, loss), hardware,
    torch, ranks, seed, hyperparameters, environment and end (as logged), source (its sha256)
  comparison: hyperparameters, environment (rows of name, values in B, in A), source (a diff), loss
    and seconds (difference A - B, interval, p), equal (by step, tokens, training time: rows of x,
    n, a, b, difference, interval, p), same_batch, warnings, verdict
"""

import argparse
import ast
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
import warnings
from collections import Counter, namedtuple
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

# ---- The parts of a file -------------------------------------------------------------------------
# A source may quote logs and a sample may look like one: both are passed over before reading on.

LINE = "=" * 100
SEPARATOR = re.compile(rf"(?m)^{LINE}[ \t]*(?:\n|\Z)")
LOG_LINE = re.compile(r"(?m)^s(?:tep:\d+/\d+ .*train_time:|:\d+ t[er]l:)")
AFTER_LINES = re.compile(rf"(?m)^(?:sample:|{LINE})[ \t]*$")  # in our logs: a model's text
SETTING = re.compile(r"(?m)^(\w+) = (.*)$")
KEY_VALUE = re.compile(r"(?m)^([A-Za-z][\w ./%-]{0,40}): +(\S.*)$")
SCRIPT = re.compile(r"(?ma)^script: sha256 ([0-9a-f]{64}) (\d{1,9}) lines\s*\Z")
LISTING = re.compile(  # how a source begins
    r"(?m)^(?:import |from \S+ import |\"\"\"|'''|#!|def |class |with open\()")
SCANNER = re.compile(  # goes over Python's comments and strings, so a mark is found outside of them
    r"(?ms)#[^\n]*"
    r"|(\"\"\"|''')(?:\\.|[^\\])*?(?:\1|\Z)"
    r"|\"(?:\\.|[^\"\\\n])*\"?"
    r"|'(?:\\.|[^'\\\n])*'?"
    r"|^(?P<mark>step:\d+/\d+ [^\n]*train_time:[^\n]*|s:\d+ t[er]l:[^\n]*|Running [Pp]y|"
    rf"(?:{LINE}|sample:)[ \t]*$)")
FOREIGN_SETTINGS = re.compile(r"(?m)^class Hyperparameters.*:\n((?:[ \t].*\n|\n)*)")
FOREIGN_SETTING = re.compile(r"(?m)^[ \t]+(\w+)[ \t]*(?::[^=\n]+)?=[ \t]*([^#\n]*[^#\s])")
FOREIGN_VERSION = re.compile(
    r"(?i)\b(?:py)?(python|torch|triton|cuda|driver)(?: version)?:? (\d[\w.+]*)")
FOREIGN_GPU = re.compile(r"(?m)^\| +\d+ +((?:NVIDIA|Tesla|GeForce|AMD)(?: \S+)*) +(?:On|Off) +\|")

def marks_in(text):
    """What no Python can be, in order: separators, log lines and the like outside of strings."""
    return (match for match in SCANNER.finditer(text) if match["mark"])

def key_values(text):
    """`key: value` lines; the values of a key that comes several times, joined."""
    found = {}
    for key, value in KEY_VALUE.findall(text):
        found.setdefault(key.lower(), []).append(value.strip())
    return {key: "; ".join(values) for key, values in found.items()}

def own_part(text):
    """(settings, environment, source, step lines) of this project's log; None if it is none. The
    source ends after the number of lines that the environment names, in older logs at the first
    separator outside of its strings."""
    settings, *parts = SEPARATOR.split(text, 2)
    if len(parts) < 2 or not re.fullmatch(r"(?:\w+ = .*\n)+", settings):
        return None
    environment = key_values(parts[0])
    environment.pop("script", None)  # the source itself is compared
    gpus = [row.split(", ") for row in environment.pop("gpu", "").split("; ")]
    for column, *values in zip(*gpus):  # keep what does not change from minute to minute
        if not re.match(r"index|name|clocks\.current|temperature|$", column):
            environment[f"gpu {column}"] = ", ".join(sorted(set(values)))
    text = parts[1]
    counted = SCRIPT.search(parts[0])
    if counted:
        end = len(text) - len(text.split("\n", int(counted[2]))[-1])
        ends = [end, end + 1]  # + 1: the source may end in a newline, and one more is written
    else:
        ends = [mark.start() for mark in marks_in(text)]
    separator = next(filter(None, (SEPARATOR.match(text, end) for end in ends)), None)
    if not separator:
        return {}, {}, "", ""
    source = text[:separator.start()][:-1]
    if counted and hashlib.sha256(f"{source}\n".encode()).hexdigest() == counted[1]:
        source += "\n"  # which was not written
    lines = AFTER_LINES.split(text[separator.end():])[0]
    return dict(SETTING.findall(settings)), environment, source, lines

def foreign_parts(text):
    """Yield (settings, environment, source, step lines) of a published log, for each source in it;
    before the step lines there can be a source, an environment, both or none."""
    found = []   # environment, source, step lines
    start = 0    # of what stands before the step lines to come
    others = []  # marks in it
    for mark in marks_in(text):
        if mark["mark"].startswith("sample"):
            break
        if not LOG_LINE.match(mark["mark"]):
            others.append(mark.start())
            continue
        listing = LISTING.search(text, start, mark.start()) if others or not found else None
        if listing or not found:
            begin = listing.start() if listing else mark.start()
            end = next((at for at in others if at > begin), mark.start())
            found.append((text[start:begin] + text[end:mark.start()], text[begin:end], []))
        found[-1][2].append(mark["mark"])
        start = mark.end()
        others = []
    for said, source, lines in found:
        settings = FOREIGN_SETTINGS.search(source)
        settings = FOREIGN_SETTING.findall(settings[1]) if settings else []
        environment = {key.lower(): value for key, value in FOREIGN_VERSION.findall(said)[::-1]}
        gpus = Counter(FOREIGN_GPU.findall(said))
        if gpus:
            environment["gpus"] = ", ".join(f"{n}x {gpu.rstrip()}" for gpu, n in gpus.items())
        yield dict(settings), environment, source.rstrip("\n"), "\n".join(lines)

# ---- Runs ----------------------------------------------------------------------------------------

NUMBER = r"\d{1,15}(?:\.\d{0,15})?"
STEP = re.compile(
    rf"(?ma)^step:(\d{{1,15}})/(\d{{1,15}}) (?:(train|val)_loss:(nan|-?inf|-?{NUMBER}) )?"
    rf"(?:val_\w+:\S+ )*train_time:(nan|{NUMBER})(ms|s) step_avg:(nan|{NUMBER})ms"
    r"(?: tokens:(\d{1,18}))?(?: [^\s:]+:\S+)*[ \t]*$")
LLMC = re.compile(r"(?m)^s:(\d+) (tel|trl):(\S+)(?: lr:\S+ norm:\S+)?[ \t]*$")  # May 2024
LLMC_KINDS = {"tel": "val", "trl": "train"}
RESUMED = re.compile(r"(?m)^resumed\b.*$")
CHANGED = re.compile(  # what a result can depend on; the second form is older
    r"(?m)^(?:changed: (?!(?:--)?(?:name|records|save_every) )|note: resumed although )(.*)$")
# None where a step line does not say; kind is val, train or empty.
Line = namedtuple("Line", "step seconds tokens loss kind total ms_per_step")

class Run:
    """One run, as its log tells it: its step lines, what its file says of it, and the lines of text
    that they stand in. validations holds (step, seconds or None, tokens or None, loss)."""

    def __init__(self, name, path, lines, text, given, said, source):
        self.name = name
        self.path = str(path)
        self.hyperparameters = given
        self.environment = said
        self.source = source
        self.changed = CHANGED.findall(text)  # what was set anew when it was resumed
        self.end = key_values(LOG_LINE.split(text)[-1].partition("\n")[2])
        last = lines[-1]
        self.steps = last.step
        self.total = last.total  # the steps it set out to do
        self.seconds = last.seconds
        self.tokens = last.tokens
        self.untimed = untimed_steps(lines)  # at the start, that the clock left out
        self.validations = [
            line._replace(seconds=0.0)[:4] if line.step <= self.untimed > 0 else line[:4]
            for line in lines if line.kind == "val"]
        self.loss = self.validations[-1][3] if self.validations else None
        ends = [loss for loss in (last.loss, self.loss) if loss is not None]
        self.diverged = not np.isfinite(ends).all()
        self.finished = bool(self.validations) and self.validations[-1][0] >= (self.total or 0)
        timed = self.steps - self.untimed
        self.ms_per_step = 1000 * self.seconds / timed if self.seconds and timed > 0 else None
        devices = [said.get(key, "none") for key in ("gpus", "cpu", "device")]
        device = next((device for device in devices if device not in ("none", "0")), "")
        self.hardware = re.sub(r"^(\d+) ?x ", r"\1x ", device.replace("NVIDIA ", "")) or None
        self.torch = said.get("torch", "").partition(",")[0] or None
        self.ranks = said.get("ranks") or said.get("world size")
        self.seed = said.get("seed") or given.get("seed")
        # What must agree before times compare, and before losses do: data by content, not by path.
        self.place = (self.hardware, self.ranks, *(
            item for item in sorted(said.items())
            if item[0] in ("nodes", "threads") or item[0].startswith("gpu ")))
        shards = re.findall(r"val\S* (\d+ tokens(?: sha\w* \w+)?)", said.get("data", ""))
        self.validated_on = (given.get("val_tokens"), given.get("vocab_size"), *sorted(shards))

    def reached(self, target):
        """(step, seconds or None) where the validation loss first meets the target, on the straight
        line from the validation before; None if it never does."""
        hit = next((i for i, point in enumerate(self.validations) if point[3] <= target), None)
        if hit is None:
            return None
        step, seconds, _, loss = self.validations[hit]
        before = self.validations[hit - 1]
        if hit and math.isfinite(before[3]):
            back = (target - loss) / (before[3] - loss)
            step -= back * (step - before[0])
            if None not in (seconds, before[1]):
                seconds -= back * (seconds - before[1])
        return float(step), seconds

def split_runs(text):
    """The step lines of a text as one list a run: a step that goes back begins another run, except
    after a line that says the run was resumed; then the steps that are done again are replaced."""
    text = LLMC.sub(lambda line: f"step:{line[1]}/0 {LLMC_KINDS[line[2]]}_loss:{line[3]} "
                                 "train_time:nanms step_avg:nanms", text)
    runs = []
    validated = None
    for number, part in enumerate(RESUMED.split(text)):
        resumed = number > 0
        for step, total, kind, loss, time, unit, ms_per_step, tokens in STEP.findall(part):
            seconds = float(time) / (1000 if unit == "ms" else 1)
            line = Line(int(step), None if time == "nan" else seconds,
                        int(tokens) if tokens else None, float(loss) if kind else None, kind,
                        int(total) or None, float(ms_per_step))
            again = kind == "val" and line.step == validated
            if runs and resumed:
                runs[-1] = [old for old in runs[-1] if old.step < line.step]
            elif not runs or line.step < runs[-1][-1].step or again:
                runs.append([])
            runs[-1].append(line)
            validated = line.step if kind == "val" else validated
            resumed = False
    return runs

def untimed_steps(lines):
    """10 or 0: until January 2025 the first ten steps were free; the clock restarts at step 11 and
    step_avg leaves them out."""
    for line in lines:
        if line.step > 11 and line.seconds and line.ms_per_step > 0:
            return 10 if abs(line.step - 1000 * line.seconds / line.ms_per_step - 10) < 2 else 0
    return 0

def runs_in(path, name):
    """The runs a file holds, in order. Raises BadInput where it holds none."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from None
    if b"\0" in data[:4096]:
        raise BadInput(f"{path}: no log (not a text file)")
    text = data.decode("utf-8-sig", "replace").replace("\r\n", "\n")
    own = own_part(text)
    runs = []
    for *about, part in [own] if own else foreign_parts(text):
        runs += [Run(name, path, lines, part, *about) for lines in split_runs(part)]
    if not runs:
        raise BadInput(f"{path}: no log (no line of a step in it)")
    for number, run in enumerate(runs, 1):
        run.name = f"{name}#{number}" if len(runs) > 1 else name
    return runs

def read(arguments, complain):
    """The runs of one side, each file once. An argument is a file, a folder of logs or a pattern;
    complain(line) is called for what cannot be read."""
    paths = {}
    for argument in arguments:
        found = [argument]
        if os.path.isdir(argument):
            found = [*Path(argument).rglob("*.log"), *Path(argument).rglob("*.txt")]
        elif glob.has_magic(argument) and not os.path.exists(argument):
            found = glob.glob(argument, recursive=True)
        if not found:
            kind = ".log or .txt file in this folder" if os.path.isdir(argument) else "file matches"
            complain(f"{argument}: no {kind}")
        paths |= {os.path.realpath(path): str(path) for path in sorted(found)}
    folder = os.path.commonpath([os.path.dirname(real) for real in paths]) if paths else ""
    runs = []
    for real, path in paths.items():
        try:
            runs += runs_in(path, os.path.splitext(os.path.relpath(real, folder))[0])
        except BadInput as error:
            complain(str(error))
    return runs

# ---- Statistics ----------------------------------------------------------------------------------

def differ(values):
    """Whether there is a spread at all, beyond the rounding of an interpolation."""
    return len(values) > 1 and np.ptp(values) > 1e-9

def spread(values):
    """n, mean, SD and the 95 % interval of the mean (Student's t); None where n is too small."""
    mean = float(np.mean(values)) if values else None
    found = {"n": len(values), "mean": mean, "sd": None, "interval": None}
    if differ(values):
        low, high = stats.ttest_1samp(values, 0).confidence_interval()
        found |= {"sd": float(np.std(values, ddof=1)), "interval": (float(low), float(high))}
    elif len(values) > 1:
        found |= {"sd": 0.0, "interval": (mean, mean)}
    return found

def p_below(values, target):
    """p of a one-sided t-test that the mean is below the target; None where there is no spread."""
    test = stats.ttest_1samp(values, target, alternative="less") if differ(values) else None
    return float(test.pvalue) if test else None

def runs_needed(margin, sd, most=100_000):
    """The least number of runs that gives p < 0.01 at this margin below the target, or None."""
    n = np.arange(2, most + 1)
    enough = n[stats.t.sf(margin * np.sqrt(n) / sd, n - 1) < ALPHA]
    return int(enough[0]) if len(enough) else None

def welch(a, b):
    """Difference of the means of a and b, Welch's 95 % interval and two-sided p; None where they
    cannot be had."""
    found = {"difference": None, "interval": None, "p": None}
    if a and b:
        found["difference"] = float(np.mean(a) - np.mean(b))
    if min(len(a), len(b)) > 1 and (differ(a) or differ(b)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a side whose values are all the same
            test = stats.ttest_ind(a, b, equal_var=False)
            low, high = test.confidence_interval()
        found |= {"interval": (float(low), float(high)), "p": float(test.pvalue)}
    return found

AXES = {"training time": 1, "tokens": 2, "step": 0}  # where a point holds them

def curves(runs, axis):
    """(positions, losses) of each run over an axis, without the runs whose logs do not give it."""
    found = []
    for run in runs:
        points = [point for point in run.validations if math.isfinite(point[3])]
        positions = [point[AXES[axis]] for point in points]
        if points and None not in positions:
            found.append((np.array(positions, float), np.array([point[3] for point in points])))
    return found

def at_equal(runs_a, runs_b, axis, rows=5):
    """Rows of both sides' losses on the lines between validations, as far as every run goes."""
    sides = [curves(runs, axis) for runs in (runs_a, runs_b)]
    if not all(sides):
        return []
    end = min(positions[-1] for positions, _ in sides[0] + sides[1])
    chosen = [x for x in sides[0][0][0] if 0 < x <= end]  # where A is not interpolated
    if axis == "training time" or not chosen:
        chosen = np.linspace(0, end, rows + 1)[1:]
    found = []
    for x in chosen[::-math.ceil(len(chosen) / rows)][::-1]:
        a = [float(np.interp(x, *curve)) for curve in sides[0] if curve[0][0] <= x]
        b = [float(np.interp(x, *curve)) for curve in sides[1] if curve[0][0] <= x]
        if a and b:
            found.append({"x": float(x), "n": [len(a), len(b)], "a": float(np.mean(a)),
                          "b": float(np.mean(b)), **welch(a, b)})
    return found

# ---- One side, two sides -------------------------------------------------------------------------

RUN_ITSELF = {"seed", "name", "records", "command"}  # differ from run to run and are no setting
NONE = ["(not given)"]

def values_of(runs, kind):
    """key -> the sorted values it has over the runs; kind is "hyperparameters" or "environment"."""
    tables = [getattr(run, kind) for run in runs]
    found = {}
    for key in dict.fromkeys(key for table in tables for key in table if key not in RUN_ITSELF):
        found[key] = sorted({table.get(key, *NONE) for table in tables})
    return found

def known(runs, key):
    """The values of the runs that have one."""
    return [getattr(run, key) for run in runs if getattr(run, key) is not None]

def differences(runs_a, runs_b, kind):
    """Rows of key, values in B, values in A for what tells the sides apart."""
    in_a = values_of(runs_a, kind)
    in_b = values_of(runs_b, kind)
    rows = [[key, in_b.get(key, NONE), in_a.get(key, NONE)] for key in in_b | in_a]
    return [row for row in rows if row[1] != row[2]]

def side_of(label, runs, target):
    """Everything the tables, the picture and --json say about one side."""
    finished = [run for run in runs if run.finished and not run.diverged]
    used = [run for run in finished if not run.changed] or finished
    losses = [run.loss for run in used]
    loss = spread(losses)
    if target is not None:
        loss["p"] = p_below(losses, target)
        loss["needed"] = runs_needed(target - loss["mean"], loss["sd"]) if loss["sd"] else None
    seeds = Counter(run.seed for run in used if run.seed)
    shared = [f"{seed} ({n} runs)" for seed, n in seeds.items() if n > 1]
    distinct = set()
    for run in used:
        digits = [point[3] for point in run.validations]
        if len(digits) < 6:  # so few can agree by chance
            digits.append(run.seconds)
        distinct.add(tuple(digits))
    copies = len(used) - len(distinct)
    diverged = sum(run.diverged for run in runs)
    stopped = sum(not run.finished and not run.diverged for run in runs)
    mixed = [key for key, values in values_of(used, "hyperparameters").items() if len(values) > 1]
    if len({run.source for run in used}) > 1:
        mixed.append("source")
    if len({run.place for run in used}) > 1:
        mixed.append("hardware")
    said = []
    for run in runs:
        if run.changed:
            kept = "kept, for there is no other" if run in used else "left out of the statistics"
            said.append(f"run {run.name} of {label} was resumed with other settings, {kept}: "
                        + "; ".join(run.changed))
    said += [text for happened, text in (
        (shared, f"runs of {label} share a seed and are not independent: {', '.join(shared)}"),
        (copies, f"{copies} of the runs of {label} repeat another's losses digit for digit"),
        (diverged, f"{diverged} of the runs of {label} ended with a loss that is not finite"),
        (stopped, f"{stopped} of the runs of {label} stopped early, before a last loss: left out"),
        (mixed, f"runs of {label} differ from each other in: {', '.join(mixed)}")) if happened]
    return {"label": label, "runs": runs, "used": used, "loss": loss, "warnings": said,
            "seconds": spread(known(used, "seconds")), "mixed": mixed, "diverged": diverged,
            "independent": not shared and not copies}

def compare(a, b, target):
    """Everything that is said about two sides; source is a diff of each side's first run."""
    found = {kind: differences(a["runs"], b["runs"], kind)
             for kind in ("hyperparameters", "environment")}
    old = b["runs"][0]
    new = a["runs"][0]
    diff = difflib.unified_diff(old.source.splitlines(), new.source.splitlines(), f"B {old.name}",
                                f"A {new.name}", lineterm="", n=2)
    found["source"] = list(diff) if old.source and new.source else None
    for key in ("loss", "seconds"):
        found[key] = welch(known(a["used"], key), known(b["used"], key))
    found["equal"] = {axis: at_equal(a["used"], b["used"], axis)
                      for axis in ("step", "tokens", "training time")}
    batches = {run.tokens and run.tokens / max(run.steps, 1) for run in a["used"] + b["used"]}
    found["same_batch"] = len(batches) == 1
    files = {os.path.realpath(run.path) for run in a["runs"]}
    both = len(files & {os.path.realpath(run.path) for run in b["runs"]})
    found["warnings"] = [f"{both} of the files stand on both sides"] if both else []
    found["verdict"] = verdict(a, b, found, target)
    return found

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

def verdict(a, b, result, target):
    """A few sentences, never more than the runs support."""
    n_a = a["loss"]["n"]
    n_b = b["loss"]["n"]
    if result["warnings"]:
        return f"Nothing is shown: {result['warnings'][0]}."
    if min(n_a, n_b) < 2:
        return (f"Nothing is shown: {n_a} finished run{'s' * (n_a != 1)} of A against {n_b} of B, "
                "and spread takes at least 2 a side.")
    if not (a["independent"] and b["independent"]):
        return ("Nothing is shown: the runs of a side are not independent (see the warnings), so "
                "no p-value holds.")
    runs = a["used"] + b["used"]
    if min(a["seconds"]["n"], b["seconds"]["n"]) < 2 or not b["seconds"]["mean"]:
        time = "the logs give no times"
    elif len({run.place for run in runs}) > 1:
        time = "times do not compare, the hardware differs"
    elif len({run.untimed for run in runs}) > 1:
        time = "times do not compare, one side's first ten steps were free"
    else:
        percent = 100 * abs(result["seconds"]["difference"]) / b["seconds"]["mean"]
        time = claim("time", result["seconds"], f"{percent:.1f} %", ("faster", "slower"))
        known = runs[0].hardware
        time += " on the same kind of hardware" if known else "; the logs do not name the hardware"
    if len({run.validated_on for run in runs}) > 1:
        loss = "losses do not compare, the validation data or the vocabulary differ"
    else:
        size = f"{abs(result['loss']['difference']):.4f}"
        loss = claim("loss", result["loss"], size, ("better", "worse"))
    text = f"{time[0].upper()}{time[1:]}; {loss}; {n_a} against {n_b} runs."
    if target is not None:
        ps = [side["loss"]["p"] for side in (a, b)]
        sure = ["not shown" if p is None or p >= ALPHA else "yes" for p in ps]
        text += f" Below {target:g} at p < {ALPHA}: A {sure[0]}, B {sure[1]}."
    for side in (a, b):
        for happened, what in ((side["mixed"], "mixes settings"),
                               (side["diverged"], "has runs that diverged"),
                               (side["used"][0].changed, "has but runs resumed with new settings")):
            if happened:
                text += f" But {side['label']} {what}."
    return text

# ---- Text ----------------------------------------------------------------------------------------

MEASURES = {"loss": {"what": "val loss", "form": ".5f", "unit": ""},
            "seconds": {"what": "time", "form": ".3f", "unit": " s"}}
INTERVAL = "{interval[0]:{form}} .. {interval[1]:{form}}"

def filled(pattern, values):
    """The pattern with the values in it; a dash where one of them is None."""
    try:
        return pattern.format(**values)
    except TypeError:
        return "-"

def tokens_text(tokens):
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if tokens is not None and tokens >= size:
            return f"{tokens / size:.4g}{unit}"
    return filled("{tokens:.0f}", {"tokens": tokens})

def print_table(columns, rows):
    """columns: header -> pattern that a row's values fill. The first column is cut in its middle
    where lines would be over WIDTH."""
    lines = [list(columns)]
    for row in rows:
        lines.append([filled(pattern, row) for pattern in columns.values()])
    widths = [max(map(len, cells)) for cells in zip(*lines)]
    widths[0] = min(widths[0], max(6, WIDTH - sum(widths[1:]) - 2 * len(widths[1:])))
    for first, *others in lines:
        if len(first) > widths[0]:
            first = f"{first[:(widths[0] - 1) // 2]}…{first[-(widths[0] // 2):]}"
        print("  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]))

def print_side(side, target):
    runs = side["runs"]
    title = f"{side['label']}: {len(runs)} run{'s' * (len(runs) != 1)}"
    for name, values in (("hardware", {run.hardware for run in runs}),
                         ("ranks", {run.ranks for run in runs}),
                         ("torch", {run.torch for run in runs})):
        if values != {None}:
            title += f", {name} {' | '.join(sorted(value or '-' for value in values))}"
    print(textwrap.fill(title, WIDTH, subsequent_indent="  "))
    to_target = "to target" if target is None else f"to {target:g}"
    rows = []
    for run in runs:
        step, seconds = (target is not None and run.reached(target)) or (None, None)
        of = "" if run.finished or not run.total else f"/{run.total}"
        rows.append(vars(run) | {"of": of, "tokens": tokens_text(run.tokens), "target_step": step,
                                 "target_seconds": seconds})
    print_table({"run": "{name}", "val loss": "{loss:.4f}", "time": "{seconds:.2f} s",
                 "ms/step": "{ms_per_step:.2f}", "steps": "{steps}{of}", "tokens": "{tokens}",
                 "step": "{target_step:.0f}", to_target: "{target_seconds:.2f} s"}, rows)
    print()
    print_table({"over the runs": "{what}", "n": "{n}", "mean": "{mean:{form}}{unit}",
                 "SD": "{sd:{form}}{unit}", "95 % interval of the mean": INTERVAL},
                [MEASURES[key] | side[key] for key in MEASURES])
    print(textwrap.fill(target_text(side, target), WIDTH))
    for line in side["warnings"]:
        print(textwrap.fill(f"warning: {line}", WIDTH, subsequent_indent="  "))
    print()

def target_text(side, target):
    loss = side["loss"]
    if target is None:
        return "no target: these runs have a vocabulary of their own (--target sets one)"
    if not loss["n"]:
        return "no finished run with a finite loss, so nothing can be said about the target"
    if loss["p"] is None:
        why = "one run gives" if loss["n"] == 1 else "losses that do not differ at all give"
        return f"mean below {target:g}: {why} no p-value"
    text = f"mean below {target:g}: p = {loss['p']:.2g} (one-sided t-test)"
    if loss["mean"] >= target:
        return f"{text}; the mean is not below it, more runs alone will not help"
    if loss["p"] < ALPHA:
        also = "" if side["independent"] else "; but the runs are not independent"
        return f"{text}, below {ALPHA}{also}"
    more = loss["needed"] - loss["n"] if loss["needed"] else "more than 100,000"
    return f"{text}, not below {ALPHA}; {more} more runs at this margin and SD would give it"

def print_comparison(result, full_diff):
    for kind in ("hyperparameters", "environment"):
        print(f"{kind}: {'B -> A' if result[kind] else 'the same'}")
        for key, *sides in result[kind]:
            before, after = (" | ".join(values[:3] + ["..."][:len(values) - 3]) for values in sides)
            print(textwrap.fill(f"  {key}: {before} -> {after}", WIDTH, subsequent_indent=" " * 6))
        print()
    diff = result["source"] or []
    said = "missing in a log, no diff" if result["source"] is None else "the same"
    print(f"source of the first run of each side: {'B -> A' if diff else said}")
    shown = diff if full_diff else diff[:120]
    print("\n".join([*shown, ""]))
    if len(diff) > len(shown):
        print(f"... {len(diff) - len(shown)} more lines of diff (--full-diff)\n")
    for axis, rows in result["equal"].items():
        if not rows:
            print(f"loss at equal {axis}: not in the logs of both sides")
        elif axis == "tokens" and result["same_batch"]:
            print("loss at equal tokens: as at equal step, for steps have as many on both sides")
        else:
            print(f"loss at equal {axis} (interpolated between validations)")
            print_table({axis: "{x:.2f} s" if axis == "training time" else "{x:.0f}",
                         "n": "{n[0]}, {n[1]}", "A": "{a:.4f}", "B": "{b:.4f}",
                         "A - B": "{difference:+.4f}", "95 % interval": INTERVAL, "p": "{p:.2g}"},
                        [row | {"form": ".4f"} for row in rows])
    print()
    print_table({"at the end": "{what}", "A - B": "{difference:+{form}}{unit}",
                 "95 % interval (Welch)": INTERVAL, "p (two-sided)": "{p:.2g}"},
                [MEASURES[key] | result[key] for key in MEASURES])
    for line in result["warnings"]:
        print(f"warning: {line}")
    print("\n" + textwrap.fill(f"verdict: {result['verdict']}", WIDTH))

def typed(text):
    """A setting's value; the text itself where that is no plain value."""
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text
    return value

def plain(value):
    """For JSON: of a run its fields, of a source its SHA-256, and null for what is not finite."""
    if isinstance(value, Run):
        found = vars(value) | {"ranks": typed(value.ranks), "seed": typed(value.seed)}
        found["hyperparameters"] = {key: typed(of) for key, of in value.hyperparameters.items()}
        found["source"] = None
        if value.source:
            found["source"] = hashlib.sha256(value.source.encode()).hexdigest()
        return plain({key: found[key] for key in found if key not in ("place", "validated_on")})
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

# ---- Picture -------------------------------------------------------------------------------------

def names_of(sides):
    """What to call each side: its folder, or what its runs are named where that tells more."""
    folders = []
    names = []
    for side in sides:
        paths = [Path(run.path).resolve() for run in side["runs"]]
        folders.append({path.parent.name for path in paths})
        names.append({re.sub(r"^[\dTZ-]+_", "", path.stem) for path in paths})
    for found in (folders, names):
        if len(set.union(*found) - {RECORDS.name}) == len(sides) == sum(map(len, found)):
            return [name for (name,) in found]
    return [", ".join(sorted(of_side)[:2] + ["..."][:len(of_side) - 2]) for of_side in names]

def mean_curve(runs, axis):
    """The mean of the runs at each step that one validated, at the mean position of that step; the
    last point is the mean of their last points. None where no run gives the axis."""
    runs = [run for run in runs if curves([run], axis)]
    if not runs:
        return None
    steps = [steps for steps, _ in curves(runs, "step")]
    grid = np.unique(np.concatenate(steps))
    grid = grid[(grid >= max(of[0] for of in steps)) & (grid < min(of[-1] for of in steps))]
    found = []
    for values in zip(*curves(runs, axis)):  # positions, losses
        on_grid = [np.interp(grid, of, value) for of, value in zip(steps, values)]
        found.append([*np.mean(on_grid, axis=0), np.mean([value[-1] for value in values])])
    return np.array(found)

def plot(sides, target, path):
    """Validation loss over training time and tokens, above the whole run, below its last quarter: a
    colour a side, thin lines the runs, a thick one their mean."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = [run for side in sides for run in side["runs"]]
    used = [run for side in sides for run in side["used"]] or runs
    axes = [axis for axis in AXES if curves(used, axis)][:2]
    if not axes:
        raise BadInput(f"{path}: no picture, for the logs hold no validation loss")
    long = max(run.seconds or 0 for run in runs) >= 180
    units = {"training time": (60, "minutes") if long else (1, "seconds"),
             "tokens": (1e6, "millions"), "step": (1, "number")}
    names = names_of(sides)
    figure, panels = plt.subplots(2, len(axes), figsize=(6.4 * len(axes), 8), squeeze=False,
                                  layout="constrained")
    for column, axis in zip(panels.T, axes):
        scale, unit = units[axis]
        drawn = curves(used, axis)
        ends = [x[-1] for x, _ in drawn]
        for panel, start in zip(column, (0, 0.75 * min(ends))):
            # The first losses would eat the axis: they do not set its range.
            shown = [loss for x, y in drawn for loss in y[x >= max(start, 0.1 * max(ends))]]
            if start:
                shown += [np.interp(start, x, y) for x, y in drawn]
            if target is not None:
                panel.axhline(target, color="black", linewidth=1, linestyle="--",
                              label=f"target {target:g}")
                if abs(target - np.mean([min(shown), max(shown)])) < np.ptp(shown):
                    shown.append(target)
            room = 0.05 * np.ptp(shown) or 0.01
            for side, name, colour in zip(sides, names, ("tab:blue", "tab:orange")):
                for x, y in curves(side["runs"], axis):
                    panel.plot(x / scale, y, color=colour, linewidth=0.7, alpha=0.6)
                mean = mean_curve(side["used"], axis)
                if mean is not None:
                    n = len(side["used"])
                    panel.plot(mean[0] / scale, mean[1], color=colour, linewidth=2.4,
                               label=f"{side['label']}: {name}, mean of {n} run{'s' * (n != 1)}")
            panel.set(xlim=(start / scale, 1.01 * max(ends) / scale or 1),
                      ylim=(min(shown) - room, max(shown) + room),
                      xlabel=f"{axis} ({unit})", ylabel="validation loss")
            panel.grid(alpha=0.3)
    if panels[0][0].get_legend_handles_labels()[0]:
        panels[0][0].legend()
    figure.suptitle("Validation loss: " + " against ".join(names))
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: the picture cannot be written ({error})") from None
    finally:
        plt.close(figure)

# ---- The table of this repository's records ------------------------------------------------------

HEADER = ("| record | runs | val loss, mean (SD) | time, mean (SD) | ms/step | steps | tokens | "
          "hardware | torch | what was asked, and what came out |")

def tracked_logs(records):
    """The logs under records/ that git tracks. Raises BadInput where this is no git checkout."""
    if not Path(records).resolve().with_name(".git").exists():
        raise BadInput(f"{records}: its parent is not the top of a git checkout, which alone knows "
                       "what is a record")
    command = ["git", "-C", str(records), "ls-files", "-z", "*.log"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BadInput(f"{records}: git does not list the logs ({error})") from None
    return [Path(records, name) for name in sorted(found.split("\0")) if name]

def records_table(records, complain):
    """One row of markdown for each folder of tracked logs."""
    folders = {}
    for path in tracked_logs(records):
        try:
            folders.setdefault(path.parent, []).extend(runs_in(path, path.stem))
        except BadInput as error:
            complain(str(error))
    rows = [HEADER, re.sub(r"[^|]+", "---", HEADER)]
    for folder, runs in folders.items():
        name = folder.relative_to(records).as_posix()
        side = side_of(name, runs, None)
        used = side["used"]
        of = f" of {len(runs)}" if len(used) < len(runs) else ""
        cells = [f"[{name}]({name}/)", f"{len(used)}{of}"]
        for found, form, unit in ((side["loss"], ".4f", ""), (side["seconds"], ".1f", " s")):
            spread = "" if found["sd"] is None else f" ({found['sd']:{form}})"
            cells.append(filled(f"{{mean:{form}}}{unit}{spread}", found))
        timed = [run.ms_per_step for run in used if run.ms_per_step]
        cells.append(f"{np.mean(timed):.2f}" if timed else "-")
        for values in ([run.steps for run in used], [tokens_text(run.tokens) for run in used],
                       [run.hardware for run in used], [run.torch for run in used]):
            texts = sorted({str(value or "-").replace("|", "/") for value in values})
            cells.append(", ".join(texts) or "-")
        rows.append(f"| {' | '.join(cells)} | - |")
    return "\n".join(rows) if folders else "No records yet."

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

def update_readme(records, complain):
    readme = Path(records) / "README.md"
    table = records_table(records, complain)
    readme.write_text(readme_with_table(readme.read_text("utf-8"), table), "utf-8")

# ---- The command ---------------------------------------------------------------------------------

def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="*", metavar="A", help="logs, folders or quoted patterns")
    parser.add_argument("--vs", nargs="+", metavar="B", help="the same for the baseline")
    parser.add_argument("--target", type=float, help=f"validation loss to reach (default {TARGET}; "
                        "none where the logs name another vocabulary than GPT-2's)")
    parser.add_argument("--plot", metavar="FILE", help="draw the losses into a .png or .svg")
    parser.add_argument("--full-diff", action="store_true", help="all of the source diff")
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
    unread = []

    def complain(line):
        unread.append(line)
        print(line, file=sys.stderr)

    if options.update_readme:
        update_readme(RECORDS, complain)
        if not options.logs:
            return 1 if unread else 0
    sides = [read(given, complain) for given in (options.logs, options.vs) if given]
    if not all(sides):
        raise BadInput("no run to report" + (" on one of the sides" if len(sides) > 1 else ""))
    target = options.target
    vocabularies = {run.hyperparameters.get("vocab_size") for side in sides for run in side}
    if target is None and vocabularies <= {None, "50257", "50304"}:  # GPT-2's
        target = TARGET
    sides = [side_of(label, runs, target) for label, runs in zip("AB", sides)]
    result = compare(*sides, target) if len(sides) == 2 else None
    if options.plot:
        plot(sides, target, options.plot)
    if options.json:
        for side in sides:
            side["used"] = [run.name for run in side["used"]]
            side["target_reached"] = [None if target is None else run.reached(target)
                                      for run in side["runs"]]
        for row in result["hyperparameters"] if result else []:
            row[1:] = [list(map(typed, values)) for values in row[1:]]
        print(json.dumps(plain({"version": 1, "target": target, "sides": sides,
                                "comparison": result, "unread": unread}), indent=1))
    else:
        for side in sides:
            print_side(side, target)
        if result:
            print_comparison(result, options.full_diff)
    return 1 if unread else 0

if __name__ == "__main__":
    try:
        sys.stdout.reconfigure(errors="backslashreplace")  # for file names that are no text
        sys.exit(main())
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (BadInput, OSError) as error:
        sys.exit(f"compare.py: {error}")  # status 1
