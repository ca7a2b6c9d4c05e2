"""Reads the logs of NanoGPT speedruns: this project's, those that the speedrun has published since
October 2024, and captured consoles. compare.py judges the runs that are found here.

What a run did stands in its step lines. The source in a log may hold any text, also whole logs in
its strings, and none of that is ever read as a result: this project's logs give the SHA-256 and
the length of their source; in the others, the source ends where the log names its Python.
"""

import ast
import hashlib
import math
import os
import re
import warnings
from collections import namedtuple
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

class BadInput(Exception):
    """An error that the user can fix: the message is one line."""

# ---- The sections of a log -----------------------------------------------------------------------

SEPARATOR = "=" * 100
OWN_HEAD = re.compile(rf"((?:\w+ = .*\n)+){SEPARATOR}\n((?:\w+:.*\n)+){SEPARATOR}\n")
SETTING = re.compile(r"\w+ = ")
SCRIPT = re.compile(r"(?m)^script: sha256 ([0-9a-f]{64}) ([0-9]{1,9}) lines$")
VERSION = re.compile(r"(?i)\b(?:py)?(python|torch|triton|cuda|driver)(?: version)?:? (\d[\w.+]*)")
NVIDIA_SMI_ROW = re.compile(r"(?m)^\| +\d+ +(NVIDIA(?: \S+)*) +(?:On|Off) +\|")
PYTHON_LINE = re.compile(r"(?m)^Running [Pp]y")
JOINED = "no log (logs of different scripts in one file: split it, one file for each script)"

Sections = namedtuple("Sections", "hyperparameters environment source steps")

def own_sections(text):
    """The Sections of each of this project's logs that a file joins; empty where it holds none."""
    found = []
    while head := OWN_HEAD.match(text):
        hyperparameters = dict(re.findall(r"(\w+) = (.*)\n", head[1]))
        source, steps = source_and_steps(text[head.end():], SCRIPT.search(head[2]))
        steps, text = split_at_head(steps)
        found.append(Sections(hyperparameters, environment_of(head[2]), source, steps))
    if found and text:
        raise BadInput("no log (a line of 100 '=' among its steps begins no other log)")
    return found

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

def split_at_head(steps):
    """The steps of one log, and what follows from the head of the next log on, which begins with
    the settings above the first separator."""
    before, separator, _ = steps.partition(f"\n{SEPARATOR}\n")
    if not separator:
        return steps, ""
    lines = before.split("\n")
    first = len(lines)
    while first and SETTING.match(lines[first - 1]):
        first -= 1
    own = "".join(f"{line}\n" for line in lines[:first])
    return own, steps[len(own):]

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
    """The Sections of each log that a file joins, of the speedrun's or a captured console's, as
    far as it has them: the source, the versions, nvidia-smi's table, the steps."""
    running = PYTHON_LINE.search(text)
    if not running:
        source, _, steps = text.rpartition(f"{SEPARATOR}\n")
        return [Sections({}, {}, source.strip("=\n"), steps)]
    source = text[:running.start()].strip("=\n")
    body = text[running.start():]
    bodies = body.split(source) if source else [body]  # the source stands once, or for each run
    if len(bodies) > 1:
        require_program(source)
    return [Sections({}, versions_of(part), source, part) for part in bodies]

def versions_of(body):
    top = body.partition("\nstep:")[0]
    environment = {key.lower(): value for key, value in VERSION.findall(top)}
    gpus = NVIDIA_SMI_ROW.findall(top)
    if gpus:
        environment["gpus"] = f"{len(gpus)} x {gpus[0].rstrip()}"
    return environment

