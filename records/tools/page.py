"""A page for a browser of a race: its verdicts, the picture, and all that compare.py prints of it.
It is one file that opens from a disk or a mail, without a network. Text from logs may be hostile:
it enters the page through `text`, and the page's frame, page.html, forbids the browser to load or
run anything."""

import contextlib
import html
import io
import time
from pathlib import Path
from string import Template

from data.common import write_whole
from records.tools import compare, plot
from records.tools.logs import short

FRAME = Path(__file__).with_suffix(".html")

def text(value, longest=1000):
    """As HTML, without what would steer a terminal or the browser, and cut where it is long."""
    return html.escape(short(str(value), longest))

def page(sides, comparisons, target, notes=(), alive=False) -> str:
    """The HTML. sides: the candidates, and the baseline last; comparisons: what compare.py's
    compare_all says of the candidates; target: a loss or None; notes: lines that stand above all;
    alive: runs are training and the page will be written again, so it reloads itself."""
    notes = ["Runs are training: this page reloads every 30 seconds."] * alive + [*notes]
    with contextlib.redirect_stdout(io.StringIO()) as report:
        compare.report(sides[:-1], sides[-1:], comparisons)
    picture = io.StringIO()
    plot.save(picture, sides, comparisons, target, format="svg")
    parts = [f'<p class="note">{text(note)}</p>' for note in notes]
    parts += [f'<p class="verdict {found["decision"]}">{text(found["verdict"], 3000)}</p>'
              for found in comparisons]
    _, _, svg = picture.getvalue().partition("<svg")  # without what a file of its own begins with
    values = {"title": text(plot.names(sides)),
              "reload": '<meta http-equiv="refresh" content="30">' * alive,
              "written": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
              "top": "\n".join(parts), "picture": f"<svg{svg}",
              "report": text(report.getvalue(), 200_000)}
    return Template(FRAME.read_text(encoding="utf-8")).substitute(values)

def save(path, *content, **more):
    write_whole(Path(path), page(*content, **more))
