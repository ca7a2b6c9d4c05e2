"""What race.py and ablate.py start: runs of a script, one step that shows its mistakes, and the
check of its honesty. Each is started as run.sh starts any other."""

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from records.tools import logs
from records.tools.load import ROOT, UserError, require

LAUNCH = ROOT / "records" / "tools" / "launch.py"
HONESTY = ROOT / "records" / "tools" / "honesty.py"
LOG = re.compile(r"(?m)^log: (.+)$")

@dataclass
class Entry:
    """A script and its flags."""
    name: str  # of its runs, and of their folder
    script: str
    flags: list[str]  # the preset first, if one is given
    text: str  # of the script

    @property
    def sha256(self) -> str:
        """As a log names the script."""
        return hashlib.sha256(self.text.encode()).hexdigest()

@contextlib.contextmanager
def alone(folder: Path, say):
    """Refuses a second race in one folder, by a lock that the kernel releases."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "race.json", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: this race is running already; wait for it, or give this "
                            "one a --name of its own") from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            say(f"{folder} is on a file system without locks ({error.strerror}): make sure that "
                "you start this race only once")
        yield

def script_text(script: str) -> str:
    try:
        return Path(script).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{script}: cannot be read ({error}); name a script in or below "
                        f"{ROOT}") from None

def run(entry: Entry, seed: int, records: Path, watch=lambda line: None, more=(), **variables):
    """Train; (the log that the run names or None, its output). Each line of the output goes to
    watch() as it comes."""
    saves = any(flag.partition("=")[0] == "--save_every" for flag in entry.flags)
    flags = [*entry.flags, *([] if saves else ["--save_every=0"]), f"--seed={seed}",
             f"--name={entry.name}", f"--records={records}", *more]
    output = ""
    with subprocess.Popen([sys.executable, "-W", "ignore", str(LAUNCH), entry.script, *flags],
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace",
                          env=os.environ | variables) as program:
        try:
            for line in program.stdout:
                output += line
                watch(line)
        except BaseException:
            program.terminate()
            raise
    named = LOG.findall(output)
    if program.returncode or not named:
        print(logs.printable(output[-20_000:]), file=sys.stderr)
        return None, output
    return Path(named[-1]), output

def finished(entry: Entry, records: Path, seeds) -> dict:
    """{seed: run} of the finished runs of this script: the first of each seed."""
    found = {}
    for one in logs.read([records])[0]:
        same = hashlib.sha256(one.source.encode()).hexdigest() == entry.sha256
        whole = one.finished and not (one.diverged or one.changed or one.mixed)
        if same and whole and one.seed in map(str, seeds):
            found.setdefault(int(one.seed), one)
    return found

def one_step(entry: Entry, seed: int, records: Path):
    """Refuses a script that fails in one step. It is on one process, so that the traceback of a
    mistake is the last of its output. A script may refuse that number of steps, so that two are
    tried then."""
    for steps in (1, 2):
        more = [f"--num_iterations={steps}", "--val_loss_every=0", "--save_every=0"]
        with contextlib.redirect_stderr(io.StringIO()) as shown:
            path, output = run(entry, seed, records, more=more, NPROC="1")
        last = output.strip().rpartition("\n")[2]
        if path or "num_iterations" not in last:
            break
    print(shown.getvalue(), end="", file=sys.stderr)
    advice = "mend it and start the race again"
    if "unrecognized arguments" in last:
        advice = "flags that only the copies know go into --only_ours"
    require(path, f"{entry.script} fails in a run of {steps} step{'s' * (steps > 1)}, whose output "
            f"is above; {advice}")
    one = logs.read_run(path, path.stem)
    shutil.rmtree(records)
    require(one.finished and one.seed == str(seed), f"{entry.script}: its log says "
            f"seed = {one.seed} at step {one.steps}, expected --seed={seed} and a validation "
            "after the last step; a race needs both")

def why_not(entry: Entry, seed: int, records: Path) -> str:
    """The last line of the output of a script that fails in one step; nothing if it does not."""
    with contextlib.redirect_stderr(io.StringIO()) as output:
        try:
            one_step(entry, seed, records)
        except UserError as error:
            return logs.printable((output.getvalue().strip().splitlines() or [str(error)])[-1])
    return ""

def honesty(entry: Entry, *more: str):
    """What the check of a script's honesty ends with."""
    flags = [flag for flag in entry.flags if not flag.startswith("--text=")]
    return subprocess.run([sys.executable, "-W", "ignore", str(HONESTY), entry.script, *flags,
                           *more], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace", check=False)

def dishonesty(entry: Entry) -> str:
    """What the check of its validation loss saw; nothing if it is honest."""
    done = honesty(entry)
    if not done.returncode:  # 3: it is not honest; another one: it could not be checked
        return ""
    last = logs.printable(done.stdout.strip().rpartition("\n")[2])
    return f"{entry.script}: {last}"

def unequal_weights(entries, baseline: Entry):
    """A line for each script whose runs do not start where the baseline's of the same seed do:
    pairs differ more then, so that more of them are needed."""
    weights = {}  # {name of a parameter: shape_hash}; nothing where a script does not tell
    for one in (baseline, *entries):
        weights[one.name] = dict(re.findall(r"(?m)^weights: (\S+) (\S+)$",
                                            honesty(one, "--weights").stdout))
    theirs = weights.pop(baseline.name)
    for name, ours in weights.items():
        both = [key for key in ours if key in theirs
                and ours[key].partition("_")[0] == theirs[key].partition("_")[0]]
        other = [key for key in both if ours[key] != theirs[key]]
        if other:
            yield (f"{name} and {baseline.name} do not start from equal weights: of {len(both)} "
                   f"parameters of the same name and shape {len(other)} differ, such as "
                   f"{other[0]}; it takes more pairs to decide")
