#!/usr/bin/env python3
"""What each technique of the script is worth in a small run: the demo without it, against the demo.

    python tests/bench_techniques.py --seeds=3 --out=records/techniques/losses.csv

A technique is left out by a flag; what no flag leaves out, a copy of the script can (--script).
Nothing else is tuned anew, so a difference also contains what the other settings owe to the
technique. Each run is one process with one thread, and --jobs of them run at a time. A line of the
file is written when a run ends, and a run whose line is there already is not made again. The table
at the end has the differences of the final validation loss, in nats per byte, and their p-values
(Welch). Exit status: 0, or 2 for wrong usage or a run that failed.
"""

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
from data import common
from train_gpt import PRESETS, UserError, find_shards, require

# Each technique, and the flags that leave it out.
WITHOUT = {
    "nothing": [],
    "value embeddings": ["--value_embeds=...."],
    "softcap of 15 (35 instead)": ["--lm_head_softcap=35"],
    "full window from the start (warmup instead)": ["--window_start=128"],
    "short windows": ["--windows=LLLL"],
    "layer without attention": ["--attention=xxxx"],
    "keys and values for each query head (one for all instead)": ["--num_kv_heads=1"],
    "falling learning rates": ["--cooldown_frac=0"],
}


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
    parser.add_argument("--seeds", type=int, default=3, help="runs without each technique (3)")
    parser.add_argument("--steps", type=int, default=100, help="training steps of each run (100)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(),
                        help="runs at a time (one for each core)")
    parser.add_argument("--out", type=Path, required=True, metavar="CSV", help="file of the losses")
    parser.add_argument("--script", type=Path, default=ROOT / "train_gpt.py", metavar="FILE",
                        help="the training script (train_gpt.py)")
    args, more = parser.parse_known_args()
    if min(args.seeds, args.steps, args.jobs) < 1:
        raise UserError("--seeds, --steps and --jobs must be at least 1")
    if not any(flag.startswith("--train_files=") for flag in more):
        find_shards(str(ROOT / PRESETS["demo"].train_files))  # says how to make them
    flags = ["--preset=demo", f"--num_iterations={args.steps}", "--val_loss_every=0",
             "--save_every=0", "--dtype=float32", *more]
    losses = {}
    if args.out.exists():
        for line in args.out.read_text(encoding="utf-8").splitlines()[1:]:
            name, seed, loss = line.split(",")
            losses[name, int(seed)] = float(loss)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with (open(args.out, "a", encoding="utf-8") as out, tempfile.TemporaryDirectory() as folder,
          ThreadPoolExecutor(args.jobs) as pool):
        if not losses:
            out.write("without,seed,val_loss\n")
        missing = [(name, seed) for seed in range(1, args.seeds + 1) for name in WITHOUT
                   if (name, seed) not in losses]
        ends = pool.map(lambda run: last_loss(args.script, [
            *flags, f"--records={folder}", *WITHOUT[run[0]], f"--seed={run[1]}"]), missing)
        for (name, seed), loss in zip(missing, ends):
            out.write(f"{name},{seed},{loss}\n")
            out.flush()
            losses[name, seed] = loss
            print(f"without {name}, seed {seed}: {loss:.4f}", flush=True)
    found = {name: [loss for (other, _), loss in losses.items() if other == name]
             for name in WITHOUT}
    print(table(found, "nothing", "without"))


if __name__ == "__main__":
    sys.exit(common.run(main, errors=(UserError,)))
