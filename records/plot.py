"""Pictures of runs, for compare.py: validation losses over training time and tokens, and where two
sides ran the same seeds, their difference by step."""

import math
import textwrap
from itertools import cycle

from records import logs
from records.logs import BadInput, printable

with logs.installed():
    import matplotlib
    import numpy as np
    from matplotlib.figure import Figure
    from scipy import stats

# Told apart by the colour-blind, and in grey by the dashes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
DASHES = ("-", (0, (4, 1.5)), "-.", ":")
DIFFERENCE = "#5B3A8C"
SHOWN_FROM = 0.5  # of the steps; before that, losses fall so steeply that they would set the scale
AXES = {"seconds": "training time (seconds)", "tokens": "training tokens (millions)",
        "step": "training step"}
STYLE = {"font.size": 11, "axes.titlesize": 11, "legend.fontsize": 10, "figure.titlesize": 13,
         "text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False}

def short(name, width=40):
    name = printable(name)
    return name if len(name) <= width else f"{name[:width - 3]}..."

# ---- Curves --------------------------------------------------------------------------------------

def place(line, axis):
    """Where a Line stands on an axis of AXES."""
    value = getattr(line, axis)
    return value / 1e6 if axis == "tokens" else value

def shown_lines(run):
    """The validations that are drawn: those of the run's second half, unless they are too few."""
    found = [line for line in run.validations if line.loss is not None]
    late = [line for line in found if line.step >= SHOWN_FROM * run.steps]
    return late if len(late) > 1 else found

def validation_curve(run, axis):
    """Positions and losses."""
    points = shown_lines(run)
    return [place(line, axis) for line in points], [line.loss for line in points]

def mean_curve(runs, axis):
    """The mean of the runs' curves; None where they do not have the same steps."""
    if len({tuple(validation_curve(run, "step")[0]) for run in runs}) != 1:
        return None
    return np.mean([validation_curve(run, axis) for run in runs], axis=0)

def differences_by_step(pairs):
    """Steps, and rows of A - B in the validation loss for each pair; None where they share no two
    steps, or do not run to the same one: on the way, other schedules say little."""
    if len(pairs) < 2 or len({run.total for pair in pairs for run in pair}) != 1:
        return None
    tables = [[dict(zip(*validation_curve(run, "step"))) for run in pair] for pair in pairs]
    steps = sorted(set.intersection(*(set(table) for pair in tables for table in pair)))
    if len(steps) < 2:
        return None
    return steps, np.array([[a[step] - b[step] for step in steps] for a, b in tables])

# ---- Panels --------------------------------------------------------------------------------------

def draw_losses(panel, side, axis, colour, dash):
    """A thin line a run, and a bold one their mean, where all validated at the same steps."""
    name = short(side.name)
    runs = side.used or side.runs
    for run in runs:
        panel.plot(*validation_curve(run, axis), color=colour, linewidth=0.8, alpha=0.6)
    bold = {"color": colour, "linestyle": dash, "marker": "o", "markersize": 4}
    mean = mean_curve(runs, axis)
    if len(runs) > 1 and mean is not None:
        panel.plot(*mean, **bold, linewidth=2.6, label=f"{name}: mean of {len(runs)} runs")
    else:
        label = name if len(runs) == 1 else f"{name}: {len(runs)} runs"
        panel.plot(*validation_curve(runs[0], axis), **bold, linewidth=1.8, label=label)

def finish_panel(panel, axis, ylabel):
    panel.set_xlabel(AXES[axis])
    panel.set_ylabel(ylabel)
    panel.grid(color="0.88", linewidth=0.7)
    panel.set_axisbelow(True)
    panel.ticklabel_format(style="plain", useOffset=False)
    if axis == "step":
        panel.xaxis.get_major_locator().set_params(integer=True)

def draw_difference(panel, steps, rows):
    """A - B by step: a thin line a pair, a bold one their mean, and the 95 % interval."""
    mean = rows.mean(axis=0)
    half = stats.t.ppf(0.975, len(rows) - 1) * rows.std(axis=0, ddof=1) / math.sqrt(len(rows))
    panel.fill_between(steps, mean - half, mean + half, color=DIFFERENCE, alpha=0.18, linewidth=0,
                       label="95 % interval of the mean difference")
    panel.plot(steps, rows.T, color=DIFFERENCE, linewidth=0.8, alpha=0.6)
    panel.plot(steps, mean, color=DIFFERENCE, linewidth=2.6, marker="o" * (len(steps) < 30),
               markersize=4, label=f"mean difference of {len(rows)} pairs")
    panel.axhline(0, color="black", linewidth=1)
    values = np.append(rows, 0)
    room = 0.4 * np.ptp(values) or 0.01  # for the band, which is wide where the pairs are few
    panel.set_ylim(values.min() - room, values.max() + room)
    panel.set_title("Difference in validation loss, in pairs of one seed: below 0 the first is "
                    "better")
    finish_panel(panel, "step", "difference (nats a token)")

# ---- The picture ---------------------------------------------------------------------------------

def draw(sides, target, pairs=()):
    """The figure of one or two sides; pairs are those (run of A, run of B) that share a seed."""
    runs = [run for side in sides for run in side.used or side.runs if shown_lines(run)]
    if not runs:
        raise BadInput("no picture, for the logs hold no validation")
    difference = differences_by_step(pairs)
    amount = "step" if any(line.tokens is None for run in runs for line in run.lines) else "tokens"
    figure = Figure(figsize=(9, 7.6 if difference else 4.8), layout="constrained")
    mosaic = [["time", "tokens"]] + [["difference"] * 2] * bool(difference)
    panels = figure.subplot_mosaic(mosaic)
    for axis, panel in (("seconds", panels["time"]), (amount, panels["tokens"])):
        for side, colour, dash in zip(sides, cycle(COLOURS), cycle(DASHES)):
            draw_losses(panel, side, axis, colour, dash)
        low, high = panel.get_ylim()
        if target is not None and abs(target - (low + high) / 2) < high - low:
            panel.axhline(target, color="black", linewidth=1, linestyle="-.",
                          label=f"target {target:g}")
        finish_panel(panel, axis, "loss (nats a token)")
    if difference:
        draw_difference(panels["difference"], *difference)
    entries = {}
    for panel in figure.axes:
        handles, labels = panel.get_legend_handles_labels()
        entries |= dict(zip(labels, handles))
    figure.suptitle(title(sides))
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=2, frameon=False)
    return figure

def title(sides):
    counts = [len(side.used or side.runs) for side in sides]
    amount = f"{counts[0]}" if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    runs = f"{amount} run{'s' * (amount != '1')}{' each' * (len(sides) > 1)}"
    *names, last = [short(side.name) for side in sides]
    against = f"{', '.join(names)} against " if names else ""
    return textwrap.fill(f"Validation loss of {against}{last}, {runs}", 80)

def save(path, sides, target, pairs=()):
    with matplotlib.rc_context(STYLE):
        draw(sides, target, pairs).savefig(path, dpi=144)
