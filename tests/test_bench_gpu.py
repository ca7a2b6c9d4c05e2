"""The GPU benchmark on a CPU: its arithmetic against numbers worked out by hand, and its figures
against each other. Speeds mean nothing here."""

import dataclasses
import json
import sys
from itertools import islice

import numpy as np
import pytest
import torch
from bench_gpu import (NO_KERNEL, by_part, cast_shares, find_data,
                       floor_seconds, main, peak_rates, split, weighted)
from conftest import ROOT, launch

from train_gpt import (PRESETS, UserError, step_starts,
                       window_tokens)

SMALL = [
    "--preset=demo", "--windows=LSSL", "--value_embeds=0..0", "--attention=xx.x", "--model_dim=32",
    "--num_heads=2", "--head_dim=16", "--train_seq_len=256", "--val_seq_len=512",
    "--window_start=128", "--window_end=512", "--micro_batches=2", "--num_iterations=20",
]
SCRIPT = ROOT / "tests" / "bench_gpu.py"


@pytest.mark.parametrize("region, name, part", [
    ("model", "triton_tem_fused__to_copy_add_arange_flex_attention_mul_3", "attention"),
    ("model", "triton_per_fused_flex_attention_backward_transpose_unsqueeze_view_9", "attention"),
    ("model", "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN", "products"),
    ("model", "triton_per_fused__fused_rms_norm_add_mul_select_unbind_2", "norms and rotary"),
    ("model", "triton_red_fused__to_copy_add_cat_div_expand_mul_neg_pow_slice_sum_transpose_14",
     "norms and rotary"),
    ("model", "triton_poi_fused__scaled_mm__to_copy_clamp_full_mul_permute_25", "head"),
    ("model", "triton_poi_fused_pow_relu_15", "ReLU^2"),
    ("model", "triton_red_fused__log_softmax__to_copy_mul_nll_loss_forward_sigmoid_sub_29",
     "loss and softcap"),
    ("model", "triton_poi_fused__to_copy_add_embedding_dense_backward_mul_nll_loss_forward_pow_33",
     "embeddings and masks"),
    ("model", "triton_spl_fused_cumsum_eq_0", "embeddings and masks"),
    ("model", "Memcpy DtoD (Device -> Device)", "other: data and copies"),
    ("model", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "exchange"),
    ("optimizer", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
     "optimizer: Newton-Schulz products"),
    ("optimizer", "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>",
     "optimizer: Adam"),
    ("optimizer", "triton_poi_fused_lerp_0", "optimizer: Muon's elementwise"),
    ("data", "void at::native::vectorized_elementwise_kernel<4, BitwiseAnd>",
     "other: data and copies"),
])
def test_every_kernel_has_its_part(region, name, part):
    assert by_part(region, [(name, 0.25), (name, 0.5)]) == {part: 0.75}
    assert not NO_KERNEL.fullmatch(name) and NO_KERNEL.fullmatch("Stream Wait Event")


def test_the_heads_products_are_moved_and_the_parts_sum_to_the_wall_time():
    model = by_part("model", [("triton_tem_fused_flex_attention_0", 2.0), ("nvjet_a", 5.0),
                              ("triton_red_fused_log_softmax", 3.0)])
    optimizer = by_part("optimizer", [("nvjet_b", 0.5), ("FusedAdam", 0.25)])
    data = by_part("data", [("Memcpy HtoD (Pinned -> Device)", 0.125)])
    parts = split(14.0, model, 2.0, optimizer, data)
    assert {part: seconds for part, seconds in parts.items() if seconds} == {
        "attention": 2.0, "products": 3.0, "head": 2.0, "loss and softcap": 3.0,
        "optimizer: Newton-Schulz products": 0.5, "optimizer: Adam": 0.25,
        "other: data and copies": 0.125, "other: gaps between kernels": 3.125}
    assert sum(parts.values()) == 14.0


def test_floor_and_schedule_by_hand():
    assert floor_seconds(1000, (500e6, 200e6), (1e15, 2e15)) == pytest.approx(6e-4)
    hp = dataclasses.replace(PRESETS["speedrun"], num_iterations=4)
    assert [window_tokens(step, hp) for step in range(4)] == [128, 512, 896, 1408]
    # At 512 half-way from 1 to 3, at 1408 4/7 of the way from 3 to 10.
    got = weighted([128, 896, 1792], [1.0, 3.0, 10.0], hp)
    assert got == pytest.approx((1 + 2 + 3 + 7) / 4)


