"""statistics.md as submissions to the speedrun carry it, for compare.py: the runs, their
statistics, the one-sided p against the target, Welch's tests, and the values as Python lists. Its
figures are those of two published ones, as tests/test_compare.py checks."""

import os
from pathlib import Path
from statistics import median

from records.tools import judge
from records.tools.load import require
from records.tools.logs import number

PEEKED = ("These runs are of a race, which looks after each pair and stops when it is decided, so "
          "no p-value of their difference holds: its E does, which ./run.sh compare "
          "--until_decided=0.01 gives.")
MARK = "Written by `./run.sh compare --statistics`."

def section(side, target):
    """One side."""
    losses, times = ([getattr(one, key) for one in side.used] for key in ("loss", "seconds"))
    facts = [" | ".join(sorted({str(getattr(one, what) or "unknown") for one in side.used}))
             for what in ("steps", "hardware", "torch")]
    lines = [f"## {side.name}", "",
             "{} runs, {} steps, on {}, torch {}.".format(len(side.used), *facts), "",
             "| run | seed | val_loss | train_time |", "|---|---|---|---|"]
    lines += [f"| {one.name} | {one.seed or '-'} | {one.loss} | {1000 * one.seconds:.0f}ms |"
              for one in side.used]
    lines += ["", "| | mean | std | min | median | max |", "|---|---|---|---|---|---|"]
    for what, values, found, form in (("val_loss", losses, side.loss, ".10f"),
                                      ("train_time (s)", times, side.seconds, ".6f")):
        cells = [found["mean"], found["sd"], min(values), median(values), max(values)]
        lines.append(f"| {what} | {' | '.join(number(one, form) for one in cells)} |")
    lines += ["", "```python", f"losses = {losses}", f"times = {times}", "```", ""]
    if target is not None:
        lines += [f"p(mean val_loss < {target:g}) = **{number(side.rule['p'], '.10f')}**, by "
                  f'`scipy.stats.ttest_1samp(losses, {target:g}, alternative="less").pvalue`.', ""]
    return lines

def until_decided(sides):
    """Whether a run lies in the folder of a race."""
    folders = {Path(one.path).resolve().parents[1] for side in sides for one in side.used}
    return any((folder / "race.json").exists() for folder in folders)

def section_of_two(a, b, comparison):
    """Differences by Welch's tests, whatever the verdict was tested by."""
    lines = [f"## {a.name} against {b.name}", "",
             "| | difference | Welch's t | two-sided p |", "|---|---|---|---|"]
    for what, key, form in (("val_loss", "loss", "+.10f"), ("train_time (s)", "seconds", "+.6f")):
        test = judge.welch(*judge.tested(a, b, "welch", key))
        lines.append(f"| {what} | {number(test['difference'], form)} | {number(test['t'], '.3f')} "
                     f"| {number(test['p'], '.7g')} |")
    ours, theirs = a.seconds["mean"], b.seconds["mean"]
    return [*lines, "", f"Relative train time: {100 * (ours / theirs - 1):+.6f} %, speedup "
            f"{theirs / ours:.8f}x.", "", comparison["verdict"], ""]

def write(sides, comparison, target):
    """The file beside the logs of A; it replaces only one that stems from here."""
    for side in sides:
        require(side.used, f"--statistics: {side.name} has no finished run")
    folders = [Path(one.path).resolve().parent for one in sides[0].runs]
    path = Path(os.path.commonpath(folders)) / "statistics.md"
    require(not path.exists() or MARK in path.read_text(encoding="utf-8", errors="replace"),
            f"{path} was not written by --statistics: rename it")
    lines = ["# Statistics", "", *[PEEKED, ""] * until_decided(sides)]
    if comparison:
        lines += section_of_two(*sides, comparison)
    for side in sides:
        lines += section(side, target)
    path.write_text("\n".join([*lines, MARK, ""]), encoding="utf-8")
    return path
