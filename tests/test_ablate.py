"""tools/ablate.py: the parts of a change, the copies without them, and the table."""

import json
import subprocess
import sys
import pytest
from conftest import ROOT
from test_data_common import status_of
from test_race import STAND_IN, place, starts  # noqa: F401, place is a fixture
from records.tools import ablate

def changed(text, *changes):
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text

BASE = '''import math
rate = 0.1
def model(x):
    y = x + 1
    return y * rate
def loss(x):
    return model(x) ** 2
'''
PLUS, POWER, NOTE = ("x + 1\n", "x + 2\n"), ("** 2", "** 3"), ("math\n", "math\n\n  # a word\n")
TWO = "    y = y + 2  # part: two\n"
THREE = "    z = 3  # part: three\n    y = y + z  # part: three\n"
A = ("rate = 0.1", "rate = 1  # part: a"), ("** 2", "** 3  # part: a")
@pytest.mark.parametrize("changes, expected, rest", [
    # Each place is a part, but for comments and empty lines.
    ([PLUS, POWER, NOTE], {"line 6": [POWER, NOTE], "line 9": [PLUS, NOTE]}, [NOTE]),
    ([("rate = 0.1\n", ""), POWER], {"line 2": [POWER], "line 6": [("rate = 0.1\n", "")]}, []),
    # Marks in one place, beside a line that replaces one, and in two places.
    ([("x + 1\n", f"x + 2\n{TWO}{THREE}")],
     {"line 4": [("x + 1\n", f"x + 1\n{TWO}{THREE}")], "two": [("x + 1\n", f"x + 2\n{THREE}")],
      "three": [("x + 1\n", f"x + 2\n{TWO}")]}, []), ([*A, PLUS], {"a": [PLUS], "line 4": A}, [])])
def test_the_parts_of_a_change_and_the_copies_without_them(changes, expected, rest):
    new = changed(BASE, *changes)
    parts = {part.name: part for part in ablate.parts_of(BASE, new)}
    assert {name: ablate.without(new, part) for name, part in parts.items()} == {
        name: changed(BASE, *left) for name, left in expected.items()}
    assert ablate.without(new, *parts.values()) == changed(BASE, *rest)

@pytest.fixture
def run_ablate(place, monkeypatch):  # noqa: F811
    def run(record, *flags, base=STAND_IN):
        (place / "record.py").write_text(record)
        (place / "base.py").write_text(base)
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", [
            "ablate.py", str(place / "record.py"), f"--vs={place / 'base.py'}",
            f"--records={place / 'records'}", *flags])
        return status_of(ablate.main)
    return run

def test_what_pays_what_harms_and_what_does_nothing(place, run_ablate, capsys):  # noqa: F811
    """The shortest change is the one that pays, as a script and as a patch."""
    pays = ("OFFSET = 0.0", "OFFSET = -0.1")
    harms = ("loss = 5 - step", "bonus = 0.05\n    loss = 5 + bonus - step")
    record = changed(STAND_IN, pays, harms, ("argparse, hashlib", "hashlib, argparse"))
    flags = ["--muon_lr=2", "--level=0.1"]
    assert run_ablate(record, *flags) == 0
    out = capsys.readouterr().out
    folder = place / "records" / "ablate_record"
    rows = [line.split(" | ") for line in (folder / "table.md").read_text().splitlines()[2:]]
    assert [(row[0], row[-1]) for row in rows] == [
        ("| line 2", "makes no difference |"), ("| line 5", "pays |"), ("| line 37", "harms |")]
    assert (folder / "table.md").read_text() in out
    verdict = json.loads((folder / "race_parts" / "verdict.json").read_text())
    worse = next(row for row in verdict if row["decision"] == "worse")
    lost, half = map(float, rows[1][1].split(" ± "))
    assert lost == pytest.approx(0.1, 0.1) and worse["E"] >= 30
    assert [lost - half, lost + half] == pytest.approx(worse["interval"], abs=1e-4)
    shortest = (folder / "record.py").read_text()
    assert shortest == changed(STAND_IN, pays)
    (place / "patched.py").write_text(STAND_IN)
    subprocess.run(["patch", "-s", place / "patched.py", folder / "record.patch"], check=True)
    assert (place / "patched.py").read_text() == shortest
    assert "it leaves out: line 2, line 37\n" in out
    assert all("--muon_lr=2" in line for line in (place / "starts").read_text().splitlines())
    before = starts(place)  # the same command starts nothing more
    assert run_ablate(record, *flags) == 0 and starts(place) == before
    assert run_ablate(f"{record}# more\n", *flags) == 2
    assert "race_parts was begun with other scripts" in capsys.readouterr().err

