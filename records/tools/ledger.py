"""The ledger of ideas: what was raced, what came of it, and what survives that so much was tried.

    ./run.sh ideas

Each race enters its candidates into records/ideas.csv, which git ignores: failed, broken and
stopped ones too, since the more is tried, the more looks good by chance. The project's own races
are in the ideas.csv of a dated folder. This prints all, newest last. `survives` marks the ideas that
are to be kept (better, honest, with the baseline's tokens) and are among what a false discovery
rate of 5 % leaves of all that was tried: of the ideas marked so, at most 5 % are none, on average.

E-values go through e-BH (Wang and Ramdas, arXiv:2009.02824), which holds however they depend on
each other, p-values of fixed designs through Benjamini and Hochberg's procedure. If there are both,
each kind gets half of the 5 %: the sum of two false discovery rates bounds that of both together.
"""

import csv
import os
import re
import sys
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from records.tools import logs
from records.tools.load import ROOT, ArgumentParser, installed, require, run

with installed():
    from scipy import stats

RATE = 0.05
COLUMNS = ["date", "race", "candidate", "patch", "decision", "keep", "honest", "difference", "low",
           "high", "E", "p", "pairs", "seconds", "baseline_seconds", "tokens", "baseline_tokens"]
VALUE = r"([0-9.]+(e[-+]?\d+)?)?"  # a number, or nothing
SHOWN = ["date", "race", "candidate", "decision", "difference", "E", "p", "pairs", "survives"]

def read(path: Path) -> list[dict]:
    """The rows of a ledger; none where there is no file."""
    if not path.exists():
        return []
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, strict=True))
    for number, row in enumerate(rows, 2):
        require(list(row) == COLUMNS and None not in row.values()
                and all(re.fullmatch(VALUE, row[name]) for name in ("E", "p")),
                f"{path}, line {number}: no line of a ledger; mend it or take it out")
    return rows

def add(records: Path, race: str, verdict: list[dict]):
    """Enter a race's verdict. If it went on, its earlier lines are replaced: with more pairs an
    idea is still one idea."""
    path = Path(records, "ideas.csv")
    now = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    new = []
    for one in verdict:
        low, high = one["interval"] or (None, None)
        new.append({"date": now, "race": race, **one, "low": low, "high": high})
    same = {(race, one["candidate"], one["patch"]) for one in verdict}
    rows = [row for row in read(path)
            if (row["race"], row["candidate"], row["patch"]) not in same]
    unfinished = path.with_suffix(".unfinished")
    with open(unfinished, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows + new)
    os.replace(unfinished, path)  # a ledger is never half written

def mark_survivors(rows: list[dict]):
    """Set row["survives"]: yes, or nothing."""
    kinds = [[row for row in rows if row["E"]], [row for row in rows if row["p"] and not row["E"]]]
    kinds = [kind for kind in kinds if kind]
    for row in rows:
        row["survives"] = ""
    for kind in kinds:
        values = [min(1.0, 1 / float(row["E"])) if row["E"] else float(row["p"]) for row in kind]
        for row, value in zip(kind, stats.false_discovery_control(values)):
            if value <= RATE / len(kinds) and row["keep"] == "True":
                row["survives"] = "yes"

def main(arguments=None):
    ArgumentParser(description=__doc__, prog="./run.sh ideas").parse_args(arguments)
    paths = [*sorted(ROOT.glob("records/*/ideas.csv")), ROOT / "records" / "ideas.csv"]
    rows = sorted([row for path in paths for row in read(path)], key=lambda row: row["date"])
    if not rows:
        print("no idea yet: ./run.sh race my_record.py enters one")
        return
    mark_survivors(rows)
    table = [SHOWN, *[[short(row[name]) for name in SHOWN] for row in rows]]
    widths = [max(map(len, cells)) for cells in zip(*table)]
    for cells in table:
        print(logs.printable("  ".join(map(str.ljust, cells, widths)).rstrip()))
    left = sum(row["survives"] == "yes" for row in rows)
    print(f"\n{len(rows)} ideas, of which {left} survive at a false discovery rate of {RATE:.0%}")

def short(text: str) -> str:
    """A number in four digits."""
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return text

if __name__ == "__main__":
    sys.exit(run(main))
