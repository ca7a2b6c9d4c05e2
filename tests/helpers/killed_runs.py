"""Run as a program: trains one run that is killed at one chosen place after another, and resumed
each time from the newest checkpoint. Prints how many kills there were.

    PYTHONPATH=.:tests python tests/helpers/killed_runs.py SCRIPT RECORDS FLAGS..."""

import os
import signal
import sys
from functools import partial
from pathlib import Path
import torch
from conftest import load_script, newest_checkpoint

SCRIPT = load_script(Path(sys.argv[1]), "train_gpt")

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def at_call(owner, name: str, number: int, after: bool = False, do=lambda *args: None):
    """Replaces owner.name by a function that kills the process at its call of that number: before
    it, or after it, or in place of it when do(...) has been called with its arguments."""
    original = getattr(owner, name)
    calls = [0]
    def deadly(*args, **kwargs):
        calls[0] += 1
        if calls[0] == number and not after:
            do(*args, **kwargs)
            die()
        result = original(*args, **kwargs)
        if calls[0] == number:
            die()
        return result
    setattr(owner, name, deadly)

def half_a_file(path: Path, data):
    with open(path, "wb") as file:
        file.write(data[:len(data) // 2])

def in_line(begins: str, number: int = 1, share: float = 0.5):
    """When this share is written of the line of that number among those that begin so."""
    original = SCRIPT.RunLog.write
    lines = [0]
    def deadly(log, text, console=True):
        lines[0] += text.startswith(begins)
        if lines[0] == number:
            line = f"{text}\n".encode()
            log.file.write(line[:int(len(line) * share)])
            die()
        original(log, text, console)
    SCRIPT.RunLog.write = deadly

STEPS = 60  # of the run
SOURCE = Path(SCRIPT.__file__).read_text()
PLACES = [
    partial(at_call, torch.Tensor, "backward", 20),  # two a step, and the warmup has some
    partial(at_call, SCRIPT.Optimizer.__subclasses__()[-1], "update", 18),  # between two updates
    partial(at_call, SCRIPT.Adam, "finish", 18),  # between two finished optimizers
    partial(at_call, SCRIPT, "load_training_state", 1),
    partial(at_call, SCRIPT, "RunLog", 1),  # before the log is there
    partial(in_line, SOURCE[:20]),  # half the source in the log
    partial(in_line, "step:"),  # half the first line of a resumed run
    partial(at_call, SCRIPT, "evaluate", 3, after=True),
    partial(at_call, SCRIPT, "gather_training_state", 5, after=True),
    partial(at_call, Path, "mkdir", 1, after=True),  # a folder for checkpoints, and none in it
    partial(at_call, Path, "write_bytes", 2, do=half_a_file),  # half a checkpoint
    partial(at_call, os, "replace", 2),  # before the rename
    partial(at_call, os, "replace", 3, after=True),  # before the oldest checkpoint is deleted
    partial(in_line, "checkpoint: ", share=0),  # between a checkpoint and its line in the log
    partial(in_line, f"step:{STEPS}/{STEPS} val_loss"),
    partial(in_line, "final_val_loss: ", share=0),
    partial(in_line, "log: ", 2),  # half the last line
]

def attempt(flags: list[str], prepare=lambda: None) -> int:
    child = os.fork()
    if child == 0:
        try:
            prepare()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            SCRIPT.main(flags)
        except BaseException as e:
            print(repr(e), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def main():
    records = Path(sys.argv[2])
    torch.set_num_threads(1)
    flags = [*sys.argv[3:], f"--records={records}", f"--num_iterations={STEPS}"]
    for place in PLACES:
        status = attempt(flags, place)
        assert status == -signal.SIGKILL, f"{place}: ended with {status}"
        flags = [f"--resume={newest_checkpoint(records)}"]
    assert attempt(flags) == 0, "the last resumption"
    print(len(PLACES))

if __name__ == "__main__":
    main()
