"""A page for a browser, of what compare.py and race.py find: one file that opens from a disk or a
mail, without a network. It has the verdict, curves that zoom, tables that sort, the change of the
source, and the logs for download.

The figures are Plotly's, whose script is a part of the page (https://plotly.com/python). Text from
logs may be hostile: it enters the page through `text`, and the figures as JSON in which Plotly
escapes "<". The page's frame is page.html, with its style and a few lines of JavaScript; it forbids
the browser to load anything.
"""

import base64
import gzip
import hashlib
import html
import os
import re
import time
from itertools import cycle, groupby, pairwise
from pathlib import Path
from statistics import fmean

from records.tools import judge, logs, plot
from records.tools.load import installed
from records.tools.logs import short

with installed():
    import plotly.io
    from plotly.offline import get_plotlyjs

FRAME = Path(__file__).with_suffix(".html")
DASHES = ("solid", "dash", "dashdot", "dot")
POINTS = 40_000         # of all runs' losses: more would make the page slow
TIMES = 2_400           # of all runs' times, but at least 16 a run: more look like noise
DOWNLOADS = 6_000_000   # characters of all logs and sources in a page
DOWNLOAD = 1_500_000    # of one: browsers refuse links of more than two million
HOVER = "%{hovertext}<extra></extra>"
LAST = {"better": "star", "worse": "x", "no difference": "diamond", "undecided": "circle"}
LOSS_WORDS = """<p>A thin line is a run. The bold one is their mean, or over seconds the run of
median time. Drag to zoom; a double click shows the first steps too.</p>"""
DIFFERENCE_WORDS = """<p>A thin line is a pair of runs with one seed, and the bold one their mean,
with its {:g} % interval. Below 0 the candidate is better.</p>"""
NO_PAIRS = "<p>No pair of runs has one seed, the same steps and two validations in common.</p>"
RACE_WORDS = """<p>The mean difference in the final loss after each pair, with its interval. A
candidate is decided once 0 is outside; to be the better one of several takes more.</p>"""
OVERLAPPED = "<p>Runs were at work at the same time on one CPU, so they slowed each other down.</p>"
TIME_WORDS = """<p>A peak is a moment in which the machine did something else.</p>"""

# ---- Text and tables -----------------------------------------------------------------------------

def text(value, longest=400):
    """As HTML, without what would steer a terminal or the browser, and cut where it is long."""
    return html.escape(short(str(value), longest))

def label(value):
    """The same in a figure, where Plotly reads some tags, and names between %{ and }."""
    return text(value, 50).replace("%", "&#37;")

def number(value, form, unit=""):
    """A cell with the value itself, by which the table sorts, and what is shown."""
    known = "" if value is None else repr(value)
    return f'<td class="number" data-value="{known}">{logs.number(value, form, unit)}</td>'

def interval(bounds, form):
    return f'<td class="number">{logs.interval(bounds, form)}</td>'

def words(value):
    return f"<td>{text(value)}</td>"

def table(name, columns, rows):
    """A table that sorts where one clicks a column's name; the rows are of cells."""
    head = "".join(f'<th scope="col"><button>{text(column)}</button></th>' for column in columns)
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return (f'<div class="table" tabindex="0"><table id="{name}"><thead><tr>{head}</tr></thead>'
            f"<tbody>\n{body}\n</tbody></table></div>")

def section(title, *parts):
    return "\n".join([f"<section><h2>{text(title)}</h2>", *parts, "</section>"])

# ---- Figures -------------------------------------------------------------------------------------

