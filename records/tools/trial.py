"""What race.py starts: runs of a script, and their exams."""

import glob
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from pathlib import Path
from time import monotonic

import numpy as np

from data.common import check_shard, write_shards
from records.tools import logs
from records.tools.load import ROOT, UserError, child, locked, require
from records.tools.launch import RACE

LAUNCH = ROOT / "records" / "tools" / "launch.py"
EXAM = ROOT / "records" / "tools" / "exam.py"
SHORTEST = 32_768  # tokens of a text that an exam needs
LEAST = 120  # seconds that any phase may take
# The first phase of a program, and those that begin with a line of this kind.
FIRST_PHASE = {"launch.py": "its import", "exam.py": "its exam"}
PHASES = {".* are checked$": "its checks", "log: ": "its warm-up", r"step:\d+/\d+ ": "a step"}
FIRST_LINE = b"the first line of the steps\n"  # among the names of files that a run opened

@dataclass
class Entry:
    """A script and its flags, and how its race stands."""
    name: str  # of its runs, and of their folder
    script: str
    flags: list[str]  # the preset first, if one is given
    text: str  # of the script
    done: dict = field(default_factory=dict)  # {seed: finished run}, the first of each seed
    runs: dict = field(default_factory=dict)  # those of them that the race has come to
    problem: str = ""  # why it cannot be raced
    dishonest: str = ""  # what an exam saw
    exams: dict = field(default_factory=dict)  # {seed: what the exam of its run found}
    decided: bool = False
    standing: str = ""  # after the last pair, in words
    kept: str = ""  # the file with its text that a race runs, whatever happens to the script
    note: str = ""  # of one line, for the ledger
    took: dict = field(default_factory=dict)  # {phase: the seconds of the longest one}
    allowed: dict = field(default_factory=dict)  # what the baseline's took, for a candidate
    phase: str = ""  # of its last program
    since: float = 0.0  # when that phase began
    late: str = ""  # where it took too long

    @property
    def sha256(self) -> str:
        return hash_of(self.text)

    @property
    def digest(self) -> str:
        """Of all in which an idea can differ from another one."""
        return hash_of(repr((self.text, self.flags)))

def hash_of(text: str) -> str:
    """As a log names a script."""
    return hashlib.sha256(text.encode()).hexdigest()

def script_text(script: str) -> str:
    try:
        return Path(script).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{script}: cannot be read ({error}); name a script in or below "
                        f"{ROOT}") from None

def patched(path: str, vs: str) -> tuple[str, dict]:
    """The text of a script, or what a patch makes of that of `vs`, and what stands in front of the
    patch: {"flags": those that only this idea gets, "why": a note of one line}."""
    text = script_text(path)
    if path.endswith(".py"):
        return text, {}
    head = dict(re.findall(r"(?m)^(flags|why): (.+)", re.split("(?m)^--- ", text)[0]))
    if "\n@@" not in f"\n{text}":  # flags make the whole idea
        return script_text(vs), head
    done = subprocess.run(["patch", "-sfr-", "-o-", vs], input=text, text=True, check=False,
                          capture_output=True)
    require(not done.returncode, f"{path}: is no patch of {vs}: {last_line(done.stderr)}")
    return done.stdout, head

def end_if_late(entry: Entry, process: subprocess.Popen):
    """Kills a program of which a phase takes far longer than the baseline's did. By their leash,
    what it has started ends with it."""
    while process.poll() is None:
        limit = max(LEAST, 3 * entry.allowed.get(entry.phase, inf))
        if time.monotonic() - entry.since > limit:
            entry.late = f", which took longer than {limit:.0f} s"
            process.kill()
        time.sleep(0.1)

def start(program: Path, entry: Entry, *words: str, watch=lambda line: None, **variables: str):
    """A program of records/tools for a script, which may import what lies beside it; (its status,
    its output with stderr, which is UTF-8 whatever the console shows). Each line of the output goes
    to watch() as it comes."""
    paths = [os.path.dirname(os.path.abspath(entry.script)), os.environ.get("PYTHONPATH")]
    env = os.environ | {"PYTHONIOENCODING": "utf-8:backslashreplace",
                        "PYTHONPATH": os.pathsep.join(filter(None, paths))} | variables
    output = ""
    with child("-W", "ignore", str(program), entry.kept, *words, env=env,
               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
               encoding="utf-8", errors="replace") as process:
        entry.phase, entry.since, entry.late = FIRST_PHASE[program.name], time.monotonic(), ""
        threading.Thread(target=end_if_late, args=(entry, process), daemon=True).start()
        for line in chain(process.stdout, [""]):
            output += line
            now = time.monotonic()
            entry.took[entry.phase] = max(entry.took.get(entry.phase, 0.0), now - entry.since)
            entry.phase = next((each for mark, each in PHASES.items() if re.match(mark, line)),
                               entry.phase)
            entry.since = now
            watch(line)
    return process.returncode, output

