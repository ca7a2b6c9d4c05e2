#!/usr/bin/env python3
"""Tokens to a loss: the record attempt speedrun_2026 against train_gpt.py, in miniature, on a CPU.

    python tests/bench_tokens.py english.jsonl.xz --keep=records/tokens/english
    python tests/bench_tokens.py english.jsonl.xz --shards=data/mini      only makes the data

Both scripts train their preset `speedrun`, with their own layer tables, schedules and ratios of
batch sizes, but at a width of 64 and with sequences of 512 tokens. Learning rates, and a few more
settings, are those that were best for each at this size (MINI). A token is one of GPT-2's first
2,047; --vocab_dir names the folder of its files, where they cannot be downloaded. The text is lines
of JSON with a document each in the field `text`, and may be compressed. Its first documents are for
choosing settings (--tune validates on them), the next ones validate, and all others train, in one
pass. train_gpt.py gets --steps steps, the attempt --share of its tokens. If it ends at a lower loss
all the same, it needs at most that share of the tokens for that loss. The attempt runs twice, the
second time without its memory of what training has read, since whether the speedrun's rules allow
one is undecided.

--script names another attempt. --shards=DIR makes the data in DIR and prints the attempt's flags
for it, with which ./run.sh ablate trains the miniature. --keep=DIR keeps the logs, in folders whose
names begin with DIR, one for each side. --out writes every loss into a file. Flags that are not
this program's own go to all runs. Each run is a process with one thread, and --jobs of them run at
a time. Exit status: 0, or 2 for wrong usage or a run that failed.
"""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from scipy import stats

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import train_gpt
from data import common
from data.tokenize_text import DECOMPRESS
from data.vocab import GPT2Tokenizer, gpt2_merge_ranks
from records.sample import load_script
from train_gpt import UserError, require

ATTEMPT = ROOT / "records" / "speedrun_2026" / "train_gpt.py"
HELD_OUT = 150_000  # least number of tokens to validate on, and of those to choose settings on
MINI = {
    "both": """--model_dim=64 --num_heads=2 --head_dim=32 --attention_scale=0.2 --vocab_size=2048
        --train_seq_len=512 --val_seq_len=4096 --val_tokens=131072 --val_loss_every=150
        --save_every=0 --dtype=bfloat16""",
    "speedrun": """--micro_batches=3 --window_end=512 --cooldown_frac=0.6 --muon_lr=0.025
        --muon_momentum_end=0.9 --head_lr=0.012 --embed_lr=0.45 --scalar_lr=0.03 --adam_beta1=0.65
        --adam_beta2=0.99 --lm_head_softcap=20""",
    "speedrun_2026": """--micro_batches=2 --window_end=512 --memory_rows=131072 --muon_lr=0.015
        --head_lr=0.024 --embed_lr=0.7 --scalar_lr=0.03 --adam_beta1=0.3 --adam_beta2=0.99""",
}

class SmallVocabulary(GPT2Tokenizer):
    """GPT-2's byte-pair encoding with its first merges only, and the end of text."""
    vocab_size = 2048
    eot = vocab_size - 1

    def __init__(self, vocab_dir):
        ranks = gpt2_merge_ranks(vocab_dir)
        super().__init__({token: rank for token, rank in ranks.items() if rank < self.eot})


def make_shards(text: Path, folder: Path, tokens: int, vocab_dir) -> None:
    """Makes folder/{tune,val,train}.bin, the last one with at least this number of tokens. Raises
    UserError."""
    tokenizer = SmallVocabulary(vocab_dir)
    with DECOMPRESS.get(text.suffix, open)(text, "rt", encoding="utf-8") as lines:
        for name, least in (("tune", HELD_OUT), ("val", HELD_OUT), ("train", tokens)):
            documents = []
            while sum(map(len, documents)) <= least:
                line = next(lines, None)
                require(line, f"{text}: there are too few documents; fewer --steps need fewer")
                try:
                    document = json.loads(line)["text"]
                except (ValueError, KeyError, TypeError):
                    raise UserError(f"{text}: a line is not JSON with a field `text`: "
                                    f"{line.strip():.40}") from None
                documents.append(np.array([tokenizer.eot, *tokenizer.encode(document)]))
            shard = np.concatenate(documents).astype("<u2")
            header = common.shard_header(len(shard))
            (folder / f"{name}.bin").write_bytes(header + shard.tobytes())


