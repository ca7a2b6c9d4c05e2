"""Pages for a browser: of a race, with its verdicts, the picture, and all that compare.py prints of
it; and of a night. Each is one file that opens from a disk or a mail, without a network. Text from
logs may be hostile: it enters the page through `text`, and the page's frame, page.html, forbids the
browser to load or run anything."""

import base64
import contextlib
import html
import io
import time
from pathlib import Path
from string import Template

from records.tools import compare, logs, plot
from records.tools.logs import short

FRAME = Path(__file__).with_suffix(".html")

def text(value, longest=1000):
    """As HTML, without what would steer a terminal or the browser, and cut where it is long."""
    return html.escape(short(str(value), longest))

def page(sides, comparison, notes=(), alive=False) -> str:
    """The HTML of two sides and their comparison, below some notes. While runs are alive, the page
    will be written again, so it reloads itself."""
    notes = ["Runs are training: this page reloads every 30 seconds."] * alive + [*notes]
    with contextlib.redirect_stdout(io.StringIO()) as report:
        compare.report(sides, comparison)
    picture = io.StringIO()
    plot.save(picture, sides, comparison, None, format="svg")
    parts = [f'<p class="note">{text(note)}</p>' for note in notes]
    parts.append(f'<p class="verdict {comparison["decision"]}">'
                 f'{text(comparison["verdict"], 3000)}</p>')
    _, _, svg = picture.getvalue().partition("<svg")  # without what a file of its own begins with
    return framed("race", alive, title=text(plot.names(sides)), top="\n".join(parts),
                  picture=f"<svg{svg}", report=text(report.getvalue(), 200_000))

def framed(verb: str, alive: bool, **parts) -> str:
    return Template(FRAME.read_text(encoding="utf-8")).substitute(
        parts, verb=verb, reload='<meta http-equiv="refresh" content="30">' * alive,
        written=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()))

def of_night(told: dict, folder: Path, alive: bool) -> str:
    """The HTML of night.json."""
    lines = ["<table><tr><th>idea<th>decision<th>loss - baseline's<th>E<th>pairs<th>hours"]
    for row in told["ideas"]:
        sure = {True: ", confirmed", False: ", not confirmed", None: ""}[row["confirmed"]]
        cells = [f'<a href="{text(row["folder"])}/race.html">{text(Path(row["file"]).name)}</a>',
                 text(row["decision"] + sure), logs.number(row["difference"], "+.4f"),
                 logs.number(row["E"], ".3g"), text(row["pairs"]), f"{row['hours']:.2f}"]
        picture = folder / row["folder"] / "race.png"
        image = picture.exists() and base64.b64encode(picture.read_bytes()).decode()
        lines.append(f"<tr><td>{'<td>'.join(cells)}<tr><td colspan=6>{text(row['note'])} "
                     f"<details><summary>{text(row['why'], 200)}</summary><pre>"
                     f"{text(row['change'], 20_000)}</pre>"
                     + f'<img src="data:image/png;base64,{image}">' * bool(image) + "</details>")
    hours = f"{told['spent']:.2f} hours spent, {max(0, told['left']):.2f} left"
    return framed("night", alive, title=f"Ideas against {text(told['baseline'])}", report="",
                  top=f'<p class="note">{hours}</p>', picture="\n".join([*lines, "</table>"]))
