"""A page for a browser, of what compare.py and race.py find: one file that opens from a disk or a
mail, without a network. It has the verdict, curves that zoom, tables that sort, and the change of
the source.

The figures are Plotly's, whose script is a part of the page (https://plotly.com/python). Text from
logs may be hostile: it enters the page through `text`, and the figures as JSON in which Plotly
escapes "<". The page's frame is page.html, with its style and a few lines of JavaScript; it forbids
the browser to load anything.
"""

import html
import re
import time
from itertools import cycle, groupby
from pathlib import Path

from records.tools import judge, logs, plot
from records.tools.load import installed
from records.tools.logs import short

with installed():
    import plotly.io
    from plotly.offline import get_plotlyjs

FRAME = Path(__file__).with_suffix(".html")
DASHES = ("solid", "dash", "dashdot", "dot")
HOVER = "%{hovertext}<extra></extra>"
LAST = {"better": "star", "worse": "x", "no difference": "diamond", "undecided": "circle"}
LOSS_WORDS = """<p>A thin line is a run. The bold one is their mean, or over seconds the run of
median time. Drag to zoom; a double click shows the first steps too.</p>"""
DIFFERENCE_WORDS = """<p>A thin line is a pair of runs with one seed, and the bold one their mean,
with the interval of the verdict. Below 0 the candidate is better.</p>"""
NO_PAIRS = "<p>No seed was run by both sides, so there are no pairs.</p>"
NO_STEPS = "<p>The pairs have no two validations at the same steps of runs of one length.</p>"
RACE_WORDS = """<p>The mean difference in the final loss after each pair, with its interval: a
candidate is decided once 0 is outside.</p>"""
OVERLAPPED = "<p>Runs were at work at the same time on one CPU, so they slowed each other down.</p>"

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

def one_line(curves):
    """Curves of points (x, y, hover text) as one line, with a gap after each: x, y and texts. A
    figure of 1,500 lines would be slow."""
    rows = [row for curve in curves for row in [*curve, (None, None, None)]]
    return map(list, zip(*rows))

def run_in_words(run):
    seed = f", seed {label(run.seed)}" if run.seed else ""
    return f"<b>{label(run.name)}</b>{seed}"

def loss_figure(sides, target):
    """Validation losses over steps, tokens or seconds, with buttons for these."""
    runs = [run for side in sides for run in side.runs]
    units = {"step": "step %{x:,.0f}", "tokens": "%{x:,.4f} M tokens", "seconds": "%{x:,.2f} s"}
    if any(line.tokens is None for run in runs for line in run.validations):
        del units["tokens"]
    if plot.overlapped(runs):
        del units["seconds"]
    changes = {axis: {"x": [], "y": [], "hovertemplate": []} for axis in units}
    traces = []
    for side, colour, dash in looks(sides):
        shown = {run: [line for line in run.validations if line.loss is not None]
                 for run in side.runs}
        name = label(plot.label_of(side))
        for axis, change in changes.items():
            x, y, texts = one_line(
                [(plot.place(line, axis), line.loss, f"{run_in_words(run)}<br>step {line.step:,}, "
                  f"{line.seconds:,.2f} s<br>loss {line.loss:.4f}") for line in lines]
                for run, lines in shown.items())
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
        test = comparison["paired"]["loss"]
        means = rows.mean(axis=0).tolist()
        bands = [judge.interval_of_pairs(column, test["level"], test["E"] is not None)
                 for column in rows.T.tolist()]
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
        pairs = judge.pairs_of(side, sides[-1])
        test = comparison["paired"]["loss"]
        if test["E"] is None or not pairs:
            continue
        losses = [[run.loss for run in runs] for runs in zip(*pairs)]
        counts = list(range(1, len(pairs) + 1))
        tests = [judge.until_decided(losses[0][:n], losses[1][:n], test["level"]) for n in counts]
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

# ---- Tables --------------------------------------------------------------------------------------

def verdict_table(sides, comparisons):
    rows = []
    for side, found in zip(sides, comparisons):
        loss, seconds = (judge.test_that_speaks(found, key) for key in ("loss", "seconds"))
        pairs = len(found["paired"]["seeds"])
        signs = f"{loss['lower']} of {pairs}" if "lower" in loss else "-"
        rows.append([words(side.name), words(found["decision"]), words(signs),
                     number(loss["difference"], "+.4f"), interval(loss["interval"], "+.4f"),
                     number(loss["p"], ".2g"), number(loss["E"], ",.1f"),
                     number(loss["adjusted"], ".2g"),
                     number(seconds["difference"], "+.2f", " s")])
    name = short(sides[-1].name, 20)
    return table("verdict", ["candidate", "decision", "pairs lower", f"loss - {name}'s", "interval",
                             "p", "E", "p or 1 / E, adjusted", f"time - {name}'s"], rows)

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

def run_table(sides, target):
    reached = [] if target is None else [f"step at {target:g}", f"time to {target:g}"]
    rows = []
    for side in sides:
        for run in side.runs:
            step, seconds = run.reached or (None, None)
            counts = "yes" if run in side.used else f"no, at step {run.steps} of {run.total}"
            row = [words(short(side.name)), words(short(run.name, 80)), words(run.seed or "-"),
                   number(run.loss, ".4f"), number(run.seconds, ".2f", " s"),
                   number(run.ms_per_step, ".2f"), number(run.steps, "d"), number(run.tokens, ",d")]
            row += [number(step, ".0f"), number(seconds, ".2f", " s")] if reached else []
            rows.append([*row, words(counts)])
    return table("runs", ["side", "run", "seed", "val loss", "time", "ms a step", "steps",
                          "tokens", *reached, "counts"], rows)

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
    overlapped = plot.overlapped([run for side in sides for run in side.runs])
    parts.append(section(f"Validation loss: {names}", LOSS_WORDS + OVERLAPPED * overlapped,
                         loss_figure(sides, target)))
    if comparisons:
        found = difference_figure(sides, comparisons)
        alone = not any(one["paired"]["seeds"] for one in comparisons)
        said = DIFFERENCE_WORDS if found else NO_PAIRS if alone else NO_STEPS
        parts.append(section(f"Difference in validation loss: {names}", said, found or ""))
        found = race_figure(sides, comparisons)
        parts += [section(f"The race as it went: {names}", RACE_WORDS, found)] if found else []
    lines = [f"<p>{text(side.name)}: {text(line)}</p>" for side in sides if target is not None
             for line in side.rule_lines]
    lines += [f'<p class="note">{text(line, 1000)}</p>' for side in sides
              for line in side.warnings]
    parts.append(section("Runs", side_table(sides), *lines,
                         run_table(sides, target)))
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
