"""What race.py and ablate.py start: runs of a script, one step that shows its mistakes, and the
check of its honesty. Each is started as run.sh starts any other."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from records.tools import logs
from records.tools.load import ROOT, UserError, child

LAUNCH = ROOT / "records" / "tools" / "launch.py"
HONESTY = ROOT / "records" / "tools" / "honesty.py"

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
    decided: int | None = None  # after how many pairs
    standing: str = ""  # after the last pair, in words
    kept: str = ""  # the file with its text that a race runs, whatever happens to the script

    @property
    def started(self) -> tuple[str, dict]:
        """The file that runs, and what lets it import what lies beside the script."""
        paths = [os.path.dirname(os.path.abspath(self.script)), os.environ.get("PYTHONPATH")]
        return self.kept or self.script, {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    @property
    def sha256(self) -> str:
        """As a log names the script."""
        return hashlib.sha256(self.text.encode()).hexdigest()

def script_text(script: str) -> str:
    try:
        return Path(script).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{script}: cannot be read ({error}); name a script in or below "
                        f"{ROOT}") from None

def start(program: Path, *words: str, watch=lambda line: None, **variables: str):
    """A program of records/tools; (its status, its output with stderr, which is UTF-8 whatever the
    console shows). Each line of the output goes to watch() as it comes."""
    env = os.environ | {"PYTHONIOENCODING": "utf-8:backslashreplace"} | variables
    output = ""
    with child("-W", "ignore", str(program), *words, env=env, stdin=subprocess.DEVNULL,
               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8",
               errors="replace") as process:
        for line in process.stdout:
            output += line
            watch(line)
    return process.returncode, output

def run(entry: Entry, seed: int, records: Path, *more: str, watch=lambda line: None,
        **variables: str):
    """Train with these flags more; (the finished run or None, the output, which ends with what is
    wrong)."""
    script, place = entry.started
    clock = logs.Clock()
    def note(line):
        clock.note(line, monotonic())
        watch(line)
    status, output = start(LAUNCH, script, "--save_every=0", "--curve", *entry.flags,
                           f"--seed={seed}", f"--name={entry.name}", f"--records={records}", *more,
                           watch=note, **place, **variables)
    found = {} if status else finished(entry, records, [seed])
    if not status and not found:
        output += (f"{records}: there is no log of a finished run of {entry.script} with seed "
                   f"{seed}; a race needs the seed, and a validation after the last step\n")
    elif found:
        clock.save(found[seed])
    return found.get(seed), output

def finished(entry: Entry, records: Path, seeds) -> dict:
    """{seed: run} of the finished runs of this script: the first of each seed."""
    found = {}
    for one in logs.read([records])[0]:
        same = hashlib.sha256(one.source.encode()).hexdigest() == entry.sha256
        whole = one.finished and not (one.diverged or one.changed or one.mixed)
        if same and whole and one.seed in map(str, seeds):
            found.setdefault(int(one.seed), one)
    return found

def one_step(entry: Entry, seed: int, records: Path) -> str:
    """The output of a script that fails in one step, on one process, so that a mistake has one
    traceback; nothing if it does not fail."""
    one, output = run(entry, seed, records, "--num_iterations=1", "--val_loss_every=0",
                      "--save_every=0", NPROC="1")
    shutil.rmtree(records, ignore_errors=True)
    return "" if one else output

def show(output: str):
    print(logs.printable(output[-20_000:]), file=sys.stderr)

def last_line(output: str) -> str:
    return logs.printable(output.strip().rpartition("\n")[2])

def dishonesty(entry: Entry) -> tuple[str, dict]:
    """What the check of its validation loss saw, nothing if it is honest; and of the weights that
    its runs start from, {"parameter shape": hash}, nothing if the script does not tell."""
    flags = [flag for flag in entry.flags if not flag.startswith("--text=")]
    script, place = entry.started
    status, output = start(HONESTY, script, "--weights", *flags, **place)
    weights = dict(re.findall(r"(?m)^weights: (\S+ \w+)_(\w+)$", output))
    # 3: it is not honest; another one: it could not be checked
    return f"{entry.script}: {last_line(output)}" if status else "", weights
