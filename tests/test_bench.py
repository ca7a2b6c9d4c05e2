"""records/tools/bench.py: what it measures on a CPU, in small; its half for a GPU, not launched."""

import json
import math
import os
import re
import sys
from types import SimpleNamespace
import pytest
import torch
from conftest import ROOT, SCRIPT, TINY, edited, launch, log_of, losses, refused
from test_interpreted import why_not
from data.common import UserError
from records.tools import bench

PROGRAM = ROOT / "records" / "tools" / "bench.py"
LOG = "tests/fixtures/record_like.txt"
SMALL = [flag for flag in TINY if not re.match("--(num_iterations|val_loss_every|epochs)", flag)]

def test_scripts_are_measured_as_they_are(tmp_path, shards):
    small = [*SMALL, *shards]
    copy = edited(tmp_path / "half.py", "micro_batches=«4→2»")
    done = launch(copy, SCRIPT, f"--vs={LOG}", "--steps=3", "--json", *small, script=PROGRAM)
    assert len(re.findall(r"(?m)^.+: compiled and did its first steps in \d", done.stderr)) == 3
    result = json.loads(done.stdout)
    half, ours, published = result["scripts"]
    assert [each["tokens"] for each in (half, ours, published)] == [512, 1024, 8 * 128]
    for each in (half, ours, published):
        assert len(each["step_ms"]) == 3 and len(each["losses"]) == 2 + 3 + 2
        assert min(each["step_ms"]) > 0
        assert len(each["slowest"]) == 10 and "aten::mm" in str(each["slowest"])
        assert each["peak_memory"] > 2**27
    assert published["losses"][0] == pytest.approx(math.log(50257), abs=1e-4)
    assert published["losses"][-1] < published["losses"][0]
    ratios = [1024 / 512 * a / b for a, b in zip(half["step_ms"], published["step_ms"])]
    assert half["ratios"] == pytest.approx(ratios)
    launch(*small, "--num_iterations=8", "--val_loss_every=0", "--epochs=100", "--val_tokens=0",
           "--save_every=0", f"--records={tmp_path}")
    usual = losses(log_of(tmp_path), "train_loss")
    assert ours["losses"] == pytest.approx(usual[:7], abs=6e-5)
    assert half["losses"][1:] != pytest.approx(usual[1:7], abs=1e-3)
    text = bench.text_of(result)
    assert f"\n{'tokens a step':<30}{'512':>25}{'1,024':>25}{'1,024':>25}\n" in text
    assert f"train_gpt.py takes {sum(ours['ratios']) / 3:.3f} times as long a token as" in text

@pytest.mark.full
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_its_half_for_a_gpu_runs_up_to_the_launch(tmp_path, monkeypatch, capsys):
    helper = ROOT / "tests" / "helpers" / "on_fake_gpu.py"
    monkeypatch.setattr(bench, "CHILD", [sys.executable, str(helper), str(PROGRAM)])
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.chdir(ROOT)
    bench.main([f"--vs={LOG}", "--steps=3", "--json", "demo", *SMALL])
    result = json.loads(capsys.readouterr().out)
    assert result["order"].startswith("in turn") and result["data"] == "made up"
    ours, published = result["scripts"]
    for each in (ours, published):
        assert each["device"] == "NVIDIA H100 80GB HBM3"
        assert each["peak_memory"] == 3 * 2**30 and len(each["step_ms"]) == 3
        kernels = {name: ms for name, ms, _ in each["slowest"]}
        transfers = [ms for name, ms in kernels.items() if name.startswith("Memcpy")]
        assert transfers in ([], [1 / 2])
        assert not {"Context Sync", "Stream Wait Event", "a mark"} & kernels.keys()
    assert "triton_tem" in str(ours["slowest"]) and "triton_tem" not in str(published["slowest"])
    assert [ours["losses"][0], published["losses"][0]] == pytest.approx(
        [math.log(320), math.log(50257)], abs=1e-4)  # the head's rows
    text = bench.text_of(result)
    assert "3,072 MiB" in text and "  triton_" in text

@pytest.mark.parametrize("together, tried", [(True, [2]), (False, [2, 1, 1])])
def test_scripts_share_a_gpu_where_they_can(together, tried, monkeypatch, capsys):
    """In exclusive mode, or where memory holds one, they are measured one after the other."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seen = []
    def measure(group, turns):
        seen.append(len(group))
        for one in group:
            one.report = {"step_ms": [1] * 5, "losses": [1] * 5, "tokens": 1}
        if len(group) > 1 and not together:
            raise UserError("train_gpt.py: ended, as is shown above")
    monkeypatch.setattr(bench, "measure", measure)
    bench.main([f"--vs={LOG}", "--steps=1", "--json"])
    order = json.loads(capsys.readouterr().out)["order"]
    assert seen == tried and order.startswith("in turn" if together else "one script after the ")

@pytest.mark.parametrize("words, error", [
    (["--steps=0"], "0: expected a whole number"), (["--num_iterations=9"], "leave it out"),
    (["none.py"], "none.py: cannot be read; name a script"),
    (["demo", "--no_such_flag=1"], "train_gpt.py: unrecognized arguments: --no_such_flag=1"),
    (["--vs=LICENSE", "demo", *SMALL], "LICENSE: is neither a copy")])
def test_what_cannot_be_measured_is_one_line(words, error, monkeypatch):
    monkeypatch.chdir(ROOT)
    with refused(error):
        bench.main(words)

def test_a_mistake_in_a_copy_keeps_its_traceback(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    copy = edited(tmp_path / "wrong.py", "mean_loss = torch.«zeros→no_such_function»(")
    with pytest.raises(UserError) as raised:
        bench.main([str(copy), *SMALL])
    said = str(raised.value)
    assert "wrong.py: Traceback (most recent call last)" in said
    assert said.endswith("has no attribute 'no_such_function'\n")

def test_its_units_and_that_the_first_steps_do_not_count():
    meter = SimpleNamespace(cuda=False, profiler=None, losses=[3.0] * 8, found={
        "tokens": 1000, "step_ms": [], "losses": []})
    meter.ends = [float(i * i) for i in range(9)]  # longer from step to step
    bench.Meter.collect(meter)
    found = bench.figures_of(SimpleNamespace(name="x", report=meter.found), 3)
    assert found["step_ms"] == [5000.0, 7000.0, 9000.0]
    cells = bench.cells_of(found)
    assert cells["a step, ms: median (range)"] == "7000.0 (5000.0 to 9000.0)"
    assert cells["tokens/s"] == "143"
