"""Writes the table of results in records/README.md from the logs that git tracks under records/.

    python records/results_table.py

A folder of logs is a row, except those of ELSEWHERE. The last column is written by hand and stays.
"""

import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from records import compare
from records.logs import BadInput, printable, read
from records.stats import spread

MARKERS = ("<!-- table: python records/results_table.py -->", "<!-- end of table -->")
ELSEWHERE = {"tokens"}  # whose runs have a table on the page of 2026-11-26_lookups
HEADER = ("| record | runs | val loss, mean (SD) | time, mean (SD) | steps | tokens | "
          "what was asked, and what came out |")

def tracked_logs(records):
    """The logs under records/ that git tracks: a user's own runs are no records."""
    command = ["git", "-C", str(records), "ls-files", "-z", "*.log"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    if not found:
        raise BadInput(f"{records}: git tracks no log here")
    return [Path(records, name) for name in sorted(found.split("\0")) if name]

def mean_and_sd(values, form, unit=""):
    found = spread(values)
    sd = "" if found["sd"] is None else f" ({found['sd']:{form}})"
    return compare.number(found["mean"], form, unit) + sd

def row(folder, paths, records):
    """The cells of a folder's row, without the last."""
    runs, unread = read(paths)
    if unread:
        raise BadInput(unread[0])
    name = folder.relative_to(records).as_posix()
    used = compare.Side(name, runs, None).used
    several = ([str(run.steps) for run in used], [compare.tokens_text(run.tokens) for run in used])
    return [f"[{name}]({name}/)",
            f"{len(used)} of {len(runs)}" if len(used) < len(runs) else f"{len(used)}",
            mean_and_sd([run.loss for run in used], ".4f"),
            mean_and_sd([run.seconds for run in used], ".1f", " s"),
            *(", ".join(sorted(set(texts))) for texts in several)]

def with_table(page, records):
    """The page's text with the table between its markers made anew."""
    start, end = (page.find(marker) for marker in MARKERS)
    if start < 0 or end < start:
        raise BadInput(f"README.md: expected the markers {' and '.join(MARKERS)} around its table")
    folders = {}
    for path in tracked_logs(records):
        if path.relative_to(records).parts[0] not in ELSEWHERE:
            folders.setdefault(path.parent, []).append(path)
    columns = HEADER.count("|") - 1
    old = [line.split(" | ", columns - 1) for line in page[start:end].splitlines()]
    by_hand = {cells[0]: cells[-1] for cells in old if len(cells) == columns}
    lines = [MARKERS[0], HEADER, re.sub(r"[^|]+", "---", HEADER)]
    for folder, paths in folders.items():
        line = f"| {' | '.join(row(folder, paths, records))}"
        first = line.partition(" | ")[0]
        lines.append(f"{line} | {by_hand.get(first, '- |')}")
    return page[:start] + printable("\n".join(lines)) + "\n" + page[end:]

def update(records):
    readme = Path(records, "README.md")
    readme.write_text(with_table(readme.read_text("utf-8"), records), "utf-8")

if __name__ == "__main__":
    try:
        update(Path(__file__).resolve().parent)
    except (BadInput, OSError) as error:
        sys.exit(f"error: {error}")
