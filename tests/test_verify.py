"""tools/verify.py: honest folders of races pass, and forged ones are found."""

import json
import re
import shutil
import pytest
from conftest import ROOT
from test_data_common import status_of
from test_race import prepared, run_race
from records.tools import logs, race, trial, verify

@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """The folder of a race that is decided, after eight pairs."""
    with pytest.MonkeyPatch.context() as patch:
        place = prepared(tmp_path_factory.mktemp("race"), patch)
        assert run_race(place, "demo", "--muon_lr=2") == 0
    return place / "records" / "race_record"

@pytest.fixture
def folder(honest, tmp_path):
    return shutil.copytree(honest, tmp_path / "2026-11-28_mine")

def verified(folder, capsys):
    """The status, and what is printed."""
    capsys.readouterr()
    status = status_of(lambda: verify.main([str(folder)]))
    return status, "".join(capsys.readouterr())

def test_honest_folders_are_verified(folder, capsys):
    records = ROOT / "records"
    for path, count in ((records / "race_gelu", 54), (records / "2026-04-04_85s" / "race", 16),
                        (folder, 16)):
        assert verified(path, capsys) == (0, (
            f"{path}: the scripts, settings, data and machines of {count} logs fit, and give this "
            "patch and this verdict (level 0.01)\n"))

def with_hash(found):
    """A log whose source is edited, and whose hash fits."""
    old = logs.own_sections(found[0]).source
    new = old.replace("NOISE = 1.0", "NOISE = 2.0")
    return found[0].replace(old, new).replace(trial.hash_of(old), trial.hash_of(new))

END = r"(step:5/5 .*?{}:)\d"
NOT_WHOLE = "its run has not finished in one go"
IN_LOGS = [  # the log, what in it becomes what, and what is said though its SHA-256 is adapted
    ("record/0", r"(step:0/5 val_loss:)\d", r"\g<1>9", ""),
    *[("base/3", END.format(name), r"\g<1>9", f"verdict.json: {key}") for name, key in (
        ("val_loss", "difference"), ("train_time", "baseline_seconds"), ("tokens", "baseline_t"))],
    ("record/0", "seed = 1", "seed = 2", "record: 2 logs have seed 2, expected 1"),
    ("base/0", "muon_lr = 2", "muon_lr = 3", "unlike its pair's, muon_lr is 3.0, expected 2.0"),
    ("record/0", "val_loss_every = 1", "val_loss_every = 2", "y is 2, expected 1; so in 1 logs"),
    ("base/0", "(muon_lr=2)", r"\1 --num_iterations=5", "its flags are --muon_lr=2 --num_itera"),
    ("base/1", "90 tokens 0f", "90 tokens 1f", "its training shards are ['90 tokens 1f']"),
    ("base/1", "9 tokens 1f", "9 tokens 2f", "its validation data are "),
    ("base/1", "seed = 2", "seed = 2\nval_tokens = 9", "its validation data are ('9'"),
    *[("base/2", f"{key}: ", f"{key}: 9 ", f"unlike its pair's, {key} is 9 ")
      for key in ("cpu", "torch", "threads")],
    ("base/2", "cpu: ", "gpus: 1 x H100\ncpu: ", "unlike its pair's, gpus is "),
    ("base/2", "ranks: 1", "ranks: 2", "its ranks are 2, expected 1"),
    ("record/4", "NOISE = 1.0", "NOISE = 2.0", "no log (its source is cut or changed"),
    ("record/4", "(?s).*", with_hash, "the SHA-256 of its script is "),
    ("record/4", "(?s).*", "", "no log (no line of a step in it)"),
    ("record/5", "(?s)\nstep:5/5 .*", "\n", NOT_WHOLE),
    ("record/5", END.format("val_loss") + r"\S+", r"\1nan", NOT_WHOLE),
    ("record/5", "ranks: 1", "ranks: 1\nresumed: x/step2.pt at step 2", NOT_WHOLE)]
