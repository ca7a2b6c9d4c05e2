"""Shows a run as it goes, for launch: what its ranks print, and at an early end why, and how to go
on. torchrun's own report of a failure, 40 lines, is left out."""

import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from records.tools import logs, sample
from records.tools.load import TORCHRUN, UserError, require

STEP_LINES = 2.0  # seconds from one line of a training step to the next, on a terminal


def say(text: str, file=None):
    with suppress(OSError):  # a run outlives its console
        print(f"run.sh: {text}", file=file, flush=True)


def end(program: subprocess.Popen):
    """Ctrl+C has reached the program too, which then ends by itself. A signal to this process alone
    has not."""
    with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        program.wait(timeout=3)
    program.terminate()
    program.wait()


def checkpoint_of(run: Path) -> Path:
    """A checkpoint itself; the newest one of a run, named by its log or its folder; or that of the
    newest run in a folder of logs."""
    return sample.find_checkpoint(max(run.glob("*.log"), default=run, key=lambda log: log.name))


def pass_errors(pipe, ended: dict):
    """Passes on what the ranks write to stderr. Keeps their last error, and the exit code that
    torchrun reports."""
    held = ""  # the first line of a traceback, until the second one shows whose it is
    for line in pipe:
        if found := re.search(r"failed \(exitcode: (-?\d+)\)", line):
            ended["status"] = int(found[1])
        if held and "runpy" in line:
            held = ""
            break
        if re.match(r"[EW]\d{4} .* torch/distributed/elastic/", line):
            continue
        if line.startswith("error: "):
            ended["error"] = line.rstrip("\n")
        ended["last"] = held + line
        held = ""
        if line.startswith("Traceback ("):
            held = line
            continue
        with suppress(OSError):
            print(ended["last"], end="", file=sys.stderr, flush=True)
    print(held, end="", file=sys.stderr)
    # What torchrun says then is of no interest, but for a rank that a signal has killed: the others
    # fail with it, at times before torchrun looks. It ends them by SIGTERM.
    for line in pipe:
        found = re.search(r"exitcode\s*: (-\d+)", line)
        if found and int(found[1]) != -signal.SIGTERM:
            ended["status"] = int(found[1])


def thinned(lines):
    """Most training steps are left out on a terminal. The log has every one."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    next_step = -math.inf
    for line in lines:
        if terminal and line.startswith("step:") and " train_loss:" in line:
            if time.monotonic() < next_step:
                continue
            next_step = time.monotonic() + STEP_LINES
        yield line


def train(path: str, flags: list[str], ranks: int) -> Path:
    """A run; its log. If it ends early, the last lines say why and how to go on, and this process
    ends with its status."""
    command = [path, *flags]
    if ranks > 1:
        command = [*TORCHRUN, f"--nproc_per_node={ranks}", *command]
    say(shlex.join(["python", *command]))
    # Whatever the console can show, the paths that a run prints arrive here as they are.
    program = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, encoding="utf-8", errors="surrogateescape",
                               env=os.environ | {"PYTHONIOENCODING": "utf-8:surrogateescape"})
    log = None
    ended = {}
    errors = threading.Thread(target=pass_errors, args=(program.stderr, ended), daemon=True)
    errors.start()
    try:
        for line in thinned(program.stdout):
            with suppress(OSError):
                print(line, end="", flush=True)
            if line.startswith("log: "):
                log = Path(line.removeprefix("log: ").rstrip("\n"))
            if line.startswith("model: "):
                say("warming up; where there is a GPU, this compiles the model, for minutes")
        status = program.wait()
        errors.join()
        status = 2 if "error" in ended else ended.get("status", status)
        what = ended.get("error", f"error: the run has failed with status {status}, see above")
        if status < 0:
            what = f"error: a process was killed by {signal.Signals(-status).name}"
            what += ", as when memory runs out" * (status == -signal.SIGKILL)
    except KeyboardInterrupt as e:
        end(program)
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
        checkpoint = checkpoint_of(log or Path("no log"))
    except (UserError, logs.BadInput):
        return "it has saved no checkpoint to go on from; the same command starts it again"
    script = [path] * (path != "train_gpt.py")
    return f"to go on: {shlex.join(['./run.sh', *script, f'--resume={checkpoint}'])}"
