"""Reads the logs of NanoGPT speedruns: this project's, those that the speedrun has published since
October 2024, and captured consoles. The other programs here take the runs that it finds.

What a run did stands in its step lines. The source in a log may hold any text, also whole logs in
its strings, and none of that is ever read as a result: this project's logs give the SHA-256 of
their source; in the others, the source ends where the log names its Python.

A resumed run has a log of its own, whose head says `resumed: CHECKPOINT at step N`. The checkpoint
lies in a folder with the name of the log that the run continues, its parent. The logs of such a
chain are read as one run, which is called by the newest of them.
"""

import contextlib
import copy
import hashlib
import json
import math
import os
import re
from collections import namedtuple
from pathlib import Path

from data.common import UserError, require, walk

def printable(text):
    """Escapes what would steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode()
                   for c in text)

def short(text, width=40):
    """The printable text, cut to a width."""
    text = printable(text[:width + 1])
    return text if len(text) <= width else f"{text[:width - 3]}..."

def number(value, form, unit=""):
    return "-" if value is None else f"{value:{form}}{unit}"

def interval(bounds, form):
    return "-" if bounds is None else f"{bounds[0]:{form}} .. {bounds[1]:{form}}"

# ---- The sections of a log -----------------------------------------------------------------------

SEPARATOR = "=" * 100
OWN_HEAD = re.compile(rf"((?:\w+ = .*\n)+){SEPARATOR}\n((?:\w+:.*\n)+){SEPARATOR}\n")
VERSION = re.compile(r"(?i)\b(?:py)?(python|torch|triton|cuda|driver)(?: version)?:? (\d[\w.+]*)")
NVIDIA_SMI_ROW = re.compile(r"(?m)^\| +\d+ +(NVIDIA(?: \S+)*) +(?:On|Off) +\|")
PYTHON_LINE = re.compile(r"(?m)^Running [Pp]y")

Sections = namedtuple("Sections", "hyperparameters environment source steps")

def own_sections(text):
    """The Sections of a log of this project; None where it is none. A source may quote a whole log,
    so it ends at the last line of 100 '=', and its hash must be the one that the log gives."""
    head = OWN_HEAD.match(text)
    if not head:
        return None
    hyperparameters = dict(re.findall(r"(\w+) = (.*)\n", head[1]))
    environment = environment_of(head[2])
    sha256 = environment.pop("script", "").split()[1:2]  # of `sha256 HASH COUNT lines`
    printed, _, steps = text[head.end():].rpartition(f"\n{SEPARATOR}\n")
    for source in (printed, f"{printed}\n"):  # a last newline is not printed
        if [hashlib.sha256(source.encode()).hexdigest()] == sha256:
            whole_lines = steps[:steps.rfind("\n") + 1]
            return Sections(hyperparameters, environment, source, whole_lines)
    raise UserError("no log (its source is cut or changed: the SHA-256 is another; or several logs "
                    "stand in this file: split it, one file for each)")

def environment_of(text):
    """key -> value of `key: value` lines; the values of a key that comes several times, joined."""
    found = {}
    for key, value in re.findall(r"(\w+):(.*)\n", text):
        found.setdefault(key, []).append(value.strip())
    gpus = [row.split(", ") for row in found.pop("gpu", [])]
    for column, *values in zip(*gpus):
        if not column.startswith(("clocks.current", "temperature")):  # which change all the time
            found[f"gpu {column}"] = sorted(set(values))
    return {key: "; ".join(values) for key, values in found.items()}

def published_sections(text):
    """The Sections of a log of the speedrun's or of a captured console, as far as it has them: the
    source, the versions, nvidia-smi's table, the steps."""
    running = PYTHON_LINE.search(text)
    if not running:
        source, _, steps = text.rpartition(f"{SEPARATOR}\n")
        return Sections({}, {}, source.removesuffix("\n"), steps)
    source, steps = text[:running.start()], text[running.start():]
    top = steps.partition("\nstep:")[0]
    environment = {key.lower(): value for key, value in VERSION.findall(top)}
    gpus = NVIDIA_SMI_ROW.findall(top)
    if gpus:
        environment["gpus"] = f"{len(gpus)} x {gpus[0].rstrip()}"
    source = source.removeprefix(f"{SEPARATOR}\n").removesuffix(f"{SEPARATOR}\n")
    return Sections({}, environment, source.removesuffix("\n"), steps)

# ---- The steps -----------------------------------------------------------------------------------

