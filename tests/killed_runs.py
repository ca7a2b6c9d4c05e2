"""Run as a program: train one run that is killed again and again, at given places and at random
times, and resumed each time.

    python tests/killed_runs.py RECORDS FLAGS...

Every attempt is a forked child that SIGKILL ends without warning; the first begins the run with
these flags, the others go on by --resume=PATH alone. Prints a JSON object {place: kills}."""

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

WARMUP_MUON = 4  # calls of the optimizers in the warmup: one for each row of the table
WARMUP_ADAM = 3


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_call(owner, name: str, number: int, after: bool):
    """Replace owner.name by a function that kills the process at its call of that number."""
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


def half_a_checkpoint(number: int):
    """Kill while the checkpoint of that number is half on the disk."""
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
    """Kill when so much is in the log of the line of that number among those that begin so."""
    original = train_gpt.RunLog.write
    lines = [0]

    def deadly(log, text, console=True):
        lines[0] += text.startswith(begins)
        if lines[0] == number:
            log.file.write(text[:int(len(text) * share)].encode())
            log.file.flush()
            die()
        original(log, text, console)

    train_gpt.RunLog.write = deadly


STEPS = 90  # of the run
RANDOM_KILLS = 12
# In the fourth step of an attempt, so that each saves a checkpoint, which is every third step.
STEPS_BEFORE = 3
PLACES = {
    "before the first step":
        lambda: die_at_call(train_gpt, "warm_up", 1, after=True),
    "in a step, between forward and backward":
        lambda: die_at_call(torch.Tensor, "backward", 2 + 2 * STEPS_BEFORE + 1, after=False),
    "in a step, before the updates":
        lambda: die_at_call(train_gpt.Muon, "compute", WARMUP_MUON * (1 + STEPS_BEFORE) + 1, False),
    "in a step, between two Muons":
        lambda: die_at_call(train_gpt.Muon, "apply", WARMUP_MUON * (1 + STEPS_BEFORE) + 2, False),
    "in a step, between Muon and Adam":
        lambda: die_at_call(train_gpt.Adam, "apply", WARMUP_ADAM * (1 + STEPS_BEFORE) + 1, False),
    "in a validation":
        lambda: die_at_call(train_gpt, "evaluate", 3, after=False),
    "after a validation":
        lambda: die_at_call(train_gpt, "evaluate", 3, after=True),
    "gathering a checkpoint":
        lambda: die_at_call(train_gpt, "training_state", 3, after=True),
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
        lambda: die_at_call(train_gpt.RunLog, "open", 1, after=True),
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
            train_gpt.run(flags)
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
    records = Path(sys.argv[1])
    flags = [*sys.argv[2:], f"--records={records}", f"--num_iterations={STEPS}"]
    torch.set_num_threads(1)
    kills = Counter()
    chance = random.Random(7)

    def go_on(place: str | None = None, delay: float = 1e9) -> int:
        """Status of an attempt, which names the run by its log, its folder or its checkpoint."""
        saved = sorted(records.glob("*/step*.pt"))
        if saved:
            folder = saved[-1].parent
            path = chance.choice([folder.with_suffix(".log"), folder, saved[-1]])
            return attempt([f"--resume={path}"], place, delay)
        for log in records.glob("*.log"):  # killed before its first checkpoint it starts anew
            log.unlink()
        return attempt(flags, place, delay)

    for place in [*PLACES, *[*AT_RANDOM] * RANDOM_KILLS, *LAST]:
        status = go_on(place, chance.uniform(0.02, 0.4) if place in AT_RANDOM else 1e9)
        assert status == -signal.SIGKILL, f"{place}: ended with {status}"
        kills[place] += 1
    assert go_on() == 0, "the last resumption"
    print(json.dumps(kills))


if __name__ == "__main__":
    main()