def steps_for(tokens: float, script, flags: list[str]) -> int:
    """The largest number of steps in which the script, with these flags, trains on at most this
    number of tokens."""
    return int(tokens // tokens_of(1, script, flags))


def tokens_of(steps: int, script, flags: list[str]) -> int:
    """The number of training tokens in this number of steps."""
    hp, _ = script.parse_flags([*flags, f"--num_iterations={steps}"])
    return script.tokens_seen(steps, hp)


def last_loss(script, flags: list[str]) -> float:
    """The validation loss at which a run of the script ends, on one thread of the CPU."""
    done = subprocess.run(
        [sys.executable, os.path.relpath(script, ROOT), *flags],
        capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | {
            "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
            "MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "2000000000"})
    lines = [line for line in done.stdout.splitlines() if line.startswith("final_val_loss: ")]
    require(done.returncode == 0 and lines,
            f"the run with {' '.join(flags)} failed: {' '.join(done.stderr.split())[-300:]}")
    return float(lines[0].split()[1])


def table(losses: dict[str, list[float]], base: str, title: str) -> str:
    """A table in Markdown: the mean of each, its difference from that of base, and the p-value
    (Welch)."""
    rows = [f"| {title} | runs | val loss, mean (SD) | difference | p |", "|---|---|---|---|---|"]
    for name, found in losses.items():
        if len(found) < 2:
            continue
        row = f"| {name} | {len(found)} | {np.mean(found):.4f} ({np.std(found, ddof=1):.4f}) |"
        if name == base:
            rows.append(f"{row} | |")
            continue
        p = stats.ttest_ind(found, losses[base], equal_var=False).pvalue
        rows.append(f"{row} {np.mean(found) - np.mean(losses[base]):+.4f} | {p:.2g} |")
    return "\n".join(rows)


def main():
    parser = common.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, metavar="TEXT", help="documents, .jsonl")
    parser.add_argument("--vocab_dir", metavar="DIR", help="GPT-2's encoder.json and vocab.bpe")
    parser.add_argument("--script", type=Path, default=ATTEMPT, metavar="FILE",
                        help="the attempt (records/speedrun_2026/train_gpt.py)")
    parser.add_argument("--seeds", type=int, default=4, help="runs of each side (4)")
    parser.add_argument("--first_seed", type=int, default=1, help="the first of their seeds (1)")
    parser.add_argument("--steps", type=int, default=600, help="steps of train_gpt.py (600)")
    parser.add_argument("--share", type=float, default=0.33,
                        help="tokens of the attempt, as a share of those of train_gpt.py (0.33)")
    parser.add_argument("--tune", action="store_true",
                        help="validate on the documents for choosing settings")
    parser.add_argument("--shards", type=Path, metavar="DIR", help="only make the data, in DIR")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(),
                        help="runs at a time (one for each core)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the logs, in DIR_<side>")
    parser.add_argument("--out", type=Path, metavar="CSV", help="write the losses into this file")
    args, more = parser.parse_known_args()
    if min(args.seeds, args.steps, args.jobs) < 1 or not 0 < args.share <= 10 or args.seeds < 2:
        raise UserError("--steps and --jobs must be at least 1, --seeds at least 2, and --share "
                        "above 0 and at most 10")
    attempt = load_script(args.script)
    common_flags = ["--preset=speedrun", *MINI["both"].split(), *more]
    old = [*common_flags, *MINI["speedrun"].split(), f"--num_iterations={args.steps}"]
    new = [*common_flags, *MINI["speedrun_2026"].split()]
    budget = tokens_of(args.steps, train_gpt, old)
    steps = steps_for(args.share * budget, attempt, new)
    new.append(f"--num_iterations={steps}")
    val = "tune" if args.tune else "val"
    if args.shards:
        args.shards.mkdir(parents=True, exist_ok=True)
        make_shards(args.text, args.shards, budget + 2**16, args.vocab_dir)
        print(" ".join([*new[1:], f"--train_files={args.shards}/train.bin",
                        f"--val_files={args.shards}/{val}.bin"]))
        return
    print(f"speedrun_2026: {tokens_of(steps, attempt, new)} tokens", flush=True)
    sides = {"speedrun": (ROOT / "train_gpt.py", old), "speedrun_2026": (args.script, new),
             "without_memory": (args.script, [*new, "--memory_rows=1"])}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        make_shards(args.text, Path(folder), budget + 2**16, args.vocab_dir)
        data = [f"--train_files={folder}/train.bin", f"--val_files={folder}/{val}.bin"]
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        records = os.path.relpath(args.keep or Path(folder, "records"), ROOT)
        runs = []
        for seed in seeds:
            for name, (path, flags) in sides.items():
                runs.append((name, seed, path, [
                    *flags, *data, f"--seed={seed}", f"--name={name}-{seed}",
                    f"--records={records}_{name}"]))
        losses = {name: [] for name in sides}
        rows = ["what,seed,val_loss"]
        ends = pool.map(lambda run: last_loss(*run[2:]), runs)
        for (name, seed, *_), loss in zip(runs, ends):
            losses[name].append(loss)
            rows.append(f"{name},{seed},{loss}")
            if args.out:
                args.out.write_text("\n".join([*rows, ""]), encoding="utf-8")
            print(f"{name}: {loss:.4f}", flush=True)
    print(table(losses, "speedrun", "what"))


if __name__ == "__main__":
    sys.exit(common.run(main, errors=(UserError,)))
