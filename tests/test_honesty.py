"""tools/honesty.py, which has exam.py find what test_exam.py plants."""

import sys
import pytest
from conftest import ROOT
from test_data_common import status_of
from test_edits import loaded
import train_gpt
from records.tools import honesty

@pytest.fixture
def changed(tmp_path):
    return lambda *edits: loaded(tmp_path, *edits).__file__

def test_the_script_is_honest(runs_here):
    assert [line.partition(":")[0] for line in honesty.check(train_gpt.__file__)
            ] == ["masks", "exam"]

@pytest.mark.method
@pytest.mark.parametrize("edit", [
    "(key <= query) &«→ (query - key < 200) &»",  # also in full blocks
    "(distance_NN > 0) & («first_N→last_N» == last_N", "key_range = slice(«→128 + »int(visible"])
def test_masks_that_differ_between_a_cpu_and_a_gpu_are_found(changed, edit):
    with pytest.raises(honesty.Seen, match="are visible on a CPU or on a GPU only"):
        next(honesty.check(changed(edit)))

@pytest.mark.method
@pytest.mark.parametrize("words, status, message", [
    ("edited.py demo --peek=1 --num_iterations=3", 3, "not honest: what the model says "),
    ("", 2, "error: name the script first"),
    ("train_gpt.py --num_kv_heads=4", 2, "--num_kv_heads must divide --num_heads")])
def test_the_program(words, status, message, changed, monkeypatch, capsys, runs_here):
    """Here with a setting of a copy's own, which makes it dishonest."""
    monkeypatch.chdir(ROOT)
    copy = changed("«→    peek: int = flag(0, 'x')\n»    epochs: int",
                   "norm(self.embed(tokens_T))«→ + self.embed(tokens_T.roll(-1)) * self.hp.peek»")
    words = words.replace("edited.py", copy).split()
    monkeypatch.setattr(sys, "argv", ["honesty.py", *words])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # which the program changes
    assert status_of(honesty.main) == status
    out, err = capsys.readouterr()
    lines = (out if status == 3 else err).splitlines()
    assert message in lines[-1] and len(lines) == (2 if status == 3 else 1)
