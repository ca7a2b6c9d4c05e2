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
from test_gpu import SMALL
from test_interpreted import why_not
from records.tools import bench

PROGRAM = ROOT / "records" / "tools" / "bench.py"
LOG = "tests/fixtures/record_like.txt"
SMALL = [flag for flag in TINY if not re.match("--(num_iterations|val_loss_every|epochs)", flag)]

def test_scripts_are_measured_as_they_are(tmp_path, shards):
    small = [*SMALL, *shards]
    copy = edited(tmp_path / "half.py", "micro_batches=«4→2»")
    done = launch(copy, SCRIPT, f"--vs={LOG}", "--steps=6", "--json", *small, script=PROGRAM)
    result = json.loads(done.stdout)
    half, ours, published = result["scripts"]
    assert [each["tokens"] for each in (half, ours, published)] == [512, 1024, 8 * 128]
    for each, micro_batches in ((half, 2), (ours, 4), (published, 8)):
        assert len(each["step_ms"]) == 6 and len(each["micro_ms"]) == 6 * micro_batches
        assert len(each["losses"]) == 2 + 6 + 2 and min(each["micro_ms"]) > 0
        assert sum(each["micro_ms"]) < sum(each["step_ms"])
        assert each["parts"]["matmuls"] > 0 and len(each["slowest"]) == 10
        assert sum(each["parts"].values()) >= sum(kernel["ms"] for kernel in each["slowest"])
        assert list(each["start to step 1"]) == ["nothing to compile, 3 at once"]
        assert each["peak memory, process"] > 2**27
    assert published["losses"][0] == pytest.approx(math.log(50257), abs=1e-4)
    assert published["losses"][-1] < published["losses"][0]
    ratios = [1024 / 512 * a / b for a, b in zip(half["step_ms"], published["step_ms"])]
    assert half["ratios"] == pytest.approx(ratios)
    launch(*small, "--num_iterations=11", "--val_loss_every=0", "--epochs=100", "--val_tokens=0",
           "--save_every=0", f"--records={tmp_path}")
    usual = losses(log_of(tmp_path), "train_loss")
    assert ours["losses"] == pytest.approx(usual[:10], abs=6e-5)
    assert half["losses"][1:] != pytest.approx(usual[1:10], abs=1e-3)
    text = bench.text_of(result)
    assert f"\n{'tokens a step':<46}{'512':>28}{'1,024':>28}{'1,024':>28}\n" in text
    assert f"train_gpt.py takes {sum(ours['ratios']) / 6:.3f} times as long a token as" in text
    assert "GPU" not in text and "GB/s" not in text and "memory, reserved" not in text

@pytest.mark.full
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_its_half_for_a_gpu_runs_up_to_the_launch(tmp_path, monkeypatch, capsys):
    """Each script starts with an empty cache, then with a full one."""
    helper = ROOT / "tests" / "helpers" / "on_fake_gpu.py"
    monkeypatch.setattr(bench, "CHILD", [sys.executable, str(helper), str(PROGRAM)])
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(ROOT)
    bench.main([f"--vs={LOG}", "--steps=3", "--json", "demo", *SMALL])
    result = json.loads(capsys.readouterr().out)
    assert result["machine"]["device"] == "NVIDIA H100 80GB HBM3"
    assert result["order"].startswith("in turn") and result["data"] == "made up"
    ours, published = result["scripts"]
    for each in (ours, published):
        assert set(each["start to step 1"]) == {"an empty cache, 1 at once",
                                                "a full cache, 2 at once"}
        assert each["peak memory, tensors"] == 3 * 2**30 and len(each["step_ms"]) == 3
        kernels = {kernel["name"]: kernel for kernel in each["slowest"]}
        (transfer,) = [one for name, one in kernels.items() if name.startswith("Memcpy")] or [None]
        assert transfer is None or transfer["ms"] == 1 / 2 and "GB/s" not in transfer
        assert any("GB/s" in kernel for kernel in kernels.values())
        assert not {"Context Sync", "Stream Wait Event", "a mark"} & kernels.keys()
    assert {"attention", "loss and softcap", "activation"} <= set(ours["parts"])
    assert [ours["losses"][0], published["losses"][0]] == pytest.approx(
        [math.log(320), math.log(50257)], abs=1e-4)  # the head's rows
    assert published["parts"]["loss and softcap"] > 0 and "attention" not in published["parts"]
    text = bench.text_of(result)
    assert "one cannot show" in text and "3,072 MiB" in text and " GB/s  triton_" in text

@pytest.mark.parametrize("second, at_once, order", [
    ("true", [3, 2], "in turn"),
    ("false", [1, 1], "one script after the other, since the GPU takes one process")])