IN_FILES = [
    ("record.patch", "OFFSET = -0.1", "OFFSET = -0.2", "record.patch: is not what"),
    ("record.py", "OFFSET = -0.1", "OFFSET = -0.2", "record.py: is not what the race makes"),
    ("verdict.txt", "is better than", "is much better than", "verdict.txt: is not what"),
    ("race.json", '"candidates": .*', "", "race.json or verdict.json is not as a race of one copy"),
    ("race.json", '(record.sha256": ")...', r"\g<1>000", "the SHA-256 of its script is "),
    ("race.json", "--muon_lr=2", "--muon_lr=3", "its flags are --muon_lr=2 demo, expected --mu"),
    ("race.json", '"first_seed": 1', '"first_seed": 2', "0 logs have seed 9, expected 1"),
    ("race.json", '"NPROC": null', '"NPROC": "8"', "its ranks are 1, expected 8"),
    ("race.json", '"level": 0.01', '"level": 0.05', "verdict.json: interval is "),
    ("race.json", '(record.dishonest": ")', r"\1it is not", "verdict.json: honest is True, "),
    ("race.json", '"logs": {', '"logs": {"record/x.log": "1",', "record/x.log: this file is mis"),
    ("exams.json", '"own": 1', '"own": 2', "exams.json: this file is missing, or has not the SHA"),
    ("exams.json", "", None, "exams.json: has no exam of record, seed 8"),
    ("verdict.txt", "", None, "verdict.txt: No such file or directory"),
    ("record/7 base/7", "", None, "base: 0 logs have seed 8, expected 1"),
    ("record/0 base/0", "", None, "record: 0 logs have seed 1, expected 1"),
    ("record/0", "", "copied", "record: 2 logs have seed 1, expected 1"),
    ("base/0", "", "copied", "the SHA-256 of its script is ")]

@pytest.mark.parametrize("where, old, new, words", IN_LOGS + IN_FILES)
def test_what_is_changed_removed_or_added_is_found(where, old, new, words, folder, capsys):
    for word in where.split():
        side, _, number = word.partition("/")
        path = sorted((folder / side).glob("*.log"))[int(number)] if number else folder / word
        if new is None:
            path.unlink()
        elif new == "copied":
            shutil.copy(path, folder / "record" / "z.log")
        else:
            text = path.read_text()
            path.write_text(re.sub(old, new, text, count=1))
            assert path.read_text() != text
    status, out = verified(folder, capsys)
    assert status == (2 if "No such" in words or "is not as" in words else 3)
    if (where, old, new, words) in IN_LOGS:
        assert f"{path.name}: this file is missing, or has not the SHA-256" in out
        race.note_end(race.ended(folder)[0])
        status, out = verified(folder, capsys)
        assert status == 3 or not words
    assert words in out, out

def test_an_interrupted_run_must_have_begun_as_the_finished_one(folder, capsys):
    text = min((folder / "record").glob("*.log")).read_text()
    cut = text[:text.index("step:4/5")]
    for text, count in ((cut, 0), (re.sub(r"(step:3/5 val_loss:)\d", r"\g<1>9", cut), 1)):
        (folder / "record" / "z.log").write_text(text)
        race.note_end(race.ended(folder)[0])
        assert verified(folder, capsys)[1].count(NOT_WHOLE) == count

def test_a_changed_field_of_the_verdict_is_found(folder, capsys):
    (row,) = json.loads((folder / "verdict.json").read_text())
    assert len(row) > 20
    for key in [*row][1:]:
        *low, value = row[key] if isinstance(row[key], list) else [row[key]]
        other = f"{value}x"
        if isinstance(value, (int, float)):
            other = value - 1 if isinstance(value, int) else value * 1.000001
        text = json.dumps([row | {key: [*low, other] if low else other}])
        (folder / "verdict.json").write_text(text)
        status, out = verified(folder, capsys)
        assert status == 3 and f"verdict.json: {key} is " in out
