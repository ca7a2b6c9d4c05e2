"""Pictures of runs: validation losses over training time and tokens, and where two sides ran the
same seeds, their difference by step."""

import textwrap

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from records.tools.judge import differences_by_step, pairs_of
from records.tools.load import UserError
from records.tools.logs import short
from records.tools.tables import runs_of

# Told apart by the colour-blind, and in grey by the dashes.
COLOURS = ("#0072B2", "#D55E00")
DASHES = ("-", (0, (4, 1.5)))
FIRST = 0.1  # of the steps: losses before that are so high that they would set the scale
AXES = {"seconds": "training time (seconds)", "tokens": "training tokens (millions)",
        "step": "training step"}
LEVEL = {"color": "black", "linewidth": 1, "linestyle": "-."}
STYLE = {"font.size": 11, "axes.titlesize": 11, "legend.fontsize": 10, "figure.titlesize": 13,
         "text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False}

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

def loss_range(runs):
    """Of the losses that set the scale, with room; None where all are the same."""
    shown = [line.loss for run in runs for line in run.validations
             if line.loss is not None and line.step >= FIRST * line.total]
    if len(set(shown)) < 2:
        return None
    low, high = min(shown), max(shown)
    room = 0.05 * (high - low)
    return low - room, high + room

def names(sides):
    """What is compared."""
    return " against ".join(short(side.name) for side in sides)

def draw_curves(place, thin, bold, name, colour, dash):
    for x, y in thin:
        place.plot(x, y, color=colour, linewidth=0.8, alpha=0.6)
    place.plot(*bold, color=colour, linestyle=dash, linewidth=2.4, label=name,
               marker="o" * (len(bold[0]) < 30), markersize=4)

def draw_losses(place, sides, axis, target):
    for side, *style in zip(sides, COLOURS, DASHES):
        runs = side.used or side.runs
        name = short(side.name) + f": {len(runs)} runs" * (len(runs) > 1)
        draw_curves(place, [validation_curve(run, axis) for run in side.runs],
                    bold_curve(runs, axis), name, *style)
    bounds = loss_range([run for side in sides for run in side.used or side.runs])
    if target is not None and bounds and bounds[0] < target < bounds[1]:
        place.axhline(target, **LEVEL, label=f"target {target:g}")
    several = axis == "seconds" and any(len(side.runs) > 1 for side in sides)
    place.set(xlabel=AXES[axis] + "\nbold: the run of median time" * several,
              ylabel="validation loss (nats a token)", ylim=bounds)

def draw_differences(place, name, steps, rows, bands):
    """A - B by step: rows and bands as judge.differences_by_step has them."""
    late = [0]  # what the second half of the steps has sets the scale
    known = [(step, *band) for step, band in zip(steps, bands) if band]
    if known:
        place.fill_between(*zip(*known), color=COLOURS[0], alpha=0.18, linewidth=0)
    means = rows.mean(axis=0).tolist()
    draw_curves(place, [(steps, row) for row in rows], (steps, means),
                f"{name}, mean of {runs_of(len(rows), 'pair')}: {means[-1]:+.4f}",
                COLOURS[0], DASHES[0])
    for i, step in enumerate(steps):
        if step >= steps[-1] / 2:
            late += [*rows[:, i].tolist(), *(bands[i] or ())]
    room = 0.1 * (max(late) - min(late)) or 0.01
    place.axhline(0, **LEVEL, label="below 0 the first is better")
    place.set(xlabel=AXES["step"], ylabel="difference (nats a token)",
              ylim=(min(late) - room, max(late) + room))

def draw(sides, comparison, target):
    """The figure of a side, or of two and their comparison."""
    if not any(validation_curve(run, "step")[0] for side in sides for run in side.runs):
        raise UserError("no picture, for the logs hold no validation")
    axes = axes_of(sides)[:2]
    differences = comparison and differences_by_step(pairs_of(*sides), comparison["paired"]["loss"])
    figure = Figure(figsize=(9, 7.6 if differences else 4.8), layout="constrained")
    places = figure.subplot_mosaic([axes] + [["below"] * len(axes)] * bool(differences))
    for axis in axes:
        draw_losses(places[axis], sides, axis, target)
    if differences:
        draw_differences(places["below"], short(sides[0].name), *differences)
    entries = {}
    for place in figure.axes:
        place.grid(color="0.88", linewidth=0.7)
        place.set_axisbelow(True)
        place.ticklabel_format(style="plain", useOffset=False)
        handles, labels = place.get_legend_handles_labels()
        entries |= dict(zip(labels, handles))
    figure.suptitle(textwrap.fill(f"Validation loss of {names(sides)}", 80))
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=2, frameon=False)
    return figure

def save(file, *content, **more):
    with matplotlib.rc_context(STYLE):
        draw(*content).savefig(file, dpi=144, **more)
