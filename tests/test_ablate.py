"""records/ablate.py: the parts of a change, the copies without them, and the table. The races here
are of test_race.py's stand-in for the script."""

import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT, refused
from test_data_common import status_of
from test_race import STAND_IN, place, starts  # noqa: F401, place is a fixture

from records import ablate, logs


def changed(text, *changes):
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


BASE = '''"""A script."""
import math
rate = 0.1
def model(x):
    y = x + 1
    return y * rate
def loss(x):
    return model(x) ** 2
'''


def parts(new, old=BASE):
    return {part.name: part for part in ablate.parts_of(old, new)}


def test_places_that_share_a_name_are_one_part():
    """Here `width`, which is set in one place and used in another one, and in a string."""
    new = changed(BASE, ("rate = 0.1\n", "rate = 0.1\nwidth = 7\n"), ("x + 1", "x + width"),
                  ("** 2", "** 3"), ("A script.", "Another script."),
                  ("import math\n", "import math  # a word\n"))
    found = parts(new)
    assert list(found) == ["width", "loss 9"]
    assert (len(found["width"].places), found["width"].lines) == (2, "-1 +2")
    alone = changed(BASE, ("** 2", "** 3"), ("A script.", "Another script."),
                    ("import math\n", "import math  # a word\n"))
    assert ablate.without(new, found["width"].places) == alone
    everything = [place for part in found.values() for place in part.places]
    assert ablate.program(ablate.without(new, everything)) == ablate.program(BASE)
    quoted = changed(BASE, ("rate = 0.1\n", "rate = 0.1\nwidth = 7\n"), ("y * rate", "y * 'width'"))
    assert list(parts(quoted)) == ["width"]


def test_marks_draw_the_lines_between_parts():
    """Two marks in one place of added lines; a place without a mark follows the name it shares."""
    new = changed(BASE, ("    y = x + 1\n", "    y = x + 1\n    y = y + 2  # part: two\n"
                         "    z = 3  # part: three\n    y = y + z  # part: three\n"),
                  ("** 2", "** 2 + len(str(z))"), ("y * rate", "y * rate * 2"))
    found = parts(new)
    assert list(found) == ["two", "three", "model 9"]
    assert ablate.without(new, found["two"].places) == new.replace(
        "    y = y + 2  # part: two\n", "")
    assert [place.new for place in found["three"].places][1] == (
        "    return model(x) ** 2 + len(str(z))\n",)
    both = changed(new, ("y = y + 2  # part: two", "y = y + 2  # part: two  # part: three"))
    assert ablate.without(both, parts(both)["three"].places) == BASE.replace("rate\n", "rate * 2\n")


COPY = changed(STAND_IN, ("OFFSET = 0.0", "OFFSET = -0.1"),  # pays
               ("loss = 5 - step / N", "bonus = 0.05\n    loss = 5 + bonus - step / N"),  # harms
               ("import argparse, hashlib", "import hashlib, argparse"))  # makes no difference


def run_ablate(place, *flags):  # noqa: F811
    arguments = [str(place / "record.py"), f"--vs={place / 'base.py'}",
                 f"--records={place / 'records'}", *flags]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", ["ablate.py", *arguments])
        return status_of(ablate.main, errors=(logs.BadInput,))


def test_what_pays_what_harms_and_what_does_nothing(place, capsys):  # noqa: F811
    """At the level of three decisions; and the shortest change is the one that pays, as a script
    and as a patch."""
    (place / "record.py").write_text(COPY)
    assert run_ablate(place, "--muon_lr=2") == 0
    out = capsys.readouterr().out
    folder = place / "records" / "ablate_record"
    rows = [line.split(" | ") for line in (folder / "table.md").read_text().splitlines()[2:]]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("| line 2", "-1 +1", "makes no difference |"), ("| line 5", "-1 +1", "pays |"),
        ("| bonus", "-1 +2", "harms |")]
    assert (folder / "table.md").read_text() in out
    verdict = json.loads((folder / "race_parts" / "verdict.json").read_text())
    pays = next(row for row in verdict if row["decision"] == "worse")
    lost, half = map(float, rows[1][2].split(" ± "))
    assert lost == pytest.approx(0.1, 0.1)
    assert [lost - half, lost + half] == pytest.approx(pays["interval"], abs=1e-4)
    assert pays["E"] >= 300
    shortest = (folder / "record.py").read_text()
    assert shortest == changed(STAND_IN, ("OFFSET = 0.0", "OFFSET = -0.1"))
    (place / "patched.py").write_text(STAND_IN)
    subprocess.run(["patch", "-s", place / "patched.py", folder / "record.patch"], check=True)
    assert (place / "patched.py").read_text() == shortest
    assert "it leaves out: line 2, bonus\n" in out
    assert all("--muon_lr=2" in line for line in (place / "starts").read_text().splitlines())
    before = starts(place)  # the same command starts nothing more
    assert run_ablate(place, "--muon_lr=2") == 0 and starts(place) == before
    (place / "record.py").write_text(COPY + "# more\n")
    assert run_ablate(place, "--muon_lr=2") == 2
    assert "was begun with other scripts or parts" in capsys.readouterr().err


