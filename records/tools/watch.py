"""Shows a run as it goes, for launch: what its ranks print, and at an early end why, and how to go
on. torchrun's own report of a failure, 40 lines, is left out."""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

from records.tools import sample
from records.tools.leash import OPENED
from records.tools.load import LEASH, TORCHRUN, UserError, child, require

RACE = "RACE_OPENED"  # in the environment of a race's run: where its ranks note what they open

def say(text: str, file=None):
    with suppress(OSError):  # a run outlives its console
        print(f"run.sh: {text}", file=file, flush=True)

def pass_errors(pipe, ended: dict):
    """Passes on what the ranks write to stderr. Keeps their last error, and the exit code that
    torchrun reports."""
    held = ""  # the first line of a traceback, until the second one shows whose it is
    is_report = False  # torchrun's own traceback has begun, which its report follows
    codes = []
    for line in pipe:
        codes += map(int, re.findall(r"exitcode\s*: (-?\d+)", line))
        is_report = is_report or held and "runpy" in line
        if is_report or re.match(r"[EW]\d{4} .*torch/distributed/elastic/", line):
            continue
        ended["last"] = held + line
        held = line if line.startswith("Traceback (") else ""
        if line.startswith("error: "):
            ended["error"] = line.rstrip("\n")
        with suppress(OSError):
            print(ended["last"] if not held else "", end="", file=sys.stderr, flush=True)
    # Where a signal has killed a rank, the others fail with it, or torchrun ends them by SIGTERM.
    killed = [code for code in codes if code < 0 and code != -signal.SIGTERM]
    ended["status"] = (killed + codes + [None])[0]

def show(lines):
    """Prints what a run prints, and yields it. On a terminal, one line that tqdm keeps up to date
    stands for the training steps, with the time left. The log has every step."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    bar = None
    for line in lines:
        step = re.match(r"step:(\d+)/(\d+) train_(loss:\S+)", line) if terminal else None
        with suppress(OSError):  # a run outlives its console
            if step:
                done, total = int(step[1]), int(step[2])
                bar = bar or tqdm(total=total, initial=done - 1, file=sys.stdout, leave=False,
                                  dynamic_ncols=True, unit="step")
                bar.set_postfix_str(step[3].replace(":", " "), refresh=False)
                bar.update(done - bar.n)
            else:
                if bar:
                    bar.clear()
                print(line, end="", flush=True)
        yield line
    with suppress(OSError):
        if bar:
            bar.close()

def train(path: str, flags: list[str], ranks: int) -> Path:
    """A run; its log. If it ends early, the last lines say why and how to go on, and this process
    ends with its status."""
    torchrun = [*TORCHRUN, f"--nproc_per_node={ranks}"] if ranks > 1 else []
    say(shlex.join(["python", *torchrun, path, *flags]))
    noted = {"PYTHONIOENCODING": "utf-8:surrogateescape"}
    if RACE in os.environ:
        noted[OPENED] = os.environ[RACE]
    leashed = [*torchrun, *[LEASH] * (ranks > 1), path, *flags]
    log = None
    ended = {}
    try:
        # Whatever the console can show, the paths that a run prints arrive here as they are.
        with child(*leashed, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
                   errors="surrogateescape",
                   env=os.environ | noted) as program:
            errors = threading.Thread(target=pass_errors, args=(program.stderr, ended), daemon=True)
            errors.start()
            for line in show(program.stdout):
                if line.startswith("log: "):
                    log = Path(line.removeprefix("log: ").rstrip("\n"))
                if line.startswith("model: "):
                    say("warming up; where there is a GPU, this compiles the model, for minutes")
            errors.join()
        status = program.returncode and (
            2 if "error" in ended else ended.get("status") or program.returncode)
        what = ended.get("error", f"error: the run has failed with status {status}, see above")
        if status < 0:
            what = f"error: a process was killed by {signal.Signals(-status).name}"
            what += ", as when memory runs out" * (status == -signal.SIGKILL)
    except KeyboardInterrupt as e:
        status = 128 + (e.args[0] if e.args else signal.SIGINT)
        what = "interrupted"
    if status:
        with suppress(OSError):
            if ended.get("last", "").rstrip("\n") != what:
                print(what, file=sys.stderr, flush=True)
        say(how_to_go_on(path, log), file=sys.stderr)
        sys.exit(status if status > 0 else 128 - status)
    require(log, f"{path} prints no line `log: PATH`, which ./run.sh reads; restore that")
    return log

def how_to_go_on(path: str, log: Path | None) -> str:
    try:
        checkpoint = sample.find_checkpoint(log or Path("no log"))
    except UserError:
        return "it has saved no checkpoint to go on from; the same command starts it again"
    script = [path] * (path != "train_gpt.py")
    return f"to go on: {shlex.join(['./run.sh', *script, f'--resume={checkpoint}'])}"
