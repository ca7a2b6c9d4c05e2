"""What race.py and ablate.py start: runs of a script, one step that shows its mistakes, the check
of its honesty, and the exam of a run. Each is started as run.sh starts any other."""

import ast
import glob
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import numpy as np

from data.common import check_shard, write_shards
from records.tools import logs
from records.tools.load import ROOT, UserError, child
from records.tools.watch import RACE

LAUNCH = ROOT / "records" / "tools" / "launch.py"
HONESTY = ROOT / "records" / "tools" / "honesty.py"
EXAM = ROOT / "records" / "tools" / "exam.py"
SHORTEST = 32_768  # tokens of a text that an exam needs
FIRST_LINE = "the first line of the steps"  # among the names of files that a run opened

@dataclass
class Entry:
    """A script and its flags, and how its race stands."""
    name: str  # of its runs, and of their folder
    script: str
    flags: list[str]  # the preset first, if one is given
    text: str  # of the script
    runs: dict = field(default_factory=dict)  # {seed: finished run}, the first of each seed
    problem: str = ""  # why it cannot be raced
    dishonest: str = ""  # what the check of its honesty saw
    weights: dict = field(default_factory=dict)  # hashes of those that its runs start from
    exams: dict = field(default_factory=dict)  # {seed: what the exam of its run found}
    decided: int | None = None  # after how many pairs
    standing: str = ""  # after the last pair, in words
    kept: str = ""  # the file with its text that a race runs, whatever happens to the script

    @property
    def sha256(self) -> str:
        return hash_of(self.text)

def hash_of(text: str) -> str:
    """As a log names a script."""
    return hashlib.sha256(text.encode()).hexdigest()

def script_text(script: str) -> str:
    try:
        return Path(script).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{script}: cannot be read ({error}); name a script in or below "
                        f"{ROOT}") from None

def start(program: Path, entry: Entry, *words: str, watch=lambda line: None, **variables: str):
    """A program of records/tools for a script, which may import what lies beside it; (its status,
    its output with stderr, which is UTF-8 whatever the console shows). Each line of the output goes
    to watch() as it comes."""
    paths = [os.path.dirname(os.path.abspath(entry.script)), os.environ.get("PYTHONPATH")]
    env = os.environ | {"PYTHONIOENCODING": "utf-8:backslashreplace",
                        "PYTHONPATH": os.pathsep.join(filter(None, paths))} | variables
    output = ""
    with child("-W", "ignore", str(program), entry.kept or entry.script, *words, env=env,
               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
               encoding="utf-8", errors="replace") as process:
        for line in process.stdout:
            output += line
            watch(line)
    return process.returncode, output

def run(entry: Entry, seed: int, records: Path, *more: str, notes: Path | None = None,
        watch=lambda line: None, **variables: str):
    """Train with these flags more; (the finished run or None, the output, which ends with what is
    wrong). The file `notes` gets the times at which the run opened files and began to train."""
    clock = logs.Clock()
    if notes:
        notes.unlink(missing_ok=True)
        variables[RACE] = str(notes.absolute())

    def see(line: str):
        clock.note(line, monotonic())
        watch(line)
    status, output = start(LAUNCH, entry, "--curve", *entry.flags,
                           f"--seed={seed}", f"--name={entry.name}", f"--records={records}", *more,
                           watch=see, **variables)
    if notes:
        with open(notes, "a", encoding="utf-8") as file:
            file.write(f"{clock.first} {FIRST_LINE!r}\n")
    found = {} if status else finished(entry, logs.read([records])[0], [seed])
    if not status and not found:
        output += (f"{records}: there is no log of a finished run of {entry.script} with seed "
                   f"{seed}; a race needs the seed, and a validation after the last step\n")
    elif found:
        clock.save(found[seed])
    return found.get(seed), output

def finished(entry: Entry, runs: list, seeds) -> dict:
    """{seed: run} of the finished runs of this script: the first of each seed."""
    found = {}
    for one in runs:
        same = one.source == entry.text
        whole = one.finished and not (one.diverged or one.changed or one.mixed)
        if same and whole and one.seed in map(str, seeds):
            found.setdefault(int(one.seed), one)
    return found

