"""tools/ablate.py: the parts of a change, the copies without them, and the table."""

import json
import subprocess
import pytest
from test_data_common import status_of
from test_night import without_races
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

OLD = "".join(f"line {i}\n" for i in range(60))
@pytest.fixture
def run_ablate(tmp_path, monkeypatch):
    """A night of races that take no time."""
    without_races(monkeypatch)

    def run(record, *flags):
        (tmp_path / "record.py").write_text(record)
        (tmp_path / "base.py").write_text(OLD)
        words = [str(tmp_path / "record.py"), f"--vs={tmp_path / 'base.py'}", *flags]
        return status_of(lambda: ablate.main([*words, f"--records={tmp_path / 'records'}"]))
    return run

def test_what_pays_what_harms_and_what_does_nothing(tmp_path, run_ablate, capsys):
    """The shortest change is the one that pays, as a script and as a patch."""
    pays = ("line 10\n", "GAIN -1\n")
    record = changed(OLD, pays, ("line 20\n", "x = 1  # part: x y\n"), ("line 30\n", "GAIN 1\n"))
    assert run_ablate(record, "--level=0.1", "--part=rate: --muon_lr=2 --x='a b'") == 0
    out = capsys.readouterr().out
    folder = tmp_path / "records" / "night_ablate_record"
    rows = [line.split(" | ") for line in (folder / "table.md").read_text().splitlines()[2:]]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("| line 11", "+1.0000", "pays |"), ("| x y", "+0.0000", "makes no difference |"),
        ("| line 31", "-1.0000", "harms |"),
        ("| rate --muon_lr=2 --x='a b'", "+0.0000", "makes no difference |")]
    assert (folder / "table.md").read_text() in out
    shortest = (folder / "record.py").read_text()
    assert shortest == changed(OLD, pays)
    (tmp_path / "patched.py").write_text(OLD)
    subprocess.run(["patch", "-s", tmp_path / "patched.py", folder / "record.patch"], check=True)
    assert (tmp_path / "patched.py").read_text() == shortest
    assert "it leaves out: x y, line 31, rate --muon_lr=2 --x='a b'\n" in out
    told = {row["file"].rpartition("/")[2]: row["words"] for row in json.loads(
        (folder / "night.json").read_text())["ideas"]}
    words = told["without_104_rate.patch"]
    assert "--level=0.025" in words and told["without_101_line_11.patch"] != words
    assert run_ablate(record, "--level=0.1", "--part=rate: --muon_lr=2 --x='a b'") == 0
    assert " left; a race" not in capsys.readouterr().out  # nothing is raced again

@pytest.mark.parametrize("flags, words", [
    ([], "in no more than comments: there is no part"),
    (["--part=x"], "expected a name, a colon and flags")])
def test_wrong_usage_starts_no_race(flags, words, tmp_path, run_ablate, capsys):
    assert run_ablate(f"{OLD}# a comment\n", *flags) == 2
    out, err = capsys.readouterr()
    assert words in err and len(err.splitlines()) == 1 and not (tmp_path / "records").exists()
