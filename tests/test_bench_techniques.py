import ast
import sys

import bench_techniques
import pytest
from conftest import ROOT, TINY

from train_gpt import UserError

SOURCE = (ROOT / "train_gpt.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", bench_techniques.WITHOUT)
def test_each_technique_is_found_and_what_is_left_is_python(name):
    parts = bench_techniques.WITHOUT[name]
    replacements = [part for part in parts if not isinstance(part, str)]
    copy = bench_techniques.changed(SOURCE, replacements)
    ast.parse(copy)
    assert (copy == SOURCE) == (not replacements)


def test_a_text_that_the_script_does_not_have_is_an_error():
    with pytest.raises(UserError, match="does not contain 'norm_of'"):
        bench_techniques.changed(SOURCE, [("norm_of", "")])


def test_the_table_has_differences_and_p_values():
    losses = {"nothing": [1.0, 1.2], "smear": [2.0, 2.2], "key offset": [3.0]}
    rows = bench_techniques.table(losses, "nothing", "without").splitlines()
    assert rows[0].startswith("| without | runs | ")
    assert rows[2:] == ["| nothing | 2 | 1.1000 (0.1414) | | |",
                        "| smear | 2 | 2.1000 (0.1414) | +1.0000 | 0.019 |"]


def test_it_makes_the_runs_that_are_missing_and_no_others(tmp_path, shards, monkeypatch, capsys):
    some = {name: bench_techniques.WITHOUT[name] for name in ("nothing", "smear", "QK norm")}
    monkeypatch.setattr(bench_techniques, "WITHOUT", some)
    out = tmp_path / "losses.csv"
    out.write_text("without,seed,val_loss\nsmear,1,9.5\n")
    flags = ["--seeds=1", "--steps=4", f"--out={out}", *TINY[1:], *shards, "--num_iterations=4"]
    monkeypatch.setattr(sys, "argv", ["bench_techniques.py", *flags])
    bench_techniques.main()
    lines = out.read_text().splitlines()
    assert lines[:2] == ["without,seed,val_loss", "smear,1,9.5"]
    found = {line.split(",")[0]: float(line.split(",")[2]) for line in lines[2:]}
    assert set(found) == {"nothing", "QK norm"} and found["nothing"] != found["QK norm"]
    assert "without nothing, seed 1: " in capsys.readouterr().out
