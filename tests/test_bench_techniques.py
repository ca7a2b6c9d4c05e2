import sys

import bench_techniques
import pytest
from conftest import TINY

import train_gpt


@pytest.mark.parametrize("name", bench_techniques.WITHOUT)
def test_each_technique_is_in_the_demo_and_can_be_left_out(name):
    flags = bench_techniques.WITHOUT[name]
    hp, _ = train_gpt.parse_flags(["--preset=demo", *flags])
    train_gpt.check_settings(hp, 1)
    assert (hp == train_gpt.PRESETS["demo"]) == (not flags)


def test_the_table_has_differences_and_p_values():
    losses = {"nothing": [1.0, 1.2], "smear": [2.0, 2.2], "key offset": [3.0]}
    rows = bench_techniques.table(losses, "nothing", "without").splitlines()
    assert rows[0].startswith("| without | runs | ")
    assert rows[2:] == ["| nothing | 2 | 1.1000 (0.1414) | | |",
                        "| smear | 2 | 2.1000 (0.1414) | +1.0000 | 0.019 |"]


def test_it_makes_the_runs_that_are_missing_and_no_others(tmp_path, shards, monkeypatch, capsys):
    some = {name: bench_techniques.WITHOUT[name]
            for name in ("nothing", "short windows", "value embeddings")}
    monkeypatch.setattr(bench_techniques, "WITHOUT", some)
    out = tmp_path / "losses.csv"
    out.write_text("without,seed,val_loss\nshort windows,1,9.5\n")
    flags = ["--seeds=1", "--steps=4", f"--out={out}", *TINY[1:], *shards, "--num_iterations=4"]
    monkeypatch.setattr(sys, "argv", ["bench_techniques.py", *flags])
    bench_techniques.main()
    lines = out.read_text().splitlines()
    assert lines[:2] == ["without,seed,val_loss", "short windows,1,9.5"]
    found = {line.split(",")[0]: float(line.split(",")[2]) for line in lines[2:]}
    assert set(found) == {"nothing", "value embeddings"}
    assert found["nothing"] != found["value embeddings"]
    assert "without nothing, seed 1: " in capsys.readouterr().out