def test_what_cannot_be_left_out_alone_is_joined(place, capsys):  # noqa: F811
    """A list became a number: no name tells that its definition and its use belong together."""
    use = ("loss = 5 - step", "loss = 5 * SCALE[0] - step")
    old = changed(STAND_IN, ("OFFSET = 0.0\n", "OFFSET = 0.0\nSCALE = [1]\n"), use)
    new = changed(old, ("SCALE = [1]", "SCALE = 1"), ("SCALE[0]", "SCALE"))
    new = changed(new, ("import argparse, hashlib", "assert 'kept'\nimport argparse, hashlib"))
    (place / "base.py").write_text(old)
    (place / "record.py").write_text(new)
    assert run_ablate(place, "--most=2") == 0
    out = capsys.readouterr().out
    assert "ablate: it does not train without line 7 alone: TypeError: " in out
    assert re.search(r"ablate: line 7, line \d+ are joined to one part, the rest\n", out)
    table = (place / "records" / "ablate_record" / "table.md").read_text()
    assert "| the rest | -2 +2 | +0.0000 | 2 |" in table and "| line 2 | -0 +1 |" in table
    (place / "record.py").write_text(changed(old, ("SCALE = [1]", "SCALE = 1, 2")))
    (place / "base.py").write_text(changed(old, ("SCALE = [1]", "SCALE = None")))
    assert run_ablate(place, f"--records={place / 'other'}") == 2
    assert "ablate: line 6 cannot be left out\n" in capsys.readouterr().out


def test_parts_by_flags_and_a_race_that_goes_on(place, capsys):  # noqa: F811
    """The other script may be the same one. Killed after its first pair, it makes the others."""
    flags = ["--part=rate: --muon_lr=9", "--part=steps: --num_iterations=4"]
    (place / "record.py").write_text(STAND_IN)
    assert run_ablate(place, *flags, "--most=1") == 0
    assert run_ablate(place, *flags, "--most=2") == 0
    made = [(name, seed) for name, seed, steps in starts(place) if steps in (None, "4")]
    assert made == [("without_rate", 1), ("without_steps", 1), ("record", 1), ("record", 2),
                    ("without_steps", 2), ("without_rate", 2)]
    table = (place / "records" / "ablate_record" / "table.md").read_text()
    assert "| rate | --muon_lr=9 | +0.0000 | 2 |" in table
    assert "to leave out rate, add --muon_lr=9\n" in capsys.readouterr().out


def test_a_copy_that_does_not_train_is_refused(place, capsys):  # noqa: F811
    (place / "record.py").write_text(COPY.replace("loss = 5", "loss = missing"))
    assert run_ablate(place) == 2
    assert "record.py does not train one step: NameError: " in capsys.readouterr().err


@pytest.mark.parametrize("flags, words", [
    ([], "does not differ from"),
    (["--part=a b: --x=1", "--part=a_b: --x=2"], "two parts are called"),
    (["--part=x"], "expected a name, a colon and flags"),
    (["--level=x"], "invalid number value")])
def test_wrong_usage_starts_nothing(flags, words, place, capsys):  # noqa: F811
    (place / "record.py").write_text(STAND_IN + "# a comment\n")
    assert run_ablate(place, *flags) == 2
    err = capsys.readouterr().err
    assert words in err and len(err.splitlines()) == 1 and not (place / "starts").exists()


def test_the_copy_must_be_a_program():
    with refused("the copy is no Python program"):
        ablate.parts_of(BASE, "def (\n")