def run(entry: Entry, seed: str, records: Path, *more: str, watch=lambda line: None,
        **variables: str):
    """Trains with these flags more; the finished run. Beside its log it leaves what a clock of the
    race says, and which files it opened. If it fails, shows its output and raises UserError."""
    clock = logs.Clock()
    records.mkdir(parents=True, exist_ok=True)
    opened = records.absolute() / "opened"
    opened.write_bytes(b"")

    def see(line: str):
        before = clock.first
        clock.note(line, monotonic())
        if clock.first != before:
            with open(opened, "ab") as file:
                file.write(FIRST_LINE)
        watch(line)
    status, output = start(LAUNCH, entry, "--curve", *entry.flags,
                           f"--seed={seed}", f"--name={entry.name}", f"--records={records}", *more,
                           watch=see, **{RACE: str(opened)}, **variables)
    if status:
        print(logs.printable(output[-20_000:]), file=sys.stderr)
    require(not status, f"{entry.script} fails with seed {seed}, in {entry.phase}{entry.late}, see "
            "its output above: mend it, its flags (one that only a copy knows goes into one word "
            "with it) or this machine")
    one = finished(entry, logs.read([records])[0], [seed]).get(seed)
    require(one, f"{records}: there is no log of a finished run of {entry.script} with seed "
            f"{seed}; a race needs the seed, and a validation after the last step")
    clock.save(one)
    opened.replace(Path(one.path).with_suffix(".opened"))
    return one

def finished(entry: Entry, runs: list, seeds) -> dict:
    """{seed: run} of the finished runs of this script: the first of each seed."""
    found = {}
    for one in runs:
        same = one.source == entry.text
        whole = one.finished and not (one.diverged or one.changed or one.mixed)
        if same and whole and one.seed in seeds:
            found.setdefault(one.seed, one)
    return found

def last_line(output: str) -> str:
    return logs.printable(output.strip().rpartition("\n")[2])

def text_for(one, baselines: Path) -> dict:
    """Divides the validation text of a run into what the runs of a race are given, and what their
    exams use, beside the kept runs, which have read the same. `flags` are those of the runs, `exam`
    is the exam's shard or None."""
    settings = one.hyperparameters
    shards = [check_shard(logs.shard_in(row)[0], int(settings["vocab_size"]))
              for row in one.val_data]
    tokens = np.concatenate([np.empty(0, "<u2"), *shards])
    given = int(settings["val_tokens"]) + 1
    if len(tokens) - given < SHORTEST:
        given = len(tokens) - len(tokens) // 3
    left = len(tokens) - given
    if left < SHORTEST:
        return {"flags": [], "exam": None}
    folder = baselines / f"text_{hash_of(repr(one.validated_on))[:16]}"
    with locked(folder / ".lock"):
        if not (folder / "whole").exists():
            write_shards([tokens[:given]], folder / "given", 0, given)
            write_shards([tokens[given:]], folder / "kept", 0, left)
            (folder / "whole").touch()
    flags = [f"--val_files={glob.escape(str(folder))}/given_*.bin", f"--val_tokens={given - 1}"]
    return {"flags": flags, "exam": str(folder / "kept_000000.bin"), "left": left,
            "tokens": min(given - 1, left * 3 // 4)}

def examine(entry: Entry, one, *words: str) -> dict:
    """What the exam of a run found: its losses, and a problem if there is one."""
    status, output = start(EXAM, entry, one.path, *words)
    rows = re.findall(r"(?m)^\{.*\}$", output)
    if status or not rows:
        raise UserError(f"{entry.script}: its run cannot be examined{entry.late} "
                        f"({last_line(output)}); the same command tries it again")
    found = json.loads(rows[-1])
    found["problem"] = found["problem"] or opened_wrongly(one)
    return found

def opened_wrongly(one) -> str:
    """Which file a run has opened that it was not given, or validation data after the first step;
    nothing if there is none."""
    notes = Path(one.path).with_suffix(".opened")
    train, val = ([os.path.abspath(logs.shard_in(row)[0]) for row in rows] for rows in
                  (one.environment.get("data", "").split("; "), one.val_data))
    own = os.path.abspath(os.path.splitext(one.path)[0])
    allowed = {*train, *val, f"{own}.log"}
    for line in notes.read_bytes().splitlines(True) if notes.exists() else ():
        name = os.fsdecode(line.removesuffix(b"\n"))
        if line == FIRST_LINE:
            allowed -= {*val} - {*train}
        elif name not in allowed and not name.startswith(f"{own}/"):
            late = ", after its first step" * (name in val)
            return f"its run opened {name}, which it was not given{late}"
    return ""