def figure(name, traces, xtitle, ytitle, xaxis=(), yaxis=(), **layout):
    """The HTML of a Plotly figure. The frame's style gives text and grid their colours."""
    clear = "rgba(0,0,0,0)"
    entries = sum(trace.get("showlegend", True) for trace in traces)
    height = 420 + 20 * entries  # which stand below each other where the window is narrow
    axis = {"automargin": True, "zeroline": False, "exponentformat": "none"}
    layout |= {"height": height, "autosize": True, "margin": {"l": 10, "r": 10, "t": 36, "b": 10},
               "paper_bgcolor": clear, "plot_bgcolor": clear, "hovermode": "closest",
               "font": {"family": "system-ui, sans-serif", "size": 13},
               "hoverlabel": {"align": "left"},
               "modebar": {"bgcolor": clear, "color": "#888", "activecolor": plot.COLOURS[1]},
               "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"},
               "xaxis": axis | {"title": {"text": xtitle}} | dict(xaxis),
               "yaxis": axis | {"title": {"text": ytitle}, "tickformat": ".4~f"} | dict(yaxis)}
    config = {"responsive": True, "displaylogo": False,  # and no button that sends it to Plotly
              "modeBarButtonsToRemove": ["select2d", "lasso2d", "sendChartToCloud"]}
    return plotly.io.to_html({"data": traces, "layout": layout}, config=config, div_id=name,
                             full_html=False, include_plotlyjs=False, validate=False,
                             default_height=f"{height}px")

def looks(sides):
    """(side, colour, dash) of each."""
    return zip(sides, cycle(plot.COLOURS), cycle(DASHES))

def bold(colour, dash, **more):
    return {"type": "scatter", "mode": "lines+markers", "marker": {"size": 6, "color": colour},
            "hovertemplate": HOVER, "line": {"color": colour, "width": 3, "dash": dash}} | more

def thin(colour, dash, **more):
    return {"type": "scatter", "mode": "lines", "opacity": 0.6, "showlegend": False,
            "hovertemplate": HOVER, "line": {"color": colour, "width": 1, "dash": dash}} | more

def level_line(y, **more):
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y,
            "line": {"color": "#888", "width": 1.5}} | more

