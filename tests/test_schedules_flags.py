"""Schedules at their corners, flags, presets, and the checks before a run."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from conftest import TINY, write_shard

import train_gpt
from train_gpt import (PRESETS, Hyperparameters, UserError, check_data, check_settings, lr_scale, muon_momentum, parse_flags,
                       plan_spans, resolve, window_tokens)


def preflight(hp, world_size):
    check_settings(hp, world_size)
    return check_data(hp)


HP = PRESETS["speedrun"]


def with_(**changes):
    return dataclasses.replace(HP, **changes)


def test_window_grows_from_start_to_end_in_quanta():
    windows = [window_tokens(step, HP) for step in range(HP.num_iterations + 1)]
    assert windows[0] == windows[1] == 128 and windows[-1] == 1792
    assert sorted(set(windows)) == list(range(128, 1793, 128)) and windows == sorted(windows)
    # The record's own formula: ceil(1728 * progress / 128) blocks, at least one.
    assert windows[885] == -(-1728 * 885 // (1770 * 128)) * 128


def test_window_corners():
    assert {window_tokens(s, with_(window_start=1024, window_end=1024)) for s in (0, 1, 900, 1770)} == {1024}
    assert window_tokens(0, with_(window_start=64, window_quantum=64)) == 64
    assert window_tokens(1770, with_(window_start=64, window_quantum=64)) == 1792
    assert window_tokens(0, with_(num_iterations=0)) == 128
    assert max(window_tokens(s, with_(window_end=500)) for s in range(1771)) == 500


def test_learning_rate_is_flat_then_falls_to_the_floor():
    scales = [lr_scale(step, HP) for step in range(HP.num_iterations + 1)]
    start = HP.num_iterations * 6 // 10
    assert set(scales[:start + 1]) == {1.0} and scales[start + 1] < 1
    assert scales[-1] == pytest.approx(0.1)
    assert scales[(start + 1770) // 2] == pytest.approx(0.55, abs=0.001)
    falls = [a - b for a, b in zip(scales[start:], scales[start + 1:])]
    assert max(falls) - min(falls) < 1e-9
    assert lr_scale(1769, with_(cooldown_frac=0.0)) == 1.0
    assert lr_scale(0, with_(cooldown_frac=1.0, lr_floor=0.0)) == 1.0
    assert lr_scale(1770, with_(cooldown_frac=1.0, lr_floor=0.0)) == 0.0


def test_momentum_warms_up_and_stays():
    assert [muon_momentum(s, HP) for s in (0, 150, 300, 1770)] == pytest.approx([0.85, 0.9, 0.95, 0.95])
    assert muon_momentum(0, with_(muon_momentum_steps=0)) == 0.95


def test_every_field_is_a_flag_of_its_name():
    for f in dataclasses.fields(Hyperparameters):
        value = getattr(PRESETS["demo"], f.name)
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        hp, _ = parse_flags(["--preset=speedrun", f"--{f.name}={text}"], "demo")
        assert hp == dataclasses.replace(PRESETS["speedrun"], **{f.name: value}), f.name


def test_flag_forms():
    assert parse_flags(["--seed", "3", "--seed=4", "--use_fp8=false"], "speedrun")[0] == with_(seed=4, use_fp8=False)
    assert parse_flags(["--save=false", "--save"], "speedrun")[0].save
    assert parse_flags(["--adam_betas=0.7,0.9"], "speedrun")[0].adam_betas == (0.7, 0.9)
    assert parse_flags([], "demo")[0] == PRESETS["demo"]
    assert parse_flags(["--check"], "demo")[1].check and not parse_flags([], "demo")[1].check
    assert [parse_flags(flags, "demo")[1].resume for flags in ([], ["--resume"], ["--resume=a/b"])] == [None, "", "a/b"]


@pytest.mark.parametrize("flag, words", [
    ("--num_iteration=3", "unrecognized arguments: --num_iteration=3"), ("--seed=x", "--seed: invalid int value: 'x'"),
    ("--preset=big", "choose from 'speedrun', 'demo'"), ("--adam_betas=0.8", "invalid pair value"), ("--use_fp8=maybe", "invalid boolean"),
    ("stray", "unrecognized arguments: stray"), ("--seed", "expected one argument")])
def test_wrong_flags_are_one_line(flag, words):
    with pytest.raises(UserError, match=words) as caught:
        parse_flags([flag], "demo")
    assert "\n" not in str(caught.value)


def test_help_names_every_flag_with_its_default(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_flags(["--help"], "demo")
    text = capsys.readouterr().out
    assert caught.value.code == 0
    for f in dataclasses.fields(Hyperparameters):
        assert f"--{f.name}" in text
    assert "default: 1770, demo: " in " ".join(text.split())


@pytest.fixture
def tiny(tmp_path):
    write_shard(tmp_path / "a_train_000001.bin", [256, *range(200)] * 50)
    write_shard(tmp_path / "a_val_000000.bin", [256, *range(200)] * 10)
    return dataclasses.replace(
        PRESETS["demo"], windows="LSLSSL", value_embeds="01..01", attention="xxx.xx", num_heads=2, train_files=f"{tmp_path}/a_train_*.bin", val_files=f"{tmp_path}/a_val_*.bin", val_tokens=2000,
        train_seq_len=256, val_seq_len=512, num_iterations=9)


def test_preflight_accepts_and_reports(tiny):
    data = preflight(tiny, 2)
    assert data["train_tokens"] == [10050] and data["val_tokens"] == [2010] and sum(s.steps for s in data["spans"]) == 9


@pytest.mark.parametrize("changes, words", [
    (dict(num_iterations=10), "raise --epochs"),
    (dict(val_tokens=2010), "holds 2009 tokens to predict, 2010 are asked for"),
    (dict(micro_batches=3), "2 ranks do not divide 3 micro-batches: start 1, 3 ranks"),
    (dict(train_seq_len=200), "--train_seq_len=200 is not a multiple of 128"),
    (dict(windows="LL"), "one character a layer"),
    (dict(windows="LSLSSX"), "has X; it takes L, S"),
    (dict(attention="......"), "no layer with attention"),
    (dict(value_embeds="01.1.1"), "layer 3"),
    (dict(value_embeds="01..0x"), "has x; it takes 0, 1"),
    (dict(num_kv_heads=3), "does not divide --num_heads=2"),
    (dict(head_dim=72), "multiple of 16"),
    (dict(model_dim=200), "--model_dim=200 is not a multiple of 16"),
    (dict(seed=2**70), "--seed=1180591620717411303424 is not between -1"),
    (dict(attention_scale=float("nan")), "--attention_scale=nan is not between"),
    (dict(fp8_w_scale=0.0), "fp8_w_scale=0.0 is not"),
    (dict(window_start=512, window_end=256), "--window_start=512 is above --window_end=256"),
    (dict(num_iterations=0, train_seq_len=256 * 30), "hold 0 in 1 pass"),
    (dict(vocab_size=100), "token 100 at byte 1226 is not below the vocabulary size 100|token 256 at byte 1024"),
    (dict(vocab_size=70000), "--vocab_size=70000 is not between 2 and 65536"),
    (dict(train_files="nowhere/*.bin"), "no file matches --train_files=nowhere"),
    (dict(name="a/b"), "letters"),
    (dict(dtype="half"), "float32"),
    (dict(cooldown_frac=1.5), "cooldown_frac"),
    (dict(adam_betas=(0.8, 1.0)), "adam_betas"),
    (dict(window_quantum=0), "is not between 1 and inf"),
    (dict(epochs=10**400), "is not between 1 and inf"),
    (dict(muon_lr=float("inf")), "--muon_lr=inf is not between"),
    (dict(epochs=0), "is not between 1 and inf"),
    (dict(save_every=-1), "is not between 0 and inf"),
    (dict(deterministic=True, micro_batches=6, num_iterations=1), "3 micro-batches a rank are no power of two; set --micro_batches to 2 times one"),
])
def test_preflight_refuses_in_one_line(tiny, changes, words):
    with pytest.raises(UserError, match=words) as caught:
        preflight(dataclasses.replace(tiny, **changes), 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage, words", [
    (lambda b: b[:600], "shorter than the 1024-byte header"), (lambda b: b[:-2], "the file holds 10049"),
    (lambda b: b[:-1], "the file holds 10049.5"), (lambda b: b"\1" + b[1:], "magic number"),
    (lambda b: b[:4] + b"\2" + b[5:], "version 2 at byte 4"), (lambda b: b[:8] + bytes(4) + b[12:], "token count 0 at byte 8"),
    (lambda b: b[:2024] + b"\x01\x02" + b[2026:], "token 513 at byte 2024"), (lambda b: b"", "0 bytes")])
def test_damaged_shards_are_named_with_the_byte(tiny, damage, words):
    import glob
    path = glob.glob(tiny.train_files)[0]
    whole = open(path, "rb").read()
    open(path, "wb").write(damage(whole))
    with pytest.raises(UserError, match=words) as caught:
        preflight(tiny, 1)
    assert path in str(caught.value) and "\n" not in str(caught.value)


def test_old_torch_is_refused(tiny, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    with pytest.raises(UserError, match="torch 2.9.1.* not between 2.11"):
        preflight(tiny, 1)


def test_resolve_says_every_fallback_aloud():
    hp, notes = resolve(HP, torch.device("cpu"))
    assert not hp.use_fp8 and hp.seed == -1 and hp.num_kv_heads == 6 and hp.dtype in ("bfloat16", "float32")
    assert any("no FP8" in n for n in notes) and any("block-sparse attention" in n for n in notes)
    assert any("float32" in n for n in notes) or hp.dtype == "bfloat16"


def test_a_seed_is_drawn_where_none_is_given(tiny):
    command, cpu = parse_flags([], "demo")[1], torch.device("cpu")
    seeds = {train_gpt.prepare(tiny, command, 1, cpu, "script")[0].seed for _ in range(3)}
    assert len(seeds) == 3 and min(seeds) >= 0
    assert train_gpt.prepare(dataclasses.replace(tiny, seed=5), command, 1, cpu, "script")[0].seed == 5


def test_importing_has_no_side_effect_and_a_cpu_never_loads_the_compiler(tmp_path, shards):
    """The compiler takes seconds to import; constructing a torch.optim optimizer would do it, or arithmetic on meta tensors."""
    code = ("import sys; sys.path.insert(0, sys.argv[1]); import train_gpt, torch; "
            "print('after import:', torch.cuda.is_initialized(), torch.distributed.is_initialized()); "
            "train_gpt.run(sys.argv[2:]); print('compiler:', 'torch._dynamo' in sys.modules)")
    out = subprocess.run([sys.executable, "-W", "error", "-c", code, str(train_gpt.Path(train_gpt.__file__).parent), *TINY, *shards,
                          f"--records={tmp_path}", "--num_iterations=2", "--save_every=1"], capture_output=True, text=True,
                         env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert "after import: False False\n" in out.stdout and "\ncompiler: False\n" in out.stdout, out.stdout + out.stderr
    assert "\nfinal_val_loss: " in out.stdout


def test_plan_covers_the_stream_without_gap_or_repeat():
    spans = plan_spans([1000, 50, 2001], step_tokens=100, seq_len=50, epochs=2)
    assert [(s.epoch, s.shard, s.start, s.steps) for s in spans] == [(0, 0, 0, 9), (0, 2, 0, 20), (1, 0, 30, 9), (1, 2, 30, 19)]
