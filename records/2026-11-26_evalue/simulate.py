"""How often does a race without a difference end with a decision? python simulate.py [races]
prints the tables of README.md: races of 50 pairs, judged after every pair by three rules."""

import sys
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from records.tools.judge import e_of_pairs, e_value

DISTRIBUTIONS = {
    "normal": lambda random, size: random.normal(size=size),
    "Student's t, 3 degrees": lambda random, size: random.standard_t(3, size),
    "Student's t, 2 degrees": lambda random, size: random.standard_t(2, size),
    "Cauchy": lambda random, size: random.standard_cauchy(size),
    "normal, one in ten spreads ten times as far": lambda random, size:
        random.normal(size=size) * np.where(random.random(size) < 0.1, 10, 1),
    "uniform": lambda random, size: random.uniform(-1, 1, size),
    "two-valued": lambda random, size: random.choice((-1.0, 1.0), size),
    "two-valued, one in ten is a hundredth": lambda random, size:
        random.choice((-1.0, 1.0), size) * np.where(random.random(size) < 0.1, 0.01, 1),
    "skewed: one in fourteen crosses over": lambda random, size:
        random.normal(size=size) + np.where(random.random(size) < 1 / 14, 13.0, -1.0),
}
for effect in (1.0, 2.0, 3.0, 5.0):
    DISTRIBUTIONS[f"effect of {effect:g}"] = partial(np.random.Generator.normal, loc=effect)

RULES = {
    "E": lambda seen: e_value(seen) >= 100,
    "and eight of one sign": lambda seen: (e_value(seen) >= 100) & (
        np.sum(seen * np.mean(seen, -1, keepdims=True) > 0, -1) >= 8),
    "and bets on signs": lambda seen: e_of_pairs(seen) >= 100,
}

def decided_after(name, rule, races, pairs=50):
    """After how many pairs each of so many races is decided; 51 if it is not."""
    differences = DISTRIBUTIONS[name](np.random.default_rng(0), size=(races, pairs))
    decided = [RULES[rule](differences[:, :n]) for n in range(1, pairs + 1)]
    return np.argmax([*decided, np.full(races, True)], axis=0) + 1

if __name__ == "__main__":
    races = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    print(f"| {races:,} races | " + " | ".join(RULES) + " |\n|---" + "|---" * len(RULES) + "|")
    for name in DISTRIBUTIONS:
        cells = []
        for rule in RULES:
            after = decided_after(name, rule, races)
            cells.append(", ".join(f"{100 * np.mean(after <= n):.2f}" for n in (12, 50)) + " %")
            if name.startswith("effect"):
                cells[-1] += f", median {np.median(after):g}"
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