def test_rates_of_the_data_sheet(monkeypatch):
    hp = dataclasses.replace(PRESETS["speedrun"], dtype="bfloat16")
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert peak_rates(hp, cuda) == (989e12, 1979e12)
    assert peak_rates(dataclasses.replace(hp, use_fp8=False), cuda) == (989e12, 989e12)
    assert peak_rates(dataclasses.replace(hp, dtype="float32"), cuda) is None
    assert peak_rates(hp, torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Abacus")
    assert peak_rates(hp, cuda) is None


def test_shares_that_a_cast_loses():
    x = torch.tensor([1.0, -1000.0, 0.0, 1e-9, 3.0])
    saturated, flushed, mass = cast_shares(x, 2.0, torch.float8_e4m3fn)
    assert saturated == pytest.approx(1 / 5) and flushed == pytest.approx(1 / 4)
    assert mass == pytest.approx(1e-9 / 1004)
    assert cast_shares(torch.zeros(3), 1.0, torch.float8_e5m2) == (0, 0, 0)


def test_shards_have_the_steps_that_are_measured(tmp_path):
    hp = dataclasses.replace(PRESETS["demo"], train_seq_len=128, val_seq_len=256, micro_batches=2)
    shards, hp = find_data(hp, False, str(tmp_path), 10)
    shard, = shards
    assert shard.tokens == 10 * 256 + 1
    starts = [(shard, 256 * step) for step in range(10)]
    assert list(islice(step_starts(shards, hp), 10)) == starts
    real = dataclasses.replace(hp, train_files=shard.path, epochs=1)
    again, hp = find_data(real, True, "", 25)
    assert again == shards and len(list(islice(step_starts(again, hp), 25))) == 25
    for changes in (dict(micro_batches=21), dict(val_seq_len=2688)):
        with pytest.raises(UserError, match="too few tokens"):
            find_data(dataclasses.replace(real, **changes), True, "", 25)


def test_figures_agree_with_each_other(tmp_path):
    path = tmp_path / "bench.json"
    done = launch("--cpu", "--repeat=2", f"--json={path}", *SMALL, "--dtype=bfloat16",
                  script=SCRIPT)
    content = json.loads(path.read_text())
    figures = content["figures"]
    value = {name: figure["value"] for name, figure in figures.items()}
    assert all(figure["unit"] and np.isfinite(figure["value"]) for figure in figures.values())
    assert all(name in done.stdout for name in figures) and content["about"]["device"] == "CPU"

    for what in ("step", "micro-batch"):
        measured = [value[f"{what}, window {window}"] for window in (128, 256, 384, 512)]
        assert min(measured) <= value[f"{what}, mean of the schedule"] <= max(measured)
    mean = value["step, mean of the schedule"]
    assert value["20 steps at that mean"] == pytest.approx(20 * mean / 1000)
    best = max(v for name, v in value.items() if name.startswith("matrix products, bfloat16"))
    for where in ("window 128", "window 512", "mean of the schedule"):
        seconds = value[f"step, {where}"] / 1000
        assert value[f"throughput, {where}"] == pytest.approx(512 / seconds)
        floor = 512 * value[f"FLOPs, {where}"] * 1e6 / (best * 1e12)
        share = value[f"share of the floor at the measured ceilings, {where}"]
        assert share == pytest.approx(100 * floor / seconds)
    # By hand: 3 layers have attention with 4 matrices of 32 x 32, 4 layers have an MLP with 8 of
    # them, and the head is 320 x 32. At window 128 a token sees only its own block, 64.5 keys on
    # average, in each of 3 layers of 32 channels.
    assert value["FLOPs, window 128"] * 1e6 == pytest.approx(
        6 * (3 * 4 + 4 * 8) * 32**2 + 6 * 320 * 32 + 12 * 32 * 3 * 64.5)

    parts = {name: v for name, v in value.items() if name.startswith("part: ")}
    assert sum(parts.values()) == pytest.approx(value["parts: step, window 384"])
    assert min(parts[f"part: {part}"] for part in (
        "products", "norms and rotary", "ReLU^2", "loss and softcap", "head",
        "optimizer: Newton-Schulz products", "optimizer: Adam")) > 0
    assert value["kernels in a step"] > 1000 and "| attention " in done.stdout
    assert value["FP8 head's weight: flushed to zero"] < 100
    assert 4 < value["training loss at the last step"] < 6
    assert value["a step's data, on the host"] > 0
    assert value["memory kept between steps, estimate"] > 0


@pytest.mark.parametrize("flags, words", [
    (["--cpu", "--repeat=0"], "--repeat counts from 1"),
    (["--cpu", "--check"], "--check"),
    (["--cpu", *SMALL, "--train_files=none.bin"], r"no file matches .*none\.bin"),
])
def test_refuses_what_it_cannot_measure(flags, words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", *flags])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=words):
        main()


def test_without_a_gpu_it_says_so_in_one_line():
    done = launch(script=SCRIPT, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: there is no CUDA GPU; ")