def test_scripts_do_not_share_a_gpu_in_exclusive_mode(second, at_once, order, monkeypatch, capsys):
    """There the program `second`, which uses the GPU beside the first one, fails."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "orig_argv", [second, "--machine"])
    monkeypatch.setattr(bench, "SPEEDS", [])
    for name, answer in dict(is_available=True, get_device_name="NVIDIA H200",
                             mem_get_info=(140 * 2**30, 141 * 2**30)).items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    bench.machine()
    found = capsys.readouterr().out
    monkeypatch.setattr(bench.subprocess, "check_output", lambda command: found)
    tried = []
    def measure(contestants, at_once, *rest):
        tried.append(at_once)
        for one in contestants:
            one.report = {"time": 0, "step_ms": [1] * 5, "micro_ms": [[1]] * 5, "losses": [1] * 5,
                          "kernels": {}, "tokens": 1, "peak memory, reserved": 2**35}
    monkeypatch.setattr(bench, "measure", measure)
    bench.main([f"--vs={LOG}", "--steps=1", "--json"])
    assert tried == at_once and json.loads(capsys.readouterr().out)["order"] == order

@pytest.mark.parametrize("words, error", [
    (["--steps=0"], "0: expected a whole number"), (["--num_iterations=9"], "leave it out"),
    (["none.py"], "none.py: cannot be read; name a script"),
    (["demo", "--no_such_flag=1"], "train_gpt.py: unrecognized arguments: --no_such_flag=1"),
    (["--vs=LICENSE", "demo", *SMALL], "LICENSE: is neither a copy")])
def test_what_cannot_be_measured_is_one_line(words, error, monkeypatch):
    monkeypatch.chdir(ROOT)
    with refused(error):
        bench.main(words)

def test_a_mistake_in_a_copy_keeps_its_traceback(tmp_path):
    copy = edited(tmp_path / "wrong.py", "mean_loss = torch.«zeros→no_such_function»(")
    done = launch(copy, *SMALL, script=PROGRAM, check=False)
    assert "wrong.py: Traceback (most recent call last)" in done.stderr
    assert done.stderr.endswith("has no attribute 'no_such_function'\n\n")

@pytest.mark.parametrize("name, part", [
    ("triton_tem_fused__to_copy_add_flex_attention_mul_select_sort_split_10", "attention"),
    ("nvjet_sm90_tst_192x192_64x3_2x1_v_bz_coopB_NNN", "matmuls"),
    ("nvjet_sm90_qrsss_128x160_128x5_1x2_h_bz_coopA_algo2_TNT", "FP8 matmuls"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "matmuls"),
    ("triton_poi_fused__scaled_mm__to_copy_addcmul_arange_eq_exp2_9", "loss and softcap"),
    ("triton_red_fused__fused_rms_norm__log_softmax__log_softmax_backward_data__scaled_mm_0",
     "loss and softcap"),
    ("triton_poi_fused__scaled_mm__to_copy_clamp_full_mul_permute_25", "FP8 casts"),
    ("triton_poi_fused_mul_pow_relu_threshold_backward_6", "activation"),
    ("triton_red_fused__fused_rms_norm__to_copy_add_cat_mul_slice_split_8", "rotary with its norm"),
    ("triton_per_fused__fused_rms_norm_add_mul_select_15", "other norms"),
    ("triton_poi_fused_embedding_dense_backward_37", "embeddings and masks"),
    ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>",
     "optimizers, elementwise"), ("Memcpy DtoD (Device -> Device)", "copies"),
    ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "exchange"), ("aten::addmm", "matmuls"),
    ("aten::mul", "other")])
def test_every_kernel_has_its_part(name, part):
    assert bench.part_of(name) == part

def test_the_bytes_of_a_name_that_stands_for_two_kernels_are_not_known(tmp_path):
    line = "inductor_meta={'kernel_name': '%s', 'no_x_dim': False, 'kernel_num_gb': %s},\n"
    (tmp_path / "a.py").write_text(line % ("one", "0.25") + line % ("two", "1e-05"))
    (tmp_path / "b.py").write_text(line % ("one", "0.25") + line % ("two", "3.0"))
    assert bench.bytes_of_kernels(tmp_path) == {"one": 0.25}

@pytest.mark.parametrize("tflops, tb_per_s, words", [
    (700, 4.0, ""), (575, 4.0, ": 575.0 TFLOP/s is SLOW, another H200 reached 720;"),
    (700, 3.3, "copies: 3.3 TB/s is SLOW, another H200 reached 4.2;")])
def test_a_slow_gpu_is_called_slow(tflops, tb_per_s, words):
    found = {"device": "NVIDIA H200", "torch": "2.13.0", "TFLOP/s": tflops, "TB/s": tb_per_s}
    said = "\n".join(bench.about_machine(found))
    assert words in said and ("SLOW" in said) == bool(words)
    assert "SLOW" not in str(bench.about_machine(found | {"device": "NVIDIA L4"}))

def test_its_units_and_that_the_first_steps_do_not_count(tmp_path):
    meter = SimpleNamespace(cuda=False, profiler=None, losses=[3.0] * 8, found={
        "tokens": 1000, "step_ms": [], "micro_ms": [], "losses": [], "kernels": {}})
    meter.ends = [[float(i * i), i * i + 0.25] for i in range(9)]  # longer from step to step
    bench.Meter.collect(meter)
    one = SimpleNamespace(name="x", seconds={}, report=meter.found, folder=tmp_path)
    found = bench.figures_of(one, 3)
    assert found["step_ms"] == [5000.0, 7000.0, 9000.0] and found["micro_ms"] == [250.0] * 3
    cells = bench.cells_of(found)
    assert cells["a step, ms: median (range)"] == "7000.0 (5000.0 to 9000.0)"
    assert cells["tokens/s"] == "143"
