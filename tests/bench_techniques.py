#!/usr/bin/env python3
"""What each technique of the script is worth in a small run: the demo without it, against the demo.

    python tests/bench_techniques.py --seeds=3 --out=records/techniques/losses.csv

A technique is left out by a flag, or in a copy of the script by a replaced line, which is looked
for by its text: a technique that cannot be found is an error. Nothing else is tuned anew, so a
difference also holds what the other settings owe to the technique. Each run is one process of one
thread; --jobs run at a time. A line of the file is written as a run ends; what is there already is
not run again. The table that is printed has differences of the final validation loss, in nats a
byte, and their p-values (Welch). Exit status: 0, or 2 for wrong usage or a run that failed.
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

MUON_ROWS = [f'Muon(named(r".*{name}\\.weight"), hp.muon_lr, hp, ranks'
             for name in ("attn\\.qkv", "attn\\.proj", "mlp\\.fc", "mlp\\.proj")]
ROTATED = "x_THK, self.cos[:len(x_THK)], self.sin[:len(x_THK)]"
ZERO_INIT = "        nn.init.zeros_(self.proj.weight)\n"

# What is left out: the flags, or the replacements (text, what takes its place) in a copy.
WITHOUT = {
    "nothing": [],
    "Muon (AdamW at 0.003 instead)": [
        (f"{MUON_ROWS[0]}, 3)", f"{MUON_ROWS[0]})"),
        *[(row, row.replace("Muon(", "Adam(").replace("hp.muon_lr", "0.003"))
          for row in MUON_ROWS]],
    "NorMuon": ["--muon_beta2=0"],
    "embedding of pairs": ["--pair_rows=0"],
    "value embeddings": ["--value_embeds=...."],
    "smear": ["--smear=false"],
    "key offset": ["--key_offset=false"],
    "U-Net skips": [("+ skip_weights.pop(0) * outputs", "+ 0 * skip_weights.pop(0) * outputs")],
    "x0 in each layer": [("+ given.residual_mix[1] * given.x0_TD",
                          "+ 0 * given.residual_mix[1] * given.x0_TD")],
    "QK norm": [(f"NormAndRotate.apply({ROTATED})", f"rotated({ROTATED}).type_as(x_THK)")],
    "rotary positions": [(f"NormAndRotate.apply({ROTATED})", "norm(x_THK)")],
    "ReLU^2 (GELU instead)": [("F.relu(self.fc(x_TD))", "F.gelu(self.fc(x_TD))"),
                               ("hidden * hidden", "hidden")],
    "zero initial projections": [(ZERO_INIT, "")],
    "softcap of 15 (35 instead)": ["--lm_head_softcap=35"],
    "document masks": [("(tokens_T == eot).cumsum", "(tokens_T < 0).cumsum")],
    "full window from the start (warmup instead)": ["--window_start=128"],
    "short windows": ["--windows=LLLL"],
    "layer without attention": ["--attention=xxxx"],
    "falling learning rates": ["--cooldown_frac=0"],
}


def changed(source: str, replacements: list[tuple[str, str]]) -> str:
    """The script's text with each replacement made, wherever its text stands."""
    for text, instead in replacements:
        require(text in source, f"the script has no {text!r}; this file is for another version")
        source = source.replace(text, instead)
    return source


def last_loss(script, flags: list[str]) -> float:
    """At which a run of the script ends, by one thread of the CPU."""
    done = subprocess.run(
        [sys.executable, str(script), *flags], capture_output=True, text=True, check=False,
        cwd=ROOT, env=os.environ | {
            "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
            "MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "2000000000"})
    lines = [line for line in done.stdout.splitlines() if line.startswith("final_val_loss: ")]
    said = f"{' '.join(flags)}: {done.stderr.strip()[-300:]}"
    require(done.returncode == 0 and lines, said)
    return float(lines[0].split()[1])


def final_loss(name: str, seed: int, flags: list[str]) -> float:
    """Of the demo without a technique."""
    parts = WITHOUT[name]
    flags = [*flags, f"--seed={seed}", *[part for part in parts if isinstance(part, str)]]
    replacements = [part for part in parts if not isinstance(part, str)]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        source = (ROOT / "train_gpt.py").read_text(encoding="utf-8")
        script.write_text(changed(source, replacements), encoding="utf-8")
        return last_loss(script, ["--preset=demo", f"--records={folder}", *flags])


def table(losses: dict[str, list[float]], base: str, title: str) -> str:
    """Markdown: the mean of each, its difference to that of base, and the p-value (Welch)."""
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
    parser.add_argument("--steps", type=int, default=100, help="of training in each run (100)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time (a core)")
    parser.add_argument("--out", type=Path, required=True, metavar="CSV", help="of the losses")
    args, more = parser.parse_known_args()
    if min(args.seeds, args.steps, args.jobs) < 1:
        raise UserError("--seeds, --steps and --jobs count from 1")
    hp = PRESETS["demo"]
    given = any(flag.startswith("--train_files=") for flag in more)
    if not given:
        find_shards(str(ROOT / hp.train_files))  # ./run.sh makes them
    flags = [f"--num_iterations={args.steps}", "--val_loss_every=0", "--save_every=0",
             "--dtype=float32", *more]
    losses = {}
    if args.out.exists():
        for line in args.out.read_text(encoding="utf-8").splitlines()[1:]:
            name, seed, loss = line.split(",")
            losses[name, int(seed)] = float(loss)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with open(args.out, "a", encoding="utf-8") as out, ThreadPoolExecutor(args.jobs) as pool:
        if not losses:
            out.write("without,seed,val_loss\n")
        missing = [(name, seed) for seed in range(1, args.seeds + 1) for name in WITHOUT
                   if (name, seed) not in losses]
        for (name, seed), loss in zip(missing, pool.map(
                lambda run: final_loss(*run, flags), missing)):
            out.write(f"{name},{seed},{loss}\n")
            out.flush()
            losses[name, seed] = loss
            print(f"without {name}, seed {seed}: {loss:.4f}", flush=True)
    found = {name: [loss for (other, _), loss in losses.items() if other == name]
             for name in WITHOUT}
    print(table(found, "nothing", "without"))


if __name__ == "__main__":
    sys.exit(common.run(main, errors=(UserError,)))
