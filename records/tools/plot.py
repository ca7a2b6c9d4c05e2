"""Pictures of runs, for compare.py: validation losses over training time and tokens, and where two
sides ran the same seeds, their difference by step."""

import contextlib
import os
import re
import textwrap
from datetime import datetime
from itertools import cycle, pairwise

from records.tools.judge import ALPHA, differences_by_step, interval_of_pairs
from records.tools.load import installed
from records.tools.logs import BadInput, short

with installed():
    import matplotlib
    import numpy as np
    from matplotlib.figure import Figure

# Told apart by the colour-blind, and in grey by the dashes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
DASHES = ("-", (0, (4, 1.5)), "-.", ":")
DIFFERENCE = "#5B3A8C"
FIRST = 0.1  # of the steps: losses before that are so high that they would set the scale
AXES = {"seconds": "training time (seconds)", "tokens": "training tokens (millions)",
        "step": "training step"}
STYLE = {"font.size": 11, "axes.titlesize": 11, "legend.fontsize": 10, "figure.titlesize": 13,
         "text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False}

# ---- Curves --------------------------------------------------------------------------------------

def place(line, axis):
    """Where a Line stands on an axis of AXES."""
    value = getattr(line, axis)
    return value / 1e6 if axis == "tokens" and value is not None else value

def validation_curve(run, axis):
    """Positions and losses, where these are finite."""
    points = [line for line in run.validations if line.loss is not None]
    return [place(line, axis) for line in points], [line.loss for line in points]

def bold_curve(runs, axis):
    """The curve that stands for all runs: the mean, where all validated at the same steps. Over
    time it is the run of median time, for the mean would end where no run did."""
    if axis == "seconds" or len({tuple(validation_curve(run, "step")[0]) for run in runs}) != 1:
        middle = sorted(runs, key=lambda run: run.seconds or 0)[(len(runs) - 1) // 2]
        return validation_curve(middle, axis)
    positions, losses = np.mean([validation_curve(run, axis) for run in runs], axis=0).tolist()
    return positions, losses

def loss_range(runs, target):
    """Of the losses that set the scale, and of a target near them, with room; None where all are
    the same."""
    shown = [line.loss for run in runs for line in run.validations
             if line.loss is not None and line.step >= FIRST * line.total]
    if len(set(shown)) < 2:
        return None
    low, high = min(shown), max(shown)
    if target is not None and abs(target - (low + high) / 2) < high - low:
        low, high = min(low, target), max(high, target)
    room = 0.05 * (high - low)
    return low - room, high + room

def difference_range(steps, rows, bands):
    """Of the differences in the second half of the steps, and of 0, with room. `bands` are
    intervals of their mean, None where there is none."""
    late = [i for i, step in enumerate(steps) if step >= steps[-1] / 2]
    values = [0, *rows[:, late].ravel(), *(end for i in late for end in bands[i] or ())]
    room = 0.1 * (max(values) - min(values)) or 0.01
    return min(values) - room, max(values) + room

STARTED = re.compile(r"(?a)\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ")  # in a log's name

def overlapped(runs):
    """Whether runs were at work at the same time on one CPU: then their times say little."""
    spans = []
    for run in runs:
        started = STARTED.match(os.path.basename(run.path))
        host = run.environment.get("host")
        if started and host and not run.environment.get("gpus"):
            with contextlib.suppress(ValueError):  # a date that there is not
                first = datetime.strptime(started[0], "%Y-%m-%dT%H-%M-%SZ").timestamp()
                spans.append((host, first, first + (run.seconds or 0)))
    return any(before[0] == after[0] and after[1] < before[2]
               for before, after in pairwise(sorted(spans)))

# ---- Panels --------------------------------------------------------------------------------------

def draw_losses(panel, side, axis, colour, dash):
    """A thin line a run, and a bold one for all."""
    runs = side.used or side.runs
    for run in runs:
        panel.plot(*validation_curve(run, axis), color=colour, linewidth=0.8, alpha=0.6)
    panel.plot(*bold_curve(runs, axis), color=colour, linestyle=dash, marker="o", markersize=4,
               linewidth=2.6 if len(runs) > 1 else 1.8, label=label_of(side))

def label_of(side):
    count = len(side.used or side.runs)
    return f"{short(side.name)}: {count} runs" if count > 1 else short(side.name)

def finish_panel(panel, axis, ylabel):
    panel.set_xlabel(AXES[axis])
    panel.set_ylabel(ylabel)
    panel.grid(color="0.88", linewidth=0.7)
    panel.set_axisbelow(True)
    panel.ticklabel_format(style="plain", useOffset=False)

def draw_difference(panel, steps, rows, level):
    """A - B by step: a thin line a pair, a bold one their mean, and its interval."""
    bands = [interval_of_pairs(column, level or ALPHA, bool(level)) for column in rows.T]
    known = [i for i, band in enumerate(bands) if band]
    if known:
        panel.fill_between([steps[i] for i in known], *zip(*(bands[i] for i in known)),
                           color=DIFFERENCE, alpha=0.18, linewidth=0,
                           label=f"{100 * (1 - (level or ALPHA)):g} % interval of the mean "
                                 "difference")
    panel.plot(steps, rows.T, color=DIFFERENCE, linewidth=0.8, alpha=0.6)
    panel.plot(steps, rows.mean(axis=0), color=DIFFERENCE, linewidth=2.6, markersize=4,
               marker="o" * (len(steps) < 30), label=f"mean difference of {len(rows)} pairs")
    panel.axhline(0, color="black", linewidth=1)
    panel.set_ylim(difference_range(steps, rows, bands))
    panel.set_title("Difference in validation loss, in pairs of one seed: below 0 the first is "
                    "better")
    finish_panel(panel, "step", "difference (nats a token)")

# ---- The picture ---------------------------------------------------------------------------------

def draw(sides, target, pairs=(), level=None):
    """The figure of one or two sides; pairs are those (run of A, run of B) that share a seed, and
    a level means that they were added until decided at it."""
    runs = [run for side in sides for run in side.used or side.runs]
    if not any(validation_curve(run, "step")[0] for run in runs):
        raise BadInput("no picture, for the logs hold no validation")
    difference = differences_by_step(pairs) if len(pairs) > 1 else None
    amount = "step" if any(line.tokens is None for run in runs for line in run.lines) else "tokens"
    axes = [amount] if overlapped(runs) else ["seconds", amount]
    figure = Figure(figsize=(9, 7.6 if difference else 4.8), layout="constrained")
    panels = figure.subplot_mosaic([axes, *[["difference"] * len(axes)] * bool(difference)])
    for axis in axes:
        panel = panels[axis]
        for side, colour, dash in zip(sides, cycle(COLOURS), cycle(DASHES)):
            draw_losses(panel, side, axis, colour, dash)
        bounds = loss_range(runs, target)
        if bounds:
            panel.set_ylim(bounds)
        low, high = panel.get_ylim()
        if target is not None and low < target < high:
            panel.axhline(target, color="black", linewidth=1, linestyle="-.",
                          label=f"target {target:g}")
        finish_panel(panel, axis, "validation loss (nats a token)")
    if "seconds" in axes and len(runs) > len(sides):
        panels["seconds"].set_xlabel(f"{AXES['seconds']}\nbold: the run of median time")
    if difference:
        draw_difference(panels["difference"], *difference, level)
    entries = {}
    for panel in figure.axes:
        handles, labels = panel.get_legend_handles_labels()
        entries |= dict(zip(labels, handles))
    figure.suptitle(textwrap.fill(f"Validation loss of {title(sides)}", 80))
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=2, frameon=False)
    return figure

def names(sides):
    """What is compared."""
    *others, last = [short(side.name) for side in sides]
    return f"{', '.join(others)} against {last}" if others else last

def title(sides):
    """The same, with the number of runs."""
    counts = [len(side.used or side.runs) for side in sides]
    amount = f"{counts[0]}" if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    return f"{names(sides)}, {amount} run{'s' * (amount != '1')}{' each' * (len(sides) > 1)}"

def save(path, sides, target, pairs=(), level=None):
    with matplotlib.rc_context(STYLE):
        draw(sides, target, pairs, level).savefig(path, dpi=144)