# The form of all 2.28 million step lines that the speedrun has published until 2026, and of ours.
STEP = re.compile(r"(?ai)step:(\d{1,15})/(\d{1,15}) (?:(train|val)_loss:([-+.\da-z]+) )?"
                  r"(?:val_(?!loss:)\w+:\S+ )*train_time:([.\d]{1,18})(ms|s) "
                  r"step_avg:(nan|[.\d]{1,18})ms(?: tokens:(\d{1,18}))?"
                  r"(?: (?!tokens:|\w*loss:)\S+:\S+)*\s*")
WITHIN = re.compile(r".*step:\d+/\d+\s.*(?:loss|train_time):")
PARAMETERS = re.compile(r"(?ma)^model: (\d{1,15}) parameters")

Line = namedtuple("Line", "step total kind loss seconds ms_per_step tokens")

def finite(text):
    """The number; None if it is not finite."""
    value = float(text)
    return value if math.isfinite(value) else None

def line_of(text):
    """The Line of a step line; None where it is not understood."""
    match = STEP.fullmatch(text)
    if not match:
        return None
    step, total, kind, loss, time, unit, average, tokens = match.groups()
    try:
        return Line(int(step), int(total), kind, kind and finite(loss),
                    float(time) / (1000 if unit == "ms" else 1), finite(average),
                    tokens and int(tokens))
    except ValueError:  # more than one point in a number
        return None

def step_lines(text, first, anywhere):
    """The Lines in a text, whose first line has this number in the file. Raises UserError for a
    line that begins as a step and is not understood, so that no loss is lost in silence;
    `anywhere`: or has a step behind other text. Left out are half lines: what a full disk cut ends
    with "...", and a run that is alive or was killed has no end of the last line."""
    found = []
    rows = text.split("\n")
    for i, row in enumerate(rows):
        if row.endswith("..."):
            continue
        line = line_of(row)
        begins = re.match(r"step:\s*\d", row) or anywhere and WITHIN.match(row)
        if line:
            found.append(line)
        elif begins and i < len(rows) - 1:
            raise UserError(f"no log (line {first + i} begins as a step line and is not "
                            f"understood: {short(row, 80)!r}; mend it or take it out)")
    return found

def split_runs(lines):
    """The lines of each run. A run begins where the steps go back to where the first one began;
    lines that are said again, as in a summary, are left out."""
    runs = []
    for line in lines:
        last = runs[-1][-1].step if runs else math.inf
        if line.step < last and (not runs or line.step <= runs[0][0].step):
            runs.append([line])
        elif line.step >= last:
            runs[-1].append(line)
        else:
            require(line in runs[-1], f"no log (its steps go back from {last} to {line.step}, "
                    "where no run begins: two runs have written it at once)")
    return runs

# ---- Runs ----------------------------------------------------------------------------------------

RESUMED = re.compile(r"(?a)(.+) at step (\d{1,15})")
NO_SETTINGS = {"name", "records", "save_every"}  # whose change on resuming changes no result

def place_of(run):
    """What must stay the same where a run is resumed: its script, and what it trains on."""
    names = ["ranks", "threads", "host", "cpu", "gpus", "torch"]
    names += [name for name in run.environment if name.startswith("gpu ")]
    found = {"script": run.source} | {name: run.environment.get(name, "") for name in names}
    for name in ("host", "torch"):  # without the platform, without Python
        found[name] = found[name].partition(",")[0]
    return found

def differing(old, new):
    return [(name, old.get(name), new.get(name)) for name in old | new
            if old.get(name) != new.get(name)]

def shard_in(row):
    """(path, number of tokens and fingerprint) of a shard in a log."""
    return re.fullmatch(r"(.*?) ?((?:\d+ tokens.*)?)", row).groups()

class Clock:
    """A race's own clock of a run, whose lines it notes as they come. It runs from a validation to
    the last training step before the next one, so that it leaves out validation and saving."""

    def __init__(self):
        self.said = self.passed = 0.0  # seconds by the run's train_time, and by this clock
        self.first = None  # when the first line came
        self.untimed = 0.0  # seconds from then on that are not in `passed`
        self.before = None  # (seconds by the run, seconds now) of the line before

    def note(self, text, now):
        line = line_of(text)
        if line:
            self.first = now if self.first is None else self.first
            if self.before and line.kind != "val":
                self.said += line.seconds - self.before[0]
                self.passed += now - self.before[1]
            self.untimed = now - self.first - self.passed
            self.before = (line.seconds, now)
        elif text.startswith("checkpoint: ") and self.before:
            self.before = (self.before[0], now)

    def save(self, run):
        """Beside the run's log, so that whoever reads that finds it too."""
        run.clock = tuple(round(x, 3) for x in (self.said, self.passed, self.untimed))
        with contextlib.suppress(OSError):  # the disk is full
            Path(run.path).with_suffix(".clock").write_text(json.dumps(run.clock))

