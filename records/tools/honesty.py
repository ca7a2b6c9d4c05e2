"""Is a copy of train_gpt.py honest? Says so in a minute, on a CPU:

    ./run.sh honest my_record.py [speedrun|short|demo] [--setting=value ...]

Trains a tiny model by the copy's method for 16 steps, in float32, and examines that run as a race
does (exam.py says what it finds out). The settings are the copy's demo or those named; sizes, steps
and data are the check's own. Before that, it compares FlexAttention's lists of blocks, for GPUs,
with the mask for CPUs: both must show each token the same keys. Prints `honest`, or what was seen
with status 3. What the copy refuses is one line and status 2.
"""

import glob
import inspect
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from records.tools.load import ROOT, ArgumentParser, require, run

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask

from data.common import write_shards
from records.tools import trial
from records.tools.launch import split_words
from records.tools.exam import Seen, expect
from records.tools.sample import checked_script

END_OF_TEXT = 256
# These replace what the command line says.
SIZES = [
    "--model_dim=32", "--head_dim=16", "--train_seq_len=256", "--val_seq_len=512", "--epochs=1000",
    "--val_tokens=1400", "--micro_batches=4", f"--vocab_size={END_OF_TEXT + 1}", "--seed=1",
    "--num_iterations=16", "--save_every=9", "--val_loss_every=4", "--dtype=float32"]

def tiny(path: str, flags, folder: Path, sizes=SIZES, names=()) -> tuple:
    """A copy, the flags for a small run of it, and their settings. The data are written to the
    folder."""
    text = (ROOT / "train_gpt.py").read_bytes()
    stream = [t for part in text.split(b"\n\n") for t in (END_OF_TEXT, *part, 10)]
    for name, tokens in (("val", stream[:3000]), ("train", stream[3000:])):
        write_shards([np.array(tokens, "<u2")], folder / name, 1, len(tokens))
    script = checked_script(Path(path).resolve(), *names)
    known = script.Hyperparameters.__dataclass_fields__
    flags = ["--preset=demo", *flags, *(f"--{name}_files={glob.escape(str(folder))}/{name}_*.bin"
                                        for name in ("train", "val"))]
    flags += [flag for flag in sizes if flag[2:].partition("=")[0] in known]
    hp, _ = script.parse_flags(flags)
    script.check_settings(hp, 1)
    return script, flags, script.resolve(hp, torch.device("cpu"))

def keys_seen(mask, T: int):
    """Yields which keys [T, T] a mask shows: slices of keys with their biases, or a BlockMask, by
    its lists of key blocks, and by those of query blocks, which the backward pass uses."""
    if isinstance(mask, list):
        seen = torch.zeros(T, T, dtype=torch.bool)
        for rows, (keys, bias) in zip(seen.split(T // len(mask)), mask):
            rows[:, keys] = bias == 0
        yield seen
        return
    position = torch.arange(T)
    sees = mask.mask_mod(0, 0, position[:, None], position)
    for side in ("kv", "q"):
        tiles = []
        for kind in (side, f"full_{side}"):
            lists = (getattr(mask, f"{kind}_{name}") for name in ("num_blocks", "indices"))
            blocks = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=mask.BLOCK_SIZE).to_dense()[0, 0]
            blocks = (blocks if side == "kv" else blocks.T).contiguous()
            tiles.append(blocks.kron(blocks.new_ones(mask.BLOCK_SIZE)).bool())
        yield tiles[1] | tiles[0] & sees

def masks_seen(script):
    """Yields the window and for each mask what keys_seen says of it, for CPUs and for GPUs, on 24
    random texts, if the script builds masks by the function of train_gpt.py."""
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
        masks = zip(*(build(tokens, END_OF_TEXT, window, flex) for flex in (False, True)))
        yield window, [[seen for one in both for seen in keys_seen(one, T)] for both in masks]

def check(path: str, flags=()):
    """Yields a line for each property. Raises Seen with what was seen, or UserError."""
    with tempfile.TemporaryDirectory() as folder:
        script, flags, hp = tiny(path, flags, Path(folder))
        texts = [*masks_seen(script)]
        for window, masks in texts:
            for plain, *others in masks:
                wrong = torch.stack(others).ne(plain).nonzero().tolist()
                expect(not wrong, f"{len(wrong)} pairs of tokens are visible on a CPU or on a GPU "
                       f"only, among them query and key {wrong[:1]}, with a window of {window}: "
                       "change `sees` and the lists of blocks alike")
        if texts:
            yield ("masks: the lists of blocks for GPUs show what the mask for CPUs shows, on "
                   f"{len(texts)} texts")
        entry = trial.Entry("honest", path, flags, trial.script_text(path), kept=path)
        one = trial.run(entry, str(hp.seed), Path(folder, "runs"), NPROC="1")
        problem = trial.examine(entry, one)["problem"]
        expect(not problem, problem)
        yield (f"exam: the validation loss is the cross-entropy of {hp.val_tokens} targets, no "
               "output changes with later tokens, and steps trained again give the log's losses")

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
