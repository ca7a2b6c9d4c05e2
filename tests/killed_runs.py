"""Run as a program: trains one run that is killed again and again, at chosen places and at random
times, and resumed each time.

    python tests/killed_runs.py SCRIPT RECORDS FLAGS...

Every attempt is a forked child that SIGKILL ends without warning. The first begins the run with
these flags, the others continue it by --resume alone. Prints a JSON object {place: kills}."""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from conftest import load_script

SCRIPT = load_script(Path(sys.argv[1]), "train_gpt")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_call(owner, name: str, number: int, after: bool):
    """Replaces owner.name by a function that kills the process at its call of that number."""
    original = getattr(owner, name)
    calls = [0]

    def deadly(*args, **kwargs):
        calls[0] += 1
        if calls[0] == number and not after:
            die()
        result = original(*args, **kwargs)
        if calls[0] == number:
            die()
        return result

    setattr(owner, name, deadly)


STEPS = 90  # of the run
RANDOM_KILLS = 12
# Kills in a step come in the fourth one of an attempt, after its first checkpoint; the warmup makes
# one step more.
STEP = 1 + 3 + 1


def die_in_optimizer(index: int, phase: str):
    """Kills in a step, when the optimizer of that index is about to begin this phase."""
    build = SCRIPT.build_optimizers

    def deadly(*args):
        optimizers = build(*args)
        die_at_call(optimizers[index], phase, STEP, after=False)
        return optimizers

    SCRIPT.build_optimizers = deadly


def half_a_checkpoint(number: int):
    """Kills while the checkpoint of that number is half on the disk."""
    original = torch.save
    calls = [0]

    def deadly(payload, file):
        original(payload, file)
        calls[0] += 1
        if calls[0] == number:
            file.flush()
            os.truncate(file.fileno(), os.fstat(file.fileno()).st_size // 2)
            die()

    torch.save = deadly


def half_a_line(begins: str, number: int = 1, share: float = 0.5):
    """Kills when this share of the lines that wait for the log is written, as soon as the line of
    that number among those that begin so is one of them."""
    original = SCRIPT.RunLog.write
    lines = [0]

    def deadly(log, text, console=True):
        lines[0] += text.startswith(begins)
        if lines[0] == number and not log.held:
            waiting = log.waiting + text.encode()
            log.file.write(waiting[:int(len(waiting) * share)])
            die()
        original(log, text, console)

    SCRIPT.RunLog.write = deadly


PLACES = {
    "before the first step":
        lambda: die_at_call(SCRIPT, "warm_up", 1, after=True),
    "in a step, between forward and backward":
        lambda: die_at_call(torch.Tensor, "backward", 2 * STEP, after=False),
    "in a step, before the updates":
        lambda: die_in_optimizer(0, "begin"),
    "in a step, between two updates":
        lambda: die_in_optimizer(1, "update"),
    "in a step, between two finished optimizers":
        lambda: die_in_optimizer(-1, "finish"),
    "in a validation":
        lambda: die_at_call(SCRIPT, "evaluate", 3, after=False),
    "after a validation":
        lambda: die_at_call(SCRIPT, "evaluate", 3, after=True),
    "gathering a checkpoint":
        lambda: die_at_call(SCRIPT, "gather_training_state", 3, after=True),
    "half a checkpoint written":
        lambda: half_a_checkpoint(2),
    "before the rename":
        lambda: die_at_call(os, "replace", 2, after=False),
    "after the rename, before the oldest is deleted":
        lambda: die_at_call(os, "replace", 3, after=True),
    "between a checkpoint and its line in the log":
        lambda: half_a_line("checkpoint: ", share=0),
    "half a step's line written":
        lambda: half_a_line("step:", 6),
    "the log cut back, not yet written to":
        lambda: die_at_call(SCRIPT.RunLog, "release", 1, after=True),
    "half the line of a resumption written":
        lambda: half_a_line("resumed: "),
}
AT_RANDOM = {  # at the latest here, so that the run does not end before the kills do
    "at random":
        lambda: half_a_line(f"step:{STEPS - 4}/"),
}
LAST = {
    "half the last validation's line written":
        lambda: half_a_line(f"step:{STEPS}/{STEPS} val_loss"),
    "before the run's result is written":
        lambda: half_a_line("final_val_loss: ", share=0),
}


def attempt(flags: list[str], place: str | None, delay: float) -> int:
    """Status of a child that trains and is killed at the place, or before after delay seconds."""
    child = os.fork()
    if child == 0:
        try:
            if place:
                (PLACES | AT_RANDOM | LAST)[place]()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            SCRIPT.main(flags)
        except BaseException as e:
            print(repr(e), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + delay
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.001)


def main():
    records = Path(sys.argv[2])
    flags = [*sys.argv[3:], f"--records={records}", f"--num_iterations={STEPS}"]
    torch.set_num_threads(1)
    kills = Counter()
    chance = random.Random(7)

    def go_on(place: str | None = None, delay: float = 1e9) -> int:
        """Status of an attempt."""
        saved = sorted(records.glob("*/step*.pt"))
        if saved:
            return attempt([f"--resume={saved[-1].parent}.log"], place, delay)
        for log in records.glob("*.log"):  # a run that is killed before its first checkpoint
            log.unlink()  # starts anew
        return attempt(flags, place, delay)

    for place in [*PLACES, *[*AT_RANDOM] * RANDOM_KILLS, *LAST]:
        status = go_on(place, chance.uniform(0.02, 0.4) if place in AT_RANDOM else 1e9)
        assert status == -signal.SIGKILL, f"{place}: ended with {status}"
        kills[place] += 1
    assert go_on() == 0, "the last resumption"
    print(json.dumps(kills))


if __name__ == "__main__":
    main()