def clock_beside(path):
    """(seconds by the run, seconds by the race's clock, seconds while the run's clock stood) where
    a race noted them, else None."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        clock = tuple(map(float, json.loads(Path(path).with_suffix(".clock").read_text())))
        return clock if len(clock) == 3 and math.isfinite(sum(clock)) else None

class Run:
    """One run, as its log tells it; `follow` adds the logs that it continues."""

    def __init__(self, path, sections, lines):
        settings = sections.hyperparameters
        environment = sections.environment
        device = environment.get("gpus") or environment.get("cpu", "")
        parameters = PARAMETERS.search(sections.steps) if settings else None
        self.name = ""
        self.path = path
        self.logs = [(path, 0)]  # of its chain, the oldest first, each with the step it begins at
        self.missing = None  # why the beginning of the chain is not among them
        self.changed = []  # settings, on resuming
        self.mixed = []  # in what else the logs of the chain differ
        self.clock = clock_beside(path)
        self.hyperparameters = settings
        self.environment = environment
        self.source = sections.source
        self.parameters = int(parameters[1]) if parameters else None
        self.hardware = re.sub(r"^(\d+) x (NVIDIA )?", r"\1x ", device) or None
        self.torch = environment.get("torch", "").partition(",")[0] or None
        self.ranks = environment.get("ranks")
        self.seed = settings.get("seed")
        self.take(lines)
        # What must agree before times compare, and before losses do: data by content, not by path.
        gpus = [value for key, value in environment.items() if key.startswith("gpu ")]
        threads = environment.get("threads")
        self.timed_on = (self.hardware, self.ranks, threads, self.free_steps(), *gpus)
        # `path tokens fingerprint` of each shard that it validates on
        self.val_data = [*filter(None, environment.get("val_data", "").split("; "))]
        contents = [shard_in(row)[1] for row in self.val_data]  # not the paths
        self.validated_on = (settings.get("val_tokens"), settings.get("vocab_size"), *contents)

    def trained_on(self):
        """The training shards by content, not by path."""
        return [shard_in(row)[1] for row in self.environment.get("data", "").split("; ")]

    def resumed(self):
        """(checkpoint, step) from which this log continues another one, else None."""
        match = RESUMED.fullmatch(self.environment.get("resumed", ""))
        return (match[1], int(match[2])) if match else None

    def follow(self, before):
        """Continue the run `before`, up to the step at which this log begins."""
        _, step = self.resumed()
        own = self.lines
        lines = [line for line in before.lines if line.step <= step]
        validated = any(line.step == step and line.kind != "train" for line in lines)
        self.take(lines + [line for line in own if line.step >= step + validated])
        if own:
            self.total = own[-1].total  # `before` may have set out to do fewer steps
        self.finished = self.finished and bool(own) and self.steps >= self.total
        self.logs = [*before.logs, (self.path, step)]
        self.missing = before.missing
        settings = differing(before.hyperparameters, self.hyperparameters)
        self.changed = before.changed + [f"{name} was {old} and is {new}"
                                         for name, old, new in settings if name not in NO_SETTINGS]
        others = differing(place_of(before), place_of(self))
        self.mixed = list(dict.fromkeys(before.mixed + [name for name, _, _ in others]))

    def take(self, lines):
        """Set what follows from the step lines."""
        last = lines[-1] if lines else Line(0, 0, *[None] * 5)  # before the first step
        self.lines = lines
        self.steps = last.step
        self.total = last.total  # the steps it set out to do
        self.seconds = last.seconds
        self.tokens = last.tokens
        self.ms_per_step = last.ms_per_step
        self.validations = [line for line in lines if line.kind == "val"]
        self.loss = self.validations[-1].loss if self.validations else None
        self.finished = any(line.step >= self.total for line in self.validations[-1:])
        self.diverged = any(line.kind and line.loss is None for line in lines)

    def free_steps(self):
        """10 or 0: until January 2025 the first ten steps were outside the clock and step_avg."""
        timed = 1000 * self.seconds / self.ms_per_step if self.ms_per_step else self.steps
        return 10 if abs(self.steps - timed - 10) < 2 else 0

# ---- Chains of logs ------------------------------------------------------------------------------

class Reader:
    """Reads logs, each file once, and joins those of resumed runs. A parent is looked for beside
    the log, where the checkpoint's path says, and among the files in `paths`."""

    def __init__(self, paths):
        self.paths = paths
        self.found = {}  # real path -> the runs of a file, without the logs that they continue

    def pieces(self, path):
        file = os.path.realpath(path)
        if file not in self.found:
            try:
                text = Path(path).read_text(encoding="utf-8-sig", errors="replace")
                self.found[file] = runs_in(text, str(path))
            except OSError as error:
                raise UserError(f"{path}: cannot be read ({error.strerror})") from None
            except UserError as error:
                raise UserError(f"{path}: {error}") from None
        return self.found[file]

    def parent_of(self, piece):
        """The log that a piece continues, which has the name of the checkpoint's folder."""
        checkpoint, _ = piece.resumed()
        named = Path(f"{os.path.dirname(checkpoint)}.log")
        for path in (Path(piece.path).parent / named.name, named, *self.paths):
            with contextlib.suppress(UserError):
                if Path(path).stem == named.stem:
                    return self.pieces(path)[0]
        raise UserError(f"{named.name} is missing")

    def runs(self, path, name):
        """The runs in a file: one, or where there are several, NAME#1, NAME#2 and so on."""
        runs = [self.joined(piece) for piece in self.pieces(path)]
        for i, run in enumerate(runs):
            run.name = name if len(runs) == 1 else f"{name}#{i + 1}"
        return runs

    def joined(self, piece, newer=()):
        """A run with all logs that it continues; `newer` are those that continue it."""
        run = copy.copy(piece)
        if piece.resumed():
            try:
                parent = self.parent_of(piece)
                require(parent not in newer, f"{parent.path} continues this log")
                run.follow(self.joined(parent, [*newer, piece]))
            except UserError as error:
                run.missing = str(error)
                run.mixed = ["a missing log"]
        return run

