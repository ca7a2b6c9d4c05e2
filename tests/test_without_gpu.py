"""The program for a GPU, as far as it can be told without one: the graphs of the CUDA path, and the
kernels that are generated from them, compiled but not run (test_interpreted.py runs them)."""

import json
import pytest
from conftest import ROOT, SCRIPT, log_path, run_helper
from test_gpu import SMALL
from test_interpreted import why_not
from records.tools.load import LEASH

@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("capability, cases", [
    (89, "shared_memory"), *[pytest.param(*case, marks=pytest.mark.full) for case in (
        (80, "shared_memory"), (90, "exam shared_memory"), (100, "shared_memory"),
        (120, "shared_memory"), (90, "full_size"), (89, "24_gb"))]])
def test_the_program_for_a_gpu_keeps_to_its_limits(capability, cases, tmp_path):
    """gpu_program.py says which. What the compiler opens is not taken for data."""
    run_helper(LEASH, ROOT / "tests" / "helpers" / "gpu_program.py", capability, *cases.split(),
               TORCHINDUCTOR_CACHE_DIR=str(tmp_path), TRITON_CACHE_DIR=str(tmp_path),
               LEASH_OPENED=f"{tmp_path}.txt")
    assert not open(f"{tmp_path}.txt").read()

@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.full
@pytest.mark.parametrize("ranks", [None, 2])
def test_a_run_compiles_in_its_warmup_and_an_exam_what_a_run_has_not(ranks, shards, tmp_path):
    """After the warm-up of a run, steps, growing windows and validations follow, where a recompile
    is an error. An exam adds features and logits, which a run has as parts of its model, and a
    second one nothing: the pretended GPU keeps a file for each program."""
    def start(*words):
        said = run_helper("on_fake_gpu.py", *words, ranks=ranks, FAKE_GPUS=str(ranks or 1),
                          TORCHINDUCTOR_CACHE_DIR=f"{tmp_path}/cache")
        return said, {path for path in (tmp_path / "cache").iterdir() if path.is_file()}
    _, of_run = start(
        SCRIPT, "--preset=speedrun", *SMALL, *shards, "--val_tokens=1000", "--num_iterations=12",
        "--epochs=9", "--save_every=7", "--seed=1", f"--records={tmp_path}/r")
    text = shards[1].partition("=")[2].replace("*", "000000")
    exam = [ROOT / "records" / "tools" / "exam.py", SCRIPT, log_path(tmp_path / "r"),
            f"--text={text}", "--place=100", "--tokens=900"]
    said, of_exam = start(*exam)
    found = json.loads(said)
    assert not found["problem"] and found["text"] < 5.7, found
    assert len(of_exam - of_run) == 2 and start(*exam)[1] == of_exam