def thinned(points, most):
    """At most so many of the points, evenly, the first and the last among them."""
    if len(points) <= most:
        return points
    return [points[i * (len(points) - 1) // (most - 1)] for i in range(most)]

def one_line(curves):
    """Curves of points (x, y, hover text) as one line, with a gap after each: x, y and texts. A
    figure of 1,500 lines would be slow."""
    rows = [row for curve in curves for row in [*curve, (None, None, None)]]
    return map(list, zip(*rows))

def run_in_words(run):
    seed = f", seed {label(run.seed)}" if run.seed else ""
    return f"<b>{label(run.name)}</b>{seed}"

def reference_losses(baseline):
    """{seed: {step: loss}} of the baseline's runs, and {step: mean loss}."""
    used = baseline.used or baseline.runs
    by_seed = {run.seed: {line.step: line.loss for line in run.validations}
               for run in used if run.seed}
    return by_seed, {step: fmean(losses) for step, losses in judge.losses_by_step(used).items()}

def validation_in_words(run, line, by_seed, means):
    """With the difference to the baseline's run of the seed, or to the mean of its runs."""
    said = (f"{run_in_words(run)}<br>step {line.step:,}, {line.seconds:,.2f} s"
            f"<br>loss {line.loss:.4f}")
    for losses, whom in ((by_seed.get(run.seed, {}), "the baseline's of this seed"),
                         (means, "the baseline's mean")):
        if losses.get(line.step) is not None:
            return f"{said}, {line.loss - losses[line.step]:+.4f} against {whom}"
    return said

def loss_figure(sides, target):
    """Validation losses over steps, tokens or seconds, with buttons for these."""
    runs = [run for side in sides for run in side.runs]
    most = max(2, POINTS // len(runs))
    units = {"step": "step %{x:,.0f}", "tokens": "%{x:,.4f} M tokens", "seconds": "%{x:,.2f} s"}
    if any(line.tokens is None for run in runs for line in run.validations):
        del units["tokens"]
    if plot.overlapped(runs):
        del units["seconds"]
    changes = {axis: {"x": [], "y": [], "hovertemplate": []} for axis in units}
    traces = []
    for side, colour, dash in looks(sides):
        reference = reference_losses(sides[-1]) if side is not sides[-1] else ({}, {})
        shown = {run: thinned([line for line in run.validations if line.loss is not None], most)
                 for run in side.runs}
        name = label(plot.label_of(side))
        for axis, change in changes.items():
            x, y, texts = one_line(
                [(plot.place(line, axis), line.loss, validation_in_words(run, line, *reference))
                 for line in lines] for run, lines in shown.items())
            bold_x, bold_y = plot.bold_curve(side.used or side.runs, axis)
            change["x"] += [x, bold_x]
            change["y"] += [y, bold_y]
            change["hovertemplate"] += [
                HOVER, f"{name}<br>{units[axis]}: loss %{{y:.4f}}<extra></extra>"]
        traces.append(thin(colour, dash, hovertext=texts, legendgroup=side.label))
        traces.append(bold(colour, dash, name=name, legendgroup=side.label))
    for i, trace in enumerate(traces):
        trace |= {key: values[i] for key, values in changes["step"].items()}
    buttons = [{"label": f"{axis.removesuffix('s')}s", "method": "update", "args": [
        change, {"xaxis.title.text": plot.AXES[axis], "xaxis.autorange": True}]}
        for axis, change in changes.items()]
    menu = {"type": "buttons", "direction": "right", "buttons": buttons, "x": 0, "xanchor": "left",
            "y": 1.02, "yanchor": "bottom", "pad": {"t": 0, "b": 0}}
    bounds = plot.loss_range([run for side in sides for run in side.used or side.runs], target)
    lines = []
    if target is not None and bounds and bounds[0] < target < bounds[1]:
        said = {"text": f"target {target:g}", "textposition": "start", "yanchor": "bottom"}
        lines.append(level_line(target, label=said))
    return figure("loss", traces, plot.AXES["step"], "validation loss (nats a token)",
                  yaxis={"range": bounds} if bounds else {}, shapes=lines, updatemenus=[menu])

def level_of(comparison):
    """The level at which pairs were added until decided; None where their number was fixed."""
    return None if comparison["paired"]["loss"]["E"] is None else comparison["level"]

def difference_figure(sides, comparisons):
    """A - B by step in pairs of one seed, their mean and its interval; None without such pairs."""
    traces = []
    ranges = []
    for (side, colour, dash), comparison in zip(looks(sides[:-1]), comparisons):
        pairs = judge.pairs_of(side, sides[-1])
        found = judge.differences_by_step(pairs)
        if not found:
            continue
        steps, rows = found
        level = level_of(comparison)
        means = rows.mean(axis=0).tolist()
        bands = [judge.interval_of_pairs(column, level) for column in rows.T.tolist()]
        known = [(step, *band) for step, band in zip(steps, bands) if band]
        name = label(side.name)
        group = {"legendgroup": side.label}
        if known:
            there, low, high = map(list, zip(*known))
            traces.append({"type": "scatter", "mode": "lines", "line": {"width": 0},
                           "x": there + there[::-1], "y": low + high[::-1], "fill": "toself",
                           "fillcolor": f"{colour}33", "hoverinfo": "skip",
                           "showlegend": False} | group)
        x, y, texts = one_line(
            [(step, value, f"<b>{name}</b>, seed {label(run.seed)}<br>step {step:,}: {value:+.4f}")
             for step, value in zip(steps, row)] for (run, _), row in zip(pairs, rows.tolist()))
        traces.append(thin(colour, dash, x=x, y=y, hovertext=texts, **group))
        count = f"{len(pairs)} pair{'s' * (len(pairs) > 1)}"
        said = [f"<b>{name}</b>, mean of {count}<br>step {step:,}: {mean:+.4f}, interval "
                f"{logs.interval(band, '+.4f')}"
                for step, mean, band in zip(steps, means, bands)]
        traces.append(bold(colour, dash, x=steps, y=means, hovertext=said, **group,
                           name=f"{name}: mean of {count}, {means[-1]:+.4f} at the end"))
        ranges += plot.difference_range(steps, rows, bands)
    if not traces:
        return None
    minus = f"loss - {label(short(sides[-1].name, 20))}'s (nats a token)"
    return figure("difference", traces, plot.AXES["step"], minus, shapes=[level_line(0)],
                  yaxis={"range": [min(ranges), max(ranges)]})

def race_figure(sides, comparisons):
    """The mean difference after each pair, with its interval, until a candidate was decided; None
    where the number of pairs was fixed."""
    traces = []
    for (side, colour, dash), comparison in zip(looks(sides[:-1]), comparisons):
        level = level_of(comparison)
        pairs = judge.pairs_of(side, sides[-1])
        if not level or not pairs:
            continue
        losses = [[run.loss for run in runs] for runs in zip(*pairs)]
        counts = list(range(1, len(pairs) + 1))
        tests = [judge.until_decided(losses[0][:n], losses[1][:n], level) for n in counts]
        means = [test["difference"] for test in tests]
        ends = [test["interval"] or (test["difference"],) * 2 for test in tests]
        error = {"type": "data", "symmetric": False, "thickness": 1.2, "width": 3,
                 "array": [high - mean for (_, high), mean in zip(ends, means)],
                 "arrayminus": [mean - low for (low, _), mean in zip(ends, means)]}
        said = [f"<b>{label(side.name)}</b>, pairs: {n}, the last with seed "
                f"{label(pairs[n - 1][0].seed)}<br>mean difference {test['difference']:+.4f}, "
                f"interval {logs.interval(test['interval'], '+.4f')}<br>E = {test['E']:.3g}"
                for n, test in zip(counts, tests)]
        marker = {"color": colour, "opacity": 1, "line": {"width": 0},
                  "size": [7] * (len(pairs) - 1) + [14],
                  "symbol": ["circle"] * (len(pairs) - 1) + [LAST[comparison["decision"]]]}
        traces.append(bold(colour, dash, x=counts, y=means, error_y=error, hovertext=said,
                           marker=marker, name=f"{label(side.name)}: {comparison['decision']} "
                           f"after {len(pairs)} pair{'s' * (len(pairs) > 1)}", showlegend=True))
    if not traces:
        return None
    most = max(len(trace["x"]) for trace in traces)
    return figure("race", traces, "pairs", "mean difference (nats a token)",
                  xaxis={"dtick": max(1, most // 10)}, shapes=[level_line(0)])

def step_times(run, most):
    """Points of milliseconds a step. Where there are too many steps, each point is the mean of the
    steps since the one before."""
    lines = [line for line, after in pairwise([*run.lines, None])
             if after is None or after.step > line.step]
    for before, line in pairwise(thinned(lines, most + 1)):
        ms = 1000 * (line.seconds - before.seconds) / (line.step - before.step)
        steps = f"step {line.step:,}"
        if line.step - before.step > 1:
            steps = f"mean of steps {before.step + 1:,} to {line.step:,}"
        if ms >= 0:  # until January 2025 the clock began anew after ten steps
            yield line.step, round(ms, 3), f"{run_in_words(run)}<br>{steps}: {ms:.2f} ms"

def time_figure(sides):
    """Milliseconds a step, by which a slow machine and a hiccup are seen."""
    most = max(16, TIMES // sum(len(side.runs) for side in sides))
    traces = []
    for side, colour, dash in looks(sides):
        x, y, texts = one_line(step_times(run, most) for run in side.runs)
        traces.append(thin(colour, dash, x=x, y=y, hovertext=texts, showlegend=True,
                           name=label(side.name)))
    return figure("times", traces, plot.AXES["step"], "time of a step (ms)",
                  yaxis={"rangemode": "tozero"})

# ---- Tables --------------------------------------------------------------------------------------

def verdict_table(sides, comparisons):
    rows = []
    for side, found in zip(sides, comparisons):
        loss, seconds = (judge.test_that_speaks(found, key) for key in ("loss", "seconds"))
        rows.append([words(side.name), words(found["decision"]),
                     number(len(found["paired"]["seeds"]), "d"),
                     number(loss["difference"], "+.4f"), interval(loss["interval"], "+.4f"),
                     number(loss["p"], ".2g"), number(loss["E"], ".3g"),
                     number(loss["adjusted"], ".2g"),
                     number(seconds["difference"], "+.2f", " s")])
    name = short(sides[-1].name)
    return table("verdict", ["candidate", "decision", "pairs", f"loss - {name}'s", "interval", "p",
                             "E", "p or 1 / E, adjusted", f"time - {name}'s"], rows)

def side_table(sides):
    rows = []
    for side in sides:
        row = [words(f"{side.label}: {side.name}"), number(side.loss["n"], "d")]
        for what, form, unit in (("loss", ".4f", ""), ("seconds", ".2f", " s")):
            found = getattr(side, what)
            row += [number(found["mean"], form, unit), number(found["sd"], form, unit),
                    interval(found["interval"], form)]
        rows.append(row)
    return table("sides", ["side", "runs", "val loss, mean", "SD", "95 % interval", "time, mean",
                           "SD", "95 % interval"], rows)

def run_table(sides, target, downloads):
    reached = [] if target is None else [f"step at {target:g}", f"time to {target:g}"]
    sources = {run: downloads.source(run) for side in sides for run in side.runs}  # first
    rows = []
    for side in sides:
        for run in side.runs:
            step, seconds = run.reached or (None, None)
            counts = "yes" if run in side.used else f"no, at step {run.steps} of {run.total}"
            row = [words(short(side.name)), words(short(run.name, 80)), words(run.seed or "-"),
                   number(run.loss, ".4f"), number(run.seconds, ".2f", " s"),
                   number(run.ms_per_step, ".2f"), number(run.steps, "d"), number(run.tokens, ",d")]
            row += [number(step, ".0f"), number(seconds, ".2f", " s")] if reached else []
            rows.append([*row, words(counts), f"<td>{sources[run]}</td>",
                         f"<td>{' '.join(downloads.log(path) for path, _ in run.logs)}</td>"])
    return table("runs", ["side", "run", "seed", "val loss", "time", "ms a step", "steps",
                          "tokens", *reached, "counts", "source", "log"], rows)

class Downloads:
    """Links that hold a log or a source, compressed by gzip, until one has no room."""

    def __init__(self):
        self.left = DOWNLOADS
        self.links = {}

    def link(self, key, name, shown, data):
        """The first link of a key holds the file; later ones lead to it."""
        if key not in self.links:
            packed = base64.b64encode(gzip.compress(data, mtime=0)) if self.left > 0 else b""
            if len(packed) > self.left:
                self.left = 0
            if not self.left or len(packed) > DOWNLOAD:
                self.links[key] = f'<span title="no room in this page">{shown}</span>'
                return self.links[key]
            self.left -= len(packed)
            place = f"file{len(self.links)}"
            self.links[key] = f'<a href="#{place}">{shown}</a>'
            return (f'<a id="{place}" download="{text(name, 100)}.gz" '
                    f'href="data:application/gzip;base64,{packed.decode()}">{shown}</a>')
        return self.links[key]

    def source(self, run):
        if not run.source:
            return "-"
        sha256 = hashlib.sha256(run.source.encode()).hexdigest()
        return self.link(sha256, f"{sha256[:8]}.py", sha256[:8], run.source.encode())

    def log(self, path):
        path = os.path.realpath(path)
        return self.link(path, os.path.basename(path), "log", Path(path).read_bytes())

def changes(what, rows, side, baseline):
    """Settings or environment that differ."""
    if not rows:
        return f"<p>No difference in the {what} that the logs name.</p>"
    return table(what, [what, short(baseline.name), short(side.name)],
                 [[words(key), words(" | ".join(before)), words(" | ".join(after))]
                  for key, before, after in rows])

def source_change(diff):
    """A diff in colour, folded by the function that it changes."""
    if not diff:
        return ("<p>The source is the same.</p>" if diff == [] else
                "<p>A log holds no source, so there is no diff.</p>")
    hunks = []  # (function, lines)
    for line in diff[2:]:
        if line.startswith("@@ "):
            hunks.append((line.partition(" @@")[2].strip(), []))
        else:
            hunks[-1][1].append(line)
    parts = []
    for function, group in groupby(hunks, key=lambda hunk: hunk[0]):
        pieces = [lines for _, lines in group]
        signs = [line[:1] for lines in pieces for line in lines]
        shown = diff_line("⋮").join("".join(map(diff_line, lines)) for lines in pieces)
        parts.append(f"<details{' open' * (len(diff) < 60)}><summary><code>"
                     f"{text(function or 'above all functions', 90)}</code> +{signs.count('+')} "
                     f"&minus;{signs.count('-')}</summary><pre>{shown}</pre></details>")
    return "\n".join(parts)

def diff_line(line):
    tag = {"+": "ins", "-": "del"}.get(line[:1], "span")
    return f"<{tag}>{text(line) or ' '}</{tag}>"

# ---- The page ------------------------------------------------------------------------------------

def page(sides, comparisons, target, notes=(), alive=False) -> str:
    """The HTML. sides: the candidates, and the baseline last where there is one; comparisons: what
    compare.py's compare_all says of the candidates; target: a loss or None; notes: lines that stand
    above all; alive: runs are training and the page will be written again, so it reloads itself."""
    names = plot.names(sides)
    parts = [f'<p class="note">{text(note, 1000)}</p>' for note in notes]
    verdicts = [f'<p class="verdict {found["decision"]}">{text(found["verdict"], 3000)}</p>'
                for found in comparisons]
    if comparisons:
        verdicts.insert(len(comparisons) == 1, verdict_table(sides, comparisons))
    parts += verdicts
    parts.append(section(f"Validation loss: {names}", LOSS_WORDS, loss_figure(sides, target)))
    if comparisons:
        found = difference_figure(sides, comparisons)
        level = level_of(comparisons[0]) or 0.05
        words_of_it = DIFFERENCE_WORDS.format(100 * (1 - level)) if found else NO_PAIRS
        parts.append(section(f"Difference in validation loss: {names}", words_of_it, found or ""))
        found = race_figure(sides, comparisons)
        parts += [section(f"The race as it went: {names}", RACE_WORDS, found)] if found else []
    overlapped = plot.overlapped([run for side in sides for run in side.runs])
    parts.append(section(f"Time of each step: {names}", OVERLAPPED if overlapped else TIME_WORDS,
                         time_figure(sides)))
    lines = [f"<p>{text(side.name)}: {text(line)}</p>" for side in sides if target is not None
             for line in judge.rule_lines(side, target)]
    lines += [f'<p class="note">{text(line, 1000)}</p>' for side in sides
              for line in side.warnings]
    parts.append(section("Runs", side_table(sides), *lines,
                         run_table(sides, target, Downloads())))
    for side, found in zip(sides, comparisons):
        parts.append(section(f"What differs: {plot.names([side, sides[-1]])}",
                             changes("settings", found["hyperparameters"], side, sides[-1]),
                             changes("environment", found["environment"], side, sides[-1]),
                             source_change(found["source"])))
    values = {"title": text(plot.title(sides)), "alive": str(alive).lower(),
              "written": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
              "plotly": get_plotlyjs(), "body": "\n".join(parts)}
    pieces = re.split("{{(.*?)}}", FRAME.read_text(encoding="utf-8"))  # text, name, text, ...
    pieces[1::2] = [values[name] for name in pieces[1::2]]
    return "".join(pieces)

def save(path, *content, **more):
    """Write the page in one go, so that no browser reads half of it."""
    partial = Path(f"{path}.partial")
    partial.write_text(page(*content, **more), encoding="utf-8")
    partial.replace(path)