def read(arguments):
    """The runs of one side, each file once, and a line for each input that is no log and for each
    log that is missing. A log that another one continues is a part of that run, and a run of its
    own as well if it was finished."""
    files = {}
    unread = []
    for argument in arguments:
        paths = [Path(argument)]
        if paths[0].is_dir():
            paths = sorted(folder / name for folder, names in walk(argument) for name in names
                           if name.endswith((".log", ".txt")))
        if not paths:
            unread.append(f"{argument}: no .log or .txt file in this folder")
        files |= {os.path.realpath(path): str(path) for path in paths}
    top = os.path.commonpath([os.path.dirname(file) for file in files]) if files else ""
    reader = Reader(files.values())
    runs = []
    for file, path in files.items():
        name = os.path.splitext(os.path.relpath(file, top))[0]
        try:
            runs += reader.runs(path, name)
        except UserError as error:
            unread.append(str(error))
    continued = {os.path.realpath(path) for run in runs for path, _ in run.logs[:-1]}
    runs = [run for run in runs if run.finished or os.path.realpath(run.path) not in continued]
    unread += [f"{run.path}: read without its beginning, {run.missing}; put that log beside this "
               "one, or name its folder too" for run in runs if run.missing]
    return runs, unread

def runs_in(text, path):
    own = own_sections(text)
    sections = own or published_sections(text)
    first = text.count("\n") - sections.steps.count("\n") + 1
    groups = split_runs(step_lines(sections.steps, first, anywhere=not own))
    require(own or groups, "no log (no line of a step in it)")
    require(not own or len(groups) < 2, "no log (its steps begin anew: two runs have written it)")
    # Where the steps of a source's strings were taken for the first run, a second one has its head.
    if len(groups) > 1 and sections.source:
        again = PYTHON_LINE.search(sections.steps, sections.steps.index("step:"))
        require(not again, "no log (several logs in one file: split it, one file for each)")
    return [Run(path, sections, group) for group in groups or [[]]]  # none before its first step

def read_run(path, name):
    """The run in a file that holds one."""
    runs = Reader(()).runs(path, name)
    require(len(runs) == 1, f"{path}: holds {len(runs)} runs, expected one; name a file of one run")
    return runs[0]