def test_a_part_without_which_it_does_not_train(place, run_ablate, capsys):  # noqa: F811
    """A list became a number, so its two places can be left out together only, when marked so."""
    old = changed(STAND_IN, ("OFFSET = 0.0\n", "OFFSET = 0.0\nSCALE = [1]\n"),
                  ("loss = 5 - step", "loss = 5 * SCALE[0] - step"))
    record = changed(old, ("SCALE = [1]\n", "SCALE = 1\n"), ("SCALE[0]", "SCALE"),
                     ("import argparse, hashlib", "assert 'kept'\nimport argparse, hashlib"))
    assert run_ablate(record, "--most=2", base=old) == 0
    assert "without_line_7 drops out: " in capsys.readouterr().out
    table = (place / "records" / "ablate_record" / "table.md").read_text()
    assert "| line 2 | +0.0000 | 2 |" in table and table.count("does not train without it |") == 2
    marked = changed(record, ("SCALE = 1\n", "SCALE = 1  # part: scale\n"),
                     ("* SCALE - step / N + seeds", "* SCALE - step / N + seeds  # part: scale #"))
    assert run_ablate(marked, "--most=2", f"--records={place / 'more'}", base=old) == 0
    assert "| scale | +0.0000 | 2 |" in (place / "more" / "ablate_record" / "table.md").read_text()
    assert run_ablate(changed(old, ("[1]", "(1,)")), base=old) == 2
    assert "all of the change is one part, and " in capsys.readouterr().err

def test_parts_by_flags_and_a_race_that_goes_on(place, run_ablate, capsys):  # noqa: F811
    """The other script may be the same one. Killed after its first pair, it makes the others."""
    flags = ["--part=rate: --muon_lr=9", "--part=steps: --num_iterations=4"]
    for pairs in (1, 2):
        assert run_ablate(STAND_IN, *flags, f"--most={pairs}") == 0
    made = [(name, seed) for name, seed, steps in starts(place) if steps in (None, "4")]
    assert made == [("without_rate", 1), ("without_steps", 1), ("record", 1), ("record", 2),
                    ("without_steps", 2), ("without_rate", 2)]
    table = (place / "records" / "ablate_record" / "table.md").read_text()
    assert "| rate --muon_lr=9 | +0.0000 | 2 |" in table
    assert "it leaves out: rate --muon_lr=9\n" in capsys.readouterr().out

@pytest.mark.parametrize("text, flags, words", [
    ("", [], "in no more than comments: there is no part"),
    ("", ["--part=a b: --x=1", "--part=a_b: --x=2"], "two parts are called without_a_b"),
    ("", ["--part=x"], "expected a name, a colon and flags"),
    ("missing\n", ["--part=x: --x=1"], "record.py fails with seed 1, in its warm-up, see its ")])
def test_wrong_usage_starts_no_race(text, flags, words, place, run_ablate, capsys):  # noqa: F811
    assert run_ablate(f"{STAND_IN}# a comment\n{text}", *flags) == 2
    out, err = capsys.readouterr()
    assert words in err.splitlines()[-1] and (text or len(err.splitlines()) == 1)
    assert ("NameError: name 'missing' is not defined" in err) == bool(text)
    assert not list((place / "records").rglob("race.json"))