def one_step(entry: Entry, seed: int, records: Path):
    """A run of one step, on one process, so that a mistake has one traceback; (the run, nothing),
    or if the script fails, (None, its output)."""
    one, output = run(entry, seed, records, "--num_iterations=1", "--val_loss_every=0",
                      "--save_every=0", NPROC="1")
    shutil.rmtree(records, ignore_errors=True)
    return one, "" if one else output

def show(output: str):
    print(logs.printable(output[-20_000:]), file=sys.stderr)

def last_line(output: str) -> str:
    return logs.printable(output.strip().rpartition("\n")[2])

def dishonesty(entry: Entry) -> tuple[str, dict]:
    """What the check of its validation loss saw, nothing if it is honest; and of the weights that
    its runs start from, {"parameter shape": hash}, nothing if the script does not tell."""
    flags = [flag for flag in entry.flags if not flag.startswith("--text=")]
    status, output = start(HONESTY, entry, "--weights", *flags)
    weights = dict(re.findall(r"(?m)^weights: (\S+ \w+)_(\w+)$", output))
    # 3: it is not honest; another one: it could not be checked
    return f"{entry.script}: {last_line(output)}" if status else "", weights

# ---- The exam ------------------------------------------------------------------------------------

def text_for(one, folder: Path) -> dict:
    """Divides the validation text of a run into what the runs of a race are given, and what their
    exams use. `flags` are those of the runs, `exam` is the exam's shard or None."""
    rows = [logs.shard_in(row)[0] for row in one.val_data if "tokens" in row]
    settings = one.hyperparameters
    if not rows:
        return {"flags": [], "exam": None}
    tokens = np.concatenate([check_shard(row, int(settings["vocab_size"])) for row in rows])
    given = int(settings["val_tokens"]) + 1
    if len(tokens) - given < SHORTEST:
        given = len(tokens) - len(tokens) // 3
    if len(tokens) - given < SHORTEST:
        return {"flags": [], "exam": None}
    folder.mkdir(exist_ok=True)
    write_shards([tokens[:given]], folder / "given", 0, given)
    write_shards([tokens[given:]], folder / "kept", 0, len(tokens))
    flags = [f"--val_files={glob.escape(str(folder))}/given_*.bin", f"--val_tokens={given - 1}"]
    left = len(tokens) - given
    return {"flags": flags, "exam": str(folder / "kept_000000.bin"), "left": left,
            "tokens": min(given - 1, left * 3 // 4)}

def examine(entry: Entry, one, text: dict, place: int, notes: Path) -> dict:
    """What the exam of a run found: its losses, and a problem if there is one."""
    words = []
    if text["exam"]:
        words = [f"--text={text['exam']}", f"--place={place}", f"--tokens={text['tokens']}"]
    status, output = start(EXAM, entry, one.path, *words)
    rows = re.findall(r"(?m)^\{.*\}$", output)
    if status or not rows:
        raise UserError(f"{entry.script}: its run cannot be examined ({last_line(output)}); the "
                        "same command tries it again")
    found = json.loads(rows[-1])
    found["problem"] = found["problem"] or opened_wrongly(one, notes)
    return found

def opened_wrongly(one, notes: Path) -> str:
    """Which file a run has opened that it was not given, or validation data after the first step;
    nothing if there is none."""
    lines = []
    if notes.exists():
        lines = notes.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    events = sorted((float(time), ast.literal_eval(name)) for time, _, name in
                    (line.partition(" ") for line in lines))
    train, val = ([os.path.abspath(logs.shard_in(row)[0]) for row in rows] for rows in
                  (one.environment.get("data", "").split("; "), one.val_data))
    own = os.path.abspath(os.path.splitext(one.path)[0])
    begun = False
    for _, name in events:
        begun = begun or name == FIRST_LINE
        if name in val and begun and name not in train:
            return f"its run opened the validation text {name} after its first step"
        known = name in [*train, *val, f"{own}.log", FIRST_LINE] or name.startswith(f"{own}/")
        if not known:
            return f"its run opened {name}, which it was not given"
    return ""
