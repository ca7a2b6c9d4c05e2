"""Pictures of runs, for compare.py: validation losses over training time and tokens, and where two
sides ran the same seeds, their difference by step. page.py draws the same panels for a browser."""

import textwrap
from collections import namedtuple
from itertools import cycle

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from records.tools.judge import differences_by_step, pairs_of
from records.tools.logs import BadInput, short
from records.tools.tables import runs_of

# Told apart by the colour-blind, and in grey by the dashes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
DASHES = ("-", (0, (4, 1.5)), "-.", ":")
FIRST = 0.1  # of the steps: losses before that are so high that they would set the scale
AXES = {"seconds": "training time (seconds)", "tokens": "training tokens (millions)",
        "step": "training step"}
STYLE = {"font.size": 11, "axes.titlesize": 11, "legend.fontsize": 10, "figure.titlesize": 13,
         "text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False}

# ---- Panels --------------------------------------------------------------------------------------

# The groups have a colour each; `range` of the losses or differences may be None; `level` is a
# line across, with its name.
Panel = namedtuple("Panel", "axis what groups range level")
# Thin lines (name, x, y), a bold one (x, y) for all, and a band (x, low, high), which may be empty.
Group = namedtuple("Group", "name lines bold band")

def axes_of(sides):
    """All that every validation has."""
    lines = [line for side in sides for run in side.runs for line in run.validations]
    return [axis for axis in AXES if all(getattr(line, axis) is not None for line in lines)]

def validation_curve(run, axis):
    """Positions and losses, where these are finite."""
    points = [line for line in run.validations if line.loss is not None]
    size = 1e6 if axis == "tokens" else 1
    return [getattr(line, axis) / size for line in points], [line.loss for line in points]

def bold_curve(runs, axis):
    """The curve that stands for all runs: the mean, where all validated at the same steps. Over
    time it is the run of median time, for the mean would end where no run did."""
    if axis == "seconds" or len({tuple(validation_curve(run, "step")[0]) for run in runs}) != 1:
        middle = sorted(runs, key=lambda run: run.seconds or 0)[(len(runs) - 1) // 2]
        return validation_curve(middle, axis)
    return np.mean([validation_curve(run, axis) for run in runs], axis=0).tolist()

def loss_panel(sides, axis, target):
    groups = []
    for side in sides:
        lines = [(name_of(run), *validation_curve(run, axis)) for run in side.runs]
        groups.append(Group(label_of(side), lines, bold_curve(side.used or side.runs, axis), ()))
    bounds = loss_range([run for side in sides for run in side.used or side.runs], target)
    near = target is not None and bounds and bounds[0] < target < bounds[1]
    return Panel(axis, "validation loss (nats a token)", groups, bounds,
                 (target, f"target {target:g}") if near else None)

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

def difference_panel(sides, comparisons):
    """A - B by step, of each candidate. None where no pairs compare."""
    groups = []
    late = [0]  # what the second half of the steps has sets the scale
    for side, comparison in zip(sides, comparisons):
        pairs = pairs_of(side, sides[-1])
        test = comparison["paired"]["loss"]
        found = differences_by_step(pairs, test["level"], test["E"] is not None)
        if not found:
            continue
        steps, rows, bands = found
        known = [(step, *band) for step, band in zip(steps, bands) if band]
        lines = [(f"{short(side.name)}, seed {run.seed}", steps, row)
                 for (run, _), row in zip(pairs, rows.tolist())]
        means = rows.mean(axis=0).tolist()
        name = f"{short(side.name)}, mean of {runs_of(len(pairs), 'pair')}: {means[-1]:+.4f}"
        groups.append(Group(name, lines, (steps, means), known))
        for i, step in enumerate(steps):
            if step >= steps[-1] / 2:
                late += [*rows[:, i].tolist(), *(bands[i] or ())]
    room = 0.1 * (max(late) - min(late)) or 0.01
    return Panel("step", "difference (nats a token)", groups, (min(late) - room, max(late) + room),
                 (0, "below 0 the first is better")) if groups else None

# ---- Names ---------------------------------------------------------------------------------------

def name_of(run):
    return short(run.name) + (f", seed {short(run.seed)}" if run.seed else "")

def label_of(side):
    count = len(side.used or side.runs)
    return f"{short(side.name)}: {count} runs" if count > 1 else short(side.name)

def names(sides):
    """What is compared."""
    *others, last = [short(side.name) for side in sides]
    return f"{', '.join(others)} against {last}" if others else last

# ---- The picture ---------------------------------------------------------------------------------

def draw_panel(panel, place):
    for group, colour, dash in zip(panel.groups, cycle(COLOURS), cycle(DASHES)):
        if group.band:
            place.fill_between(*zip(*group.band), color=colour, alpha=0.18, linewidth=0)
        for _, x, y in group.lines:
            place.plot(x, y, color=colour, linewidth=0.8, alpha=0.6)
        place.plot(*group.bold, color=colour, linestyle=dash, linewidth=2.4, label=group.name,
                   marker="o" * (len(group.bold[0]) < 30), markersize=4)
    if panel.level:
        place.axhline(panel.level[0], color="black", linewidth=1, linestyle="-.",
                      label=panel.level[1])
    several = panel.axis == "seconds" and any(len(group.lines) > 1 for group in panel.groups)
    place.set(xlabel=AXES[panel.axis] + "\nbold: the run of median time" * several,
              ylabel=panel.what, ylim=panel.range)
    place.grid(color="0.88", linewidth=0.7)
    place.set_axisbelow(True)
    place.ticklabel_format(style="plain", useOffset=False)

def draw(sides, comparisons, target):
    """The figure of some sides, the baseline last where there are comparisons with it."""
    if not any(validation_curve(run, "step")[0] for side in sides for run in side.runs):
        raise BadInput("no picture, for the logs hold no validation")
    panels = [loss_panel(sides, axis, target) for axis in axes_of(sides)[:2]]
    below = difference_panel(sides, comparisons)
    figure = Figure(figsize=(9, 7.6 if below else 4.8), layout="constrained")
    rows = [range(len(panels))] + [[len(panels)] * len(panels)] * bool(below)
    places = figure.subplot_mosaic([list(row) for row in rows])
    for i, panel in enumerate([*panels, below] if below else panels):
        draw_panel(panel, places[i])
    entries = {}
    for place in figure.axes:
        handles, labels = place.get_legend_handles_labels()
        entries |= dict(zip(labels, handles))
    figure.suptitle(textwrap.fill(f"Validation loss of {names(sides)}", 80))
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=2, frameon=False)
    return figure

def save(path, *content):
    with matplotlib.rc_context(STYLE):
        draw(*content).savefig(path, dpi=144)
