#!/usr/bin/env python3
"""Tokens to a loss: `speedrun_2026` against `speedrun`, in miniature, on a CPU.

    python tests/bench_tokens.py english.jsonl.xz --seeds=4 --keep=records/tokens
    python tests/bench_tokens.py english.jsonl.xz --seeds=2 --ablate --steps=500

Both presets keep their own layer tables, schedules and ratios of batch sizes, at a width of 64
and with sequences of 512 tokens; learning rates are those that were best here for each (MINI). A
token is one of GPT-2's first 2,047 (--vocab_dir: its files, where they cannot be downloaded). The
text is lines of JSON with a field `text` a document, and may be compressed: the first documents
are for choosing settings (--tune validates on them), the next validate, the others train, in one
pass. `speedrun` gets --steps steps, speedrun_2026 --share of its tokens. If it ends at a lower
loss all the same, it needs at most that share of the tokens to that loss.

--ablate: speedrun_2026 against itself without each technique. Flags that are not of this program
go to all runs. Each run is a process of one thread; --jobs run at a time. Exit status: 0, or 2 for
wrong usage or a run that failed.
"""

import json
import os
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench_techniques import last_loss, table

from data import common
from data.tokenize_text import DECOMPRESS
from data.vocab import GPT2Tokenizer, gpt2_merge_ranks
from train_gpt import UserError, parse_flags, require, tokens_before

HELD_OUT = 150_000  # tokens, at least, to validate on, and as many to choose settings on
MINI = {
    "both": """--model_dim=64 --num_heads=2 --head_dim=32 --attention_scale=0.2 --vocab_size=2048
        --train_seq_len=512 --val_seq_len=4096 --val_tokens=131072 --val_loss_every=500
        --save_every=0 --dtype=bfloat16""",
    "speedrun": "--micro_batches=3 --window_end=512 --muon_lr=0.025",
    "speedrun_2026": """--micro_batches=1 --stages=1:1:128,2:1.52:256,3:1.73:384
        --pair_rows=10240 --muon_lr=0.012 --head_lr=0.024 --embed_lr=1.2 --scalar_lr=0.08""",
}
ABLATIONS = {
    "the preset": "",
    "without stages": "--stages= --micro_batches=2 --window_end=384",
    "Adam on every step": "--adam_every=1",
    "without cautious weight decay": "--muon_decay=0 --embed_decay=0",
    "without the shifted softcap": "--softcap_height=0 --softcap_shift=0",
    "without further tokens in the loss": "--future_tokens=0",
    "a U-Net's skips": "--skips=",
    "without late input and backout": "--late_input=-1 --backout=-1",
    "without NorMuon": "--muon_beta2=0",
    "without smear": "--smear=false",
    "without key offset": "--key_offset=false",
    "without pairs": "--pair_rows=0",
}


class SmallVocabulary(GPT2Tokenizer):
    """GPT-2's byte-pair encoding with its first merges alone, and the end of text."""
    vocab_size = 2048
    eot = vocab_size - 1

    def __init__(self, vocab_dir):
        ranks = gpt2_merge_ranks(vocab_dir)
        super().__init__({token: rank for token, rank in ranks.items() if rank < self.eot})


def make_shards(text: Path, folder: Path, tokens: int, vocab_dir) -> None:
    """folder/{tune,val,train}.bin, the last one of at least so many tokens. Raises UserError."""
    tokenizer = SmallVocabulary(vocab_dir)
    with DECOMPRESS.get(text.suffix, open)(text, "rt", encoding="utf-8") as lines:
        for name, least in (("tune", HELD_OUT), ("val", HELD_OUT), ("train", tokens)):
            held = []
            while sum(map(len, held)) <= least:
                line = next(lines, None)
                require(line, f"{text}: too few documents; fewer --steps need fewer")
                try:
                    document = json.loads(line)["text"]
                except (ValueError, KeyError, TypeError):
                    said = f"{text}: a line is no JSON with a text: {line.strip():.40}"
                    raise UserError(said) from None
                held.append(np.array([tokenizer.eot, *tokenizer.encode(document)]))
            shard = np.concatenate(held).astype("<u2")
            header = common.shard_header(len(shard))
            (folder / f"{name}.bin").write_bytes(header + shard.tobytes())


def steps_for(tokens: float, flags: list[str]) -> int:
    """The most steps, an even number, in which these settings train on at most so many tokens."""
    low, high = 0, 2
    while tokens_of(high, flags) <= tokens:
        low, high = high, 2 * high
    while high - low > 2:
        middle = (low + high) // 4 * 2
        low, high = (middle, high) if tokens_of(middle, flags) <= tokens else (low, middle)
    return low


def tokens_of(steps: int, flags: list[str]) -> int:
    hp, _ = parse_flags([*flags, f"--num_iterations={steps}"], "speedrun")
    return tokens_before(hp)[-1]


def main():
    parser = common.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, metavar="TEXT", help="documents, .jsonl")
    parser.add_argument("--vocab_dir", metavar="DIR", help="GPT-2's encoder.json and vocab.bpe")
    parser.add_argument("--seeds", type=int, default=3, help="runs a side (3)")
    parser.add_argument("--first_seed", type=int, default=1, help="the others follow it (1)")
    parser.add_argument("--steps", type=int, default=1500, help="of the preset speedrun (1500)")
    parser.add_argument("--share", type=float, default=0.6,
                        help="of its tokens that speedrun_2026 gets (0.6)")
    parser.add_argument("--tune", action="store_true", help="validate on the other documents")
    parser.add_argument("--ablate", action="store_true", help="leave out one technique a side")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time (a core)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs, in DIR_<side>")
    args, more = parser.parse_known_args()
    if min(args.seeds, args.steps, args.jobs) < 1 or not 0 < args.share <= 10 or args.seeds < 2:
        raise UserError("--steps and --jobs count from 1, --seeds from 2; --share is above 0")
    both = MINI["both"].split() + more
    old = ["--preset=speedrun", *MINI["speedrun"].split(), *both, f"--num_iterations={args.steps}"]
    new = ["--preset=speedrun_2026", *MINI["speedrun_2026"].split(), *both]
    budget = tokens_of(args.steps, old)
    sides = {"speedrun": old, "speedrun_2026": new}
    if args.ablate:
        sides = {name: new + without.split() for name, without in ABLATIONS.items()}
    for name, flags in sides.items():
        if name != "speedrun":
            flags.append(f"--num_iterations={steps_for(args.share * budget, flags)}")
            print(f"{name}: {tokens_of(int(flags[-1].split('=')[1]), flags)} tokens", flush=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        make_shards(args.text, Path(folder), budget + 2**16, args.vocab_dir)
        val = "tune" if args.tune else "val"
        data = [f"--train_files={folder}/train.bin", f"--val_files={folder}/{val}.bin"]
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        records = os.path.relpath(args.keep or Path(folder, "records"), ROOT)
        runs = []
        for seed in seeds:
            for name, flags in sides.items():
                short = re.sub(r"\W+", "_", name.lower())
                runs.append((name, [*flags, *data, f"--seed={seed}", f"--name={short}-{seed}",
                                    f"--records={records}_{short}"]))
        losses = {name: [] for name in sides}
        ends = pool.map(lambda run: last_loss("train_gpt.py", run[1]), runs)
        for (name, flags), loss in zip(runs, ends):
            losses[name].append(loss)
            print(f"{name}: {loss:.4f}", flush=True)
    print(table(losses, "the preset" if args.ablate else "speedrun", "what"))


if __name__ == "__main__":
    sys.exit(common.run(main, errors=(UserError,)))
