"""Is a copy of train_gpt.py honest? Says so in seconds, on a CPU, with a tiny model in float32:

    ./run.sh honest my_record.py [speedrun|short|demo] [--setting=value ...]

Honest means that a race may believe its log:

- exam.py, which examines every run of a race and says what it finds out, passes a tiny run.
- FlexAttention's lists of blocks, for GPUs, and the mask for CPUs show each token the same keys.

Settings are the copy's demo or those named; sizes, steps and data are the check's own. Prints a
line for each property, then `honest`, or what was seen with status 3. A wrong command, or settings
that the copy refuses, are one line and status 2; another error of the copy keeps its traceback.
"""

import contextlib
import glob
import inspect
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from records.tools.load import ROOT, ArgumentParser, UserError, require, run

import numpy as np
import torch

from data.common import write_shards
from records.tools.launch import split_words
from records.tools.exam import Exam, Seen, expect
from records.tools.sample import checked_script

END_OF_TEXT = 256
# These replace what the command line says.
SIZES = [
    "--model_dim=32", "--head_dim=16", "--train_seq_len=256", "--val_seq_len=512", "--epochs=1000",
    "--val_tokens=1400", "--micro_batches=4", f"--vocab_size={END_OF_TEXT + 1}", "--seed=1",
    "--num_iterations=16", "--save_every=9", "--val_loss_every=4", "--dtype=float32"]

class Trial:
    """A copy, its settings for the check, and a folder with the data."""

    def __init__(self, path: Path, flags, folder: Path, sizes=SIZES, names=()):
        text = (ROOT / "train_gpt.py").read_bytes()
        stream = [t for part in text.split(b"\n\n") for t in (END_OF_TEXT, *part, 10)]
        for name, tokens in (("val", stream[:3000]), ("train", stream[3000:])):
            write_shards([np.array(tokens, "<u2")], folder / name, 1, len(tokens))
        self.path = path
        self.folder = folder
        self.script = checked_script(path, *names)
        known = self.script.Hyperparameters.__dataclass_fields__
        sizes = [flag for flag in sizes if flag[2:].partition("=")[0] in known]
        files = [f"--{name}_files={glob.escape(str(folder))}/{name}_*.bin"
                 for name in ("train", "val")]
        self.flags = ["--preset=demo", *flags, *sizes, *files]
        hp, _ = self.script.parse_flags(self.flags)
        self.script.check_settings(hp, 1)
        self.hp = self.script.resolve(hp, torch.device("cpu"))

# ---- The properties ------------------------------------------------------------------------------

def keys_seen(mask, T: int, lists: str = "kv"):
    """Which keys [T, T] a mask shows: slices of keys with their biases, or a BlockMask, by its
    lists of key blocks, or of query blocks ("q"), which the backward pass uses."""
    seen = torch.zeros(T, T, dtype=torch.bool)
    if isinstance(mask, list):
        size = T // len(mask)
        for i, (keys, bias) in enumerate(mask):
            seen[size * i:size * (i + 1), keys] = bias == 0
        return seen
    position = torch.arange(T)
    rule = mask.mask_mod(0, 0, position[:, None], position).expand(T, T)
    rows, columns = mask.BLOCK_SIZE
    for kind in (lists, f"full_{lists}"):
        counts, blocks = (getattr(mask, f"{kind}_{name}")[0, 0] for name in
                          ("num_blocks", "indices"))
        for at, count in enumerate(counts):
            for other in blocks[at, :count]:
                i, j = (at, other) if lists == "kv" else (other, at)
                tile = (slice(rows * i, rows * (i + 1)), slice(columns * j, columns * (j + 1)))
                seen[tile] = rule[tile] | kind.startswith("full")
    return seen

def masks_seen(script):
    """What the masks of a script show on 24 random texts, if it builds them by the function of
    train_gpt.py: the window, and for each mask the keys on a CPU, and those on a GPU, forward and
    backward."""
    build = getattr(script, "build_block_masks", None)
    if build is None or [*inspect.signature(build).parameters][1:] != [
            "end_of_text", "window", "flex"]:
        return
    generator = torch.Generator().manual_seed(1)
    for number in range(24):
        T = (128, 512, 1024)[number % 3]
        begins = torch.rand(T, generator=generator) < (0.001, 0.01, 0.1)[number % 8 % 3]
        tokens = torch.where(begins, END_OF_TEXT, 0).int()
        window = torch.tensor(128 * (1 + number % 7))
        plain, lists = (build(tokens, END_OF_TEXT, window, flex) for flex in (False, True))
        yield window, [(keys_seen(one, T), keys_seen(other, T), keys_seen(other, T, "q"))
                       for one, other in zip(plain, lists, strict=True)]

def check_masks(trial: Trial):
    texts = [*masks_seen(trial.script)]
    for window, masks in texts:
        for plain, *lists in masks:
            for other in lists:
                wrong = (plain != other).nonzero().tolist()
                expect(not wrong, f"{len(wrong)} pairs of tokens are visible on a CPU or on a GPU "
                       f"only, among them query and key {wrong[:1]}, with a window of {window}: "
                       "change `sees` and the lists of blocks alike")
    if texts:
        yield "masks: the lists of blocks for GPUs show what the mask for CPUs shows, on 24 texts"

def check_run(trial: Trial):
    """A run and its exam."""
    with contextlib.redirect_stdout(None):
        trial.script.main([*trial.flags, f"--records={trial.folder}/runs", "--name=honesty"])
    (log,) = trial.folder.glob("runs/*.log")
    exam = Exam(trial.path, log)
    for part in (exam.compare_seeds, exam.replay, exam.examine):
        part()
    yield (f"exam: the validation loss is the cross-entropy of {trial.hp.val_tokens} targets, no "
           "output changes with later tokens, and steps trained again give the losses of the log")

PARTS = check_masks, check_run

def check(path, flags=(), parts=PARTS):
    """Yields the lines of these parts. Raises Seen with what was seen, or UserError."""
    torch.set_num_threads(1)  # the last bits of sums depend on their number
    where = f"{path}, in the check of its honesty"
    with tempfile.TemporaryDirectory() as folder, in_one_line(where):
        trial = Trial(Path(path).resolve(), flags, Path(folder))
        for part in parts:
            yield from part(trial)

@contextlib.contextmanager
def in_one_line(where: str):
    """Turns a script's UserErrors, whose class is its own, into ours."""
    try:
        yield
    except Exception as e:
        if type(e).__name__ != "UserError" or isinstance(e, UserError):
            raise
        raise UserError(f"{where}: {e}") from None

def say(lines, fine: str) -> int:
    """Prints the lines, and in the end this, or "not" with what was seen; the exit status."""
    try:
        for line in lines:
            print(line, flush=True)
    except Seen as seen:
        print(f"not {fine}: {seen}")
        return 3
    print(fine)
    return 0

def main():
    usage = "./run.sh honest my_record.py [speedrun|short|demo] [--setting=value ...]"
    _, words = ArgumentParser(description=__doc__, usage=usage).parse_known_args()
    path, flags = split_words(words)
    require(path, f"name the script first: {usage}")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return say(check(path, flags), "honest")

if __name__ == "__main__":
    sys.exit(run(main))