def require_program(source):
    """Where the text before "Running Python" is no whole program, that line stands in one of its
    strings, and so may the steps after it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise BadInput("no log (several runs, but the source does not end before them)") from None

# ---- The steps -----------------------------------------------------------------------------------

NUMBER = r"\d{1,15}(?:\.\d{0,15})?"
LOSS = rf"nan|-?inf|-?{NUMBER}"
STEP = re.compile(
    r"(?ma)^step:(?P<step>\d{1,15})/(?P<total>\d{1,15}) "
    rf"(?:(?P<kind>train|val)_loss:(?P<loss>{LOSS}) )?(?:val_\w+:\S+ )*"
    rf"train_time:(?P<time>{NUMBER})(?P<unit>ms|s) step_avg:(?P<average>nan|{NUMBER})ms"
    rf"(?: tokens:(?P<tokens>\d{{1,18}}))?(?: lr:(?P<lr>{NUMBER}))?"
    r"(?: window:(?P<window>\d{1,18}))?(?: .*)?$")
CHANGED = re.compile(  # on resuming; not where the run lies
    r"(?m)^changed: (?!(?:name|records|save_every) )(.*)$")
RESUMED = re.compile(
    r"(?ma)^resumed: step \d+ at \S+, on (\d{1,9}) rank\(s\) of (\S+)(?: with torch (\S+))?$")
PARAMETERS = re.compile(r"(?ma)^model: (\d{1,15}) parameters")
VAL_LOSS = "val_loss"

Line = namedtuple("Line", "step total kind loss seconds ms_per_step tokens lr window")

def finite(text):
    """The number; None if it is not finite."""
    value = float(text)
    return value if math.isfinite(value) else None

def step_lines(text, loss_name=VAL_LOSS):
    """The Lines in a text; validations have the loss of this name, and lines without it, none."""
    other = re.compile(rf"(?a) {re.escape(loss_name)}:({LOSS})(?= |$)")
    found = []
    for match in STEP.finditer(text):
        step, total, kind, loss, time, unit, average, tokens, lr, window = match.groups()
        if loss_name != VAL_LOSS and kind != "train":
            said = other.search(match[0])
            kind = "val" if said else None
            loss = said and said[1]
        seconds = float(time)
        if unit == "ms":
            seconds /= 1000
        found.append(Line(int(step), int(total), kind, loss and finite(loss), seconds,
                          finite(average), tokens and int(tokens), lr and finite(lr),
                          window and int(window)))
    return found

def split_runs(lines):
    """The lines of each run. A run begins where the steps go back to where the first one began;
    lines that are said again, as in a summary, are left out."""
    if all(line.step >= before.step for before, line in pairwise(lines)):
        return [lines] if lines else []
    runs = []
    seen = set()
    for line in lines:
        if not runs or runs[-1][-1].step > line.step <= runs[0][0].step:
            runs.append([line])
            seen = set()
        elif line in seen:
            continue
        elif line.step >= runs[-1][-1].step:
            runs[-1].append(line)
        else:
            raise BadInput(f"no log (its steps go back from {runs[-1][-1].step} to {line.step}, "
                           "where no run begins: two runs have written it at once)")
        seen.add(line)
    return runs

# ---- Runs ----------------------------------------------------------------------------------------

@dataclass
class Where:
    """What a run trained on; `mixed` if it was resumed on something else."""
    hardware: str | None
    torch: str | None
    ranks: str | None
    mixed: bool

def where_it_ran(environment, steps):
    """From the environment, and from the `resumed:` lines, which say where it went on."""
    device = environment.get("gpus") or environment.get("cpu", "")
    ranks = [environment.get("ranks")]
    hosts = [environment.get("host", "").partition(",")[0]]
    torches = [environment.get("torch", "").partition(",")[0]]
    for rank_count, host, torch in RESUMED.findall(steps):
        ranks.append(rank_count)
        hosts.append(host)
        torches.append(torch or torches[-1])
    places = [list(dict.fromkeys(filter(None, values))) for values in (ranks, hosts, torches)]
    return Where(hardware=re.sub(r"^(\d+) x (NVIDIA )?", r"\1x ", device) or None,
                 torch=" then ".join(places[2]) or None, ranks=" then ".join(places[0]) or None,
                 mixed=any(len(values) > 1 for values in places))

class Run:
    """One run, as its log tells it."""

    def __init__(self, name, path, sections, lines):
        settings = sections.hyperparameters
        environment = sections.environment
        where = where_it_ran(environment, sections.steps)
        parameters = PARAMETERS.search(sections.steps) if settings else None
        self.name = name
        self.path = path
        self.changed = CHANGED.findall(sections.steps)
        self.reached = None  # where it meets the target
        self.hyperparameters = settings
        self.environment = environment
        self.source = sections.source
        self.parameters = int(parameters[1]) if parameters else None
        self.hardware = where.hardware
        self.torch = where.torch
        self.ranks = where.ranks
        self.mixed = where.mixed
        self.seed = settings.get("seed")
        self.take(lines)
        # What must agree before times compare, and before losses do: data by content, not by path.
        gpus = [value for key, value in environment.items() if key.startswith("gpu ")]
        threads = environment.get("threads")
        self.timed_on = (self.hardware, self.ranks, threads, self.free_steps(), *gpus)
        shards = re.findall(r"val\S* (\d+ tokens)", environment.get("data", ""))
        self.validated_on = (settings.get("val_tokens"), settings.get("vocab_size"), *shards)

    def take(self, lines):
        """Set what follows from the step lines."""
        last = lines[-1] if lines else Line(0, 0, *[None] * 7)  # before the first step
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

    def end_at(self, step):
        """Forget what came after a step, as if the run had set out to do so many."""
        self.take([line._replace(total=step) for line in self.lines if line.step <= step])

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

def read(arguments, loss_name=VAL_LOSS):
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
            runs += read_file(path, name, loss_name)
        except BadInput as error:
            unread.append(str(error))
    return runs, unread

def read_file(path, name, loss_name=VAL_LOSS):
    """The runs in a file: one, or where there are several, NAME#1, NAME#2 and so on."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig", "replace").replace("\r\n", "\n")
        runs = runs_in(text, str(path), loss_name)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from None
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None
    for i, run in enumerate(runs):
        run.name = name if len(runs) == 1 else f"{name}#{i + 1}"
    return runs

def runs_in(text, path, loss_name):
    runs = []
    own = own_sections(text)
    for sections in own or published_sections(text):
        groups = split_runs(step_lines(sections.steps, loss_name))
        if own and len(groups) > 1:
            raise BadInput("no log (its steps begin anew: two runs have written it)")
        if len(groups) > 1 and sections.source:
            require_program(sections.source)
            first = STEP.search(sections.steps).start()
            if PYTHON_LINE.search(sections.steps, first):
                raise BadInput(JOINED)
        if own and not groups:
            groups = [[]]  # it is alive, before its first step
        runs += [Run("", path, sections, group) for group in groups]
    if not runs:
        raise BadInput("no log (no line of a step in it)")
    return runs

def read_run(path, name):
    """The run in a file that holds one."""
    runs = read_file(path, name)
    if len(runs) > 1:
        raise BadInput(f"{path}: holds {len(runs)} runs, expected one; name a file of one run")
    return runs[0]
