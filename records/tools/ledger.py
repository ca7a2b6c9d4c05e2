"""The ledger of ideas: what was raced, and what survives that so much was tried.

    ./run.sh ideas [WORD ...]      with --json, all columns for programs

Every race appends its candidate to records/ideas.csv, a failed or broken one too, since the more is
tried, the more looks good by chance. `kept` marks ideas that are to be kept, and that a false
discovery rate of 5 % leaves by e-BH (Wang and Ramdas, arXiv:2009.02824). Old races have no E.
"""

import contextlib
import csv
import io
import json
import os
import sys
from datetime import datetime, timezone
from itertools import zip_longest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from records.tools.load import ROOT, ArgumentParser, run
from records.tools.logs import number
from records.tools.tables import plain, print_table

from scipy import stats

RATE = 0.05
COLUMNS = ["date", "race", "candidate", "patch", "decision", "keep", "honest", "difference", "low",
           "high", "E", "p", "pairs", "seconds", "baseline_seconds", "tokens", "baseline_tokens",
           "copy", "baseline", "seconds_later", "hours", "note"]
FEWER = 17  # columns, until November 2026

def row_of(line: str) -> dict | None:
    """A line's cells, the numbers in it as numbers; None if it is no line of a ledger."""
    cells = next(csv.reader([line.replace("\0", "")]), [])
    row = dict(zip_longest(COLUMNS, cells[:len(COLUMNS)], fillvalue=""))
    with contextlib.suppress(KeyError, ValueError):
        for key in ("difference", "E", "p"):
            row[key] = float(row[key]) if row[key] else None
        whole = len(cells) in (FEWER, len(COLUMNS))
        if whole and 0 <= (row["p"] or 0) <= 1 and (row["E"] or 0) >= 0:
            return row

def read(path: Path) -> list[dict]:
    """The ideas in a ledger. Where a race went on, its last line counts. A damaged line is said and
    passed over."""
    text = path.read_text(encoding="utf-8-sig", errors="replace") if path.is_file() else ""
    found = {}
    for count, line in enumerate(text.split("\n"), 1):
        row = row_of(line)
        if row:
            idea = (row["race"], row["candidate"], row["patch"])
            found.pop(idea, None)
            found[idea] = row
        elif line.strip() and not line.startswith(COLUMNS[0]):
            print(f"warning: {path}, line {count}: no line of a ledger, passed over",
                  file=sys.stderr)
    return list(found.values())

def add(records: Path, race: str, verdict: dict):
    """Append a race's candidate by one write, so that races that end together lose nothing. Two
    that find no ledger both write a header, which is read as often as it stands."""
    low, high = verdict["interval"] or (None, None)
    row = verdict | {"date": f"{datetime.now(timezone.utc):%Y-%m-%d}", "race": race,
                     "low": low, "high": high}
    cells = ["" if row.get(key) is None else str(row[key]) for key in COLUMNS]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(" ".join(cell.split()) for cell in cells)
    with open(Path(records, "ideas.csv"), "ab+", buffering=0) as file:
        size = file.seek(0, io.SEEK_END)
        before = "" if size else ",".join(COLUMNS) + "\n"
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            before = "\n"  # a full disk has cut a line, which must not spoil this one
        file.write(f"{before}{text.getvalue()}".encode("utf-8", "backslashreplace"))

def read_all(*more: Path) -> list[dict]:
    """The ideas of all ledgers here, and of those in more folders."""
    records = ROOT / "records"
    folders = [records, *sorted(path.parent for path in records.glob("*/ideas.csv")), *more]
    paths = dict.fromkeys(folder.resolve() / "ideas.csv" for folder in folders)
    return [row for path in paths for row in read(path)]

def mark_survivors(rows: list[dict]):
    """Set row["kept"]: yes, or nothing."""
    for row in rows:
        row["kept"] = ""
    tested = [row for row in rows if row["E"]]
    values = stats.false_discovery_control([min(1.0, 1 / row["E"]) for row in tested])
    for row, value in zip(tested, values):
        if value <= RATE and row["keep"].casefold() == "true":
            row["kept"] = "yes"

def name_of(row: dict) -> str:
    """An idea's name: its race's, or its script's where that has another one."""
    race, candidate = row["race"].removeprefix("race_"), row["candidate"]
    copy = candidate in race or race.startswith(candidate) or candidate == "my_record"
    return f"{race if copy else f'{race} {candidate}'} {row['patch'][:6]}"

def main(arguments=None):
    parser = ArgumentParser(description=__doc__, prog="./run.sh ideas")
    parser.add_argument("word", nargs="*", help="that an idea's line holds")
    parser.add_argument("--json", action="store_true", help="all columns, for programs")
    options = parser.parse_args(arguments)
    rows = read_all()
    mark_survivors(rows)  # among all that was tried
    rows = [row for row in rows if all(
        word.casefold() in str([*row.values()]).casefold() for word in options.word)]
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    table = [["idea", "date", "decision", "loss", "E or p", "pairs", "kept"]]
    for row in rows:
        evidence = "-" if row["E"] is None else f"E {plain(row['E'], 2)}"
        if row["p"] is not None:
            evidence = f"p {row['p']:.2g}"
        table.append([name_of(row)[-26:], row["date"][5:], row["decision"], number(
            row["difference"], "+.4f"), evidence, row["pairs"], row["kept"] or "-"])
    if rows:
        print_table(table)
    kept = sum(row["kept"] == "yes" for row in rows)
    print(f"\n{len(rows)} ideas, {kept} of them kept at a false discovery rate of {RATE:.0%}"
          if rows else "no such idea yet: ./run.sh race my_record.py enters one")
    print("What failed, and why: records/negative.md")

if __name__ == "__main__":
    sys.exit(run(main))
