"""A page for a browser, of what compare.py and race.py find: one file that opens from a disk or a
mail, without a network, with curves that zoom.

The figures are Plotly's, whose script is a part of the page (https://plotly.com/python). Text from
logs may be hostile: it enters the page through `text`, and the figures as JSON in which Plotly
escapes "<". The page's frame, page.html, forbids the browser to load anything.
"""

import html
import re
import time
from itertools import cycle
from pathlib import Path
from string import Template

import plotly.io
from plotly.offline import get_plotlyjs

from records.tools import plot, tables
from records.tools.logs import short

FRAME = Path(__file__).with_suffix(".html")
NUMBER = re.compile(r"[+-]?\d[\d.,]*( s|[kMB])?$|-$")
DASHES = ("solid", "dash", "dashdot", "dot")
HOVER = "%{hovertext}<br>%{x:,}: %{y:,.4f}<extra></extra>"
LOSS_WORDS = """<p>A thin line is a run. The bold one is their mean, or over seconds the run of
median time. Drag to zoom; a double click shows the first steps too.</p>"""
DIFFERENCE_WORDS = """<p>A thin line is a pair of runs with one seed, and the bold one their mean,
with the interval of the verdict. Below 0 the candidate is better.</p>"""
NO_PAIRS = "<p>No seed was run by both sides, so there are no pairs.</p>"
NO_STEPS = "<p>The pairs have no two validations at the same steps of runs of one length.</p>"

# ---- Text and tables -----------------------------------------------------------------------------

def text(value, longest=400):
    """As HTML, without what would steer a terminal or the browser, and cut where it is long."""
    return html.escape(short(str(value), longest))

def label(value):
    """The same in a figure, where Plotly reads some tags, and names between %{ and }."""
    return text(value, 100).replace("%", "&#37;")

def table(name, rows):
    """Rows of text, the first the header. What begins as a number stands to the right."""
    columns, *rows = [[text(cell) for cell in row] for row in rows]
    head = "".join(f'<th scope="col">{cell}</th>' for cell in columns)
    body = "\n".join("<tr>" + "".join(f"<td{' class=number' * bool(NUMBER.match(cell))}>{cell}</td>"
                                      for cell in row) + "</tr>" for row in rows)
    return (f'<div class="table" tabindex="0"><table id="{name}"><thead><tr>{head}</tr></thead>'
            f"<tbody>\n{body}\n</tbody></table></div>")

def section(title, *parts):
    return "\n".join([f"<section><h2>{text(title)}</h2>", *parts, "</section>"])

# ---- Figures -------------------------------------------------------------------------------------

def figure(name, panels):
    """The HTML of a Plotly figure of a panel, or of several with buttons for their axes."""
    clear = "rgba(0,0,0,0)"
    panel = panels[0]
    traces = traces_of(panel)
    entries = sum(trace["showlegend"] for trace in traces)
    height = 420 + 20 * entries  # which stand below each other where the window is narrow
    axis = {"automargin": True, "zeroline": False, "exponentformat": "none"}
    layout = {"height": height, "autosize": True, "margin": {"l": 10, "r": 10, "t": 36, "b": 10},
              "paper_bgcolor": clear, "plot_bgcolor": clear, "hovermode": "closest",
              "font": {"family": "system-ui, sans-serif", "size": 13},
              "hoverlabel": {"align": "left"},
              "modebar": {"bgcolor": clear, "color": "#888", "activecolor": plot.COLOURS[1]},
              "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"},
              "xaxis": axis | {"title": {"text": plot.AXES[panel.axis]}},
              "yaxis": axis | {"title": {"text": panel.what}, "tickformat": ".4~f"}}
    if panel.range:
        layout["yaxis"]["range"] = panel.range
    if panel.level:
        y, said = panel.level
        layout["shapes"] = [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y,
                             "line": {"color": "#888", "width": 1.5},
                             "label": {"text": said, "textposition": "end", "yanchor": "bottom"}}]
    if len(panels) > 1:
        buttons = []
        for other in panels:
            data = traces_of(other)
            change = {key: [trace[key] for trace in data] for key in ("x", "y")}
            axes = {"xaxis.title.text": plot.AXES[other.axis], "xaxis.autorange": True}
            buttons.append({"label": f"{other.axis.removesuffix('s')}s", "method": "update",
                            "args": [change, axes]})
        layout["updatemenus"] = [{"type": "buttons", "direction": "right", "buttons": buttons,
                                  "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom",
                                  "pad": {"t": 0, "b": 0}}]
    config = {"responsive": True, "displaylogo": False,  # and no button that sends it to Plotly
              "modeBarButtonsToRemove": ["select2d", "lasso2d", "sendChartToCloud"]}
    return plotly.io.to_html({"data": traces, "layout": layout}, config=config, div_id=name,
                             full_html=False, include_plotlyjs=False, validate=False,
                             default_height=f"{height}px")

