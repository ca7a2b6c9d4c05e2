"""Run as a program: train one run that is killed again and again, at given places and at random ones, and resumed each time.

    python tests/killed_runs.py RECORDS RANDOM_KILLS FLAGS...

Every attempt is a forked child that SIGKILL ends without warning. Prints a JSON object {place: kills}."""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt  # noqa: E402


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_call(owner, name: str, number: int, after: bool):
    """Replace owner.name by a function that kills the process at its call of that number."""
    original, calls = getattr(owner, name), [0]

    def deadly(*args, **kwargs):
        calls[0] += 1
        if calls[0] == number and not after:
            die()
        result = original(*args, **kwargs)
        if calls[0] == number:
            die()
        return result

    setattr(owner, name, deadly)


def half_written(number: int):
    """Kill while the checkpoint of that number is half on the disk."""
    original, calls = torch.save, [0]

    def deadly(payload, file):
        original(payload, file)
        calls[0] += 1
        if calls[0] == number:
            file.flush()
            os.truncate(file.fileno(), os.fstat(file.fileno()).st_size // 2)
            die()

    torch.save = deadly


PLACES = {
    "before the first step": lambda: die_at_call(train_gpt, "warm_up", 1, after=True),
    "in a step, before the update": lambda: die_at_call(train_gpt.Muon, "step", 5, after=False),
    "in a step, between Muon and Adam": lambda: die_at_call(train_gpt.Muon, "step", 4, after=True),
    "in a validation": lambda: die_at_call(train_gpt, "evaluate", 3, after=False),
    "after a validation": lambda: die_at_call(train_gpt, "evaluate", 3, after=True),
    "gathering a checkpoint": lambda: die_at_call(train_gpt, "training_state", 2, after=True),
    "half a checkpoint written": lambda: half_written(2),
    "before the rename": lambda: die_at_call(os, "replace", 2, after=False),
    "after the rename, before the oldest is deleted": lambda: die_at_call(os, "replace", 3, after=True),
    "writing the log": lambda: die_at_call(train_gpt.RunLog, "step_line", 5, after=True),
}


AT_THE_END = "after the last validation, before the trained model is saved"
LAST = {AT_THE_END: lambda: die_at_call(train_gpt, "train_flops", 1, after=True)}


def attempt(flags: list[str], place: str | None, delay: float) -> int:
    """Status of a child that trains and is killed at the place, or after delay seconds."""
    child = os.fork()
    if child == 0:
        try:
            if place:
                (PLACES | LAST)[place]()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            train_gpt.run(flags)
        except BaseException as e:
            print(repr(e), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + delay
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if not place and time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.001)
    return os.waitstatus_to_exitcode(ended[1])


def main():
    records, random_kills, flags = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    kills, chance = Counter(), random.Random(sys.argv[1])
    for place in [*PLACES, *[None] * random_kills]:
        resume = ["--resume"] if list(records.glob("*/step*.pt")) else []
        if not resume:  # killed before its first checkpoint, a run has nothing to go on from
            for log in records.glob("*.log"):
                log.unlink()
        status = attempt([*flags, *resume], place, delay=chance.uniform(0.05, 0.8))
        if status == 0 and place is None:
            break  # the run got to its end before a kill at random did
        assert status == -signal.SIGKILL, f"{place}: ended with {status}"
        kills[place or "at random"] += 1
    else:
        assert attempt([*flags, "--resume"], AT_THE_END, delay=1e9) == -signal.SIGKILL
        kills[AT_THE_END] += 1
        assert attempt([*flags, "--resume"], None, delay=1e9) == 0, "the last resumption"
    print(json.dumps(kills))


if __name__ == "__main__":
    main()