def traces_of(panel):
    """Of each group the band, the thin lines as one with gaps, for a figure of 1,500 lines would be
    slow, and the bold line."""
    traces = []
    for group, colour, dash in zip(panel.groups, cycle(plot.COLOURS), cycle(DASHES)):
        usual = {"type": "scatter", "mode": "lines", "showlegend": False,
                 "legendgroup": label(group.name)}
        if group.band:
            x, low, high = map(list, zip(*group.band))
            traces.append(usual | {"x": x + x[::-1], "y": low + high[::-1], "fill": "toself",
                                   "line": {"width": 0}, "fillcolor": f"{colour}33",
                                   "hoverinfo": "skip"})
        points = [point for name, *curve in group.lines
                  for point in [*zip(*curve, cycle([label(name)])), (None, None, None)]]
        x, y, names = map(list, zip(*points))
        traces.append(usual | {"x": x, "y": y, "hovertext": names, "hovertemplate": HOVER,
                               "opacity": 0.6, "line": {"color": colour, "width": 1, "dash": dash}})
        x, y = group.bold
        traces.append(usual | {"x": x, "y": y, "name": label(group.name), "showlegend": True,
                               "mode": "lines+markers", "marker": {"size": 6, "color": colour},
                               "line": {"color": colour, "width": 3, "dash": dash},
                               "hovertemplate": HOVER.replace("hovertext", "fullData.name")})
    return traces

# ---- What differs -------------------------------------------------------------------------------

def changes(what, rows, side, baseline):
    """Settings or environment that differ."""
    if not rows:
        return f"<p>No difference in the {what} that the logs name.</p>"
    return table(what, [[what, short(baseline.name), short(side.name)],
                        *([key, " | ".join(before), " | ".join(after)]
                          for key, before, after in rows)])

def source_change(diff):
    """A diff in colour."""
    if not diff:
        return ("<p>The source is the same.</p>" if diff == [] else
                "<p>A log holds no source, so there is no diff.</p>")
    signs = [line[:1] for line in diff[2:]]
    tags = {"+": "ins", "-": "del"}
    shown = "".join(f"<{tag}>{text(line) or ' '}</{tag}>" for line in diff[2:]
                    for tag in [tags.get(line[:1], "span")])
    return (f"<details{' open' * (len(diff) < 60)}><summary>source: +{signs.count('+')} "
            f"&minus;{signs.count('-')} lines</summary><pre>{shown}</pre></details>")

# ---- The page ------------------------------------------------------------------------------------

def page(sides, comparisons, target, notes=(), alive=False) -> str:
    """The HTML. sides: the candidates, and the baseline last where there is one; comparisons: what
    compare.py's compare_all says of the candidates; target: a loss or None; notes: lines that stand
    above all; alive: runs are training and the page will be written again, so it reloads itself."""
    names = plot.names(sides)
    parts = [f'<p class="note">{text(note, 1000)}</p>' for note in notes]
    verdicts = [f'<p class="verdict {found["decision"]}">{text(found["verdict"], 3000)}</p>'
                for found in comparisons]
    if len(comparisons) > 1:
        verdicts.insert(0, table("candidates", tables.of_candidates(sides[:-1], sides[-1],
                                                                    comparisons)))
    parts += verdicts
    axes = reversed(plot.axes_of(sides))
    losses = figure("loss", [plot.loss_panel(sides, axis, target) for axis in axes])
    parts.append(section(f"Validation loss: {names}", LOSS_WORDS, losses))
    if comparisons:
        found = plot.difference_panel(sides, comparisons)
        shown = figure("difference", [found]) if found else ""
        paired = any(one["paired"]["seeds"] for one in comparisons)
        said = DIFFERENCE_WORDS if found else NO_STEPS if paired else NO_PAIRS
        parts.append(section(f"Difference in validation loss: {names}", said, shown))
    for side in sides:
        lines = [f"<p>{text(side.about_rule)}</p>"]
        lines += [f'<p class="note">{text(line, 1000)}</p>' for line in side.warnings]
        parts.append(section(tables.title_of(side),
                             table(f"runs-{side.label}", tables.of_runs(side, target)),
                             table(f"spread-{side.label}", tables.of_spread(side)), *lines))
    for side, found in zip(sides, comparisons):
        tests = table(f"tests-{side.label}", tables.of_tests(side, sides[-1], found))
        parts.append(section(f"What differs: {plot.names([side, sides[-1]])}", tests,
                             changes("settings", found["hyperparameters"], side, sides[-1]),
                             changes("environment", found["environment"], side, sides[-1]),
                             source_change(found["source"])))
    values = {"title": text(names), "alive": str(alive).lower(),
              "written": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
              "plotly": get_plotlyjs(), "body": "\n".join(parts)}
    return Template(FRAME.read_text(encoding="utf-8")).substitute(values)

def save(path, *content, **more):
    """Write the page in one go, so that no browser reads half of it."""
    partial = Path(f"{path}.partial")
    partial.write_text(page(*content, **more), encoding="utf-8")
    partial.replace(path)
