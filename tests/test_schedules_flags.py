"""Schedules at their corners, flags, presets, and the checks before a run."""

import dataclasses
import glob
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import TINY, write_shard

import train_gpt
from train_gpt import (PRESETS, Hyperparameters, UserError, World, cpu_info, lr_scale,
                       muon_momentum, parse_flags, prepare, resolve, window_tokens)

HP = PRESETS["speedrun"]
CPU = torch.device("cpu")


def preflight(hp, world_size):
    """The plan of a run that does not resume."""
    _, command = parse_flags([])
    return prepare(hp, command, "the script\n", World(0, world_size, CPU), None)


def with_(**changes):
    return dataclasses.replace(HP, **changes)


@pytest.mark.method
def test_the_window_grows_from_start_to_end_in_whole_blocks():
    windows = [window_tokens(step, HP) for step in range(HP.num_iterations + 1)]
    assert windows[0] == windows[1] == 128 and windows[-1] == 1792
    assert sorted(set(windows)) == list(range(128, 1793, 128)) and windows == sorted(windows)
    # The record's own formula: ceil(1728 * progress / 128) blocks, at least one.
    assert windows[885] == -(-1728 * 885 // (1770 * 128)) * 128


@pytest.mark.method
def test_window_corners():
    fixed = with_(window_start=1024, window_end=1024)
    assert {window_tokens(step, fixed) for step in (0, 1, 900, 1770)} == {1024}
    assert window_tokens(0, with_(num_iterations=0)) == 128


@pytest.mark.method
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


@pytest.mark.method
def test_momentum_warms_up_and_stays():
    momenta = [muon_momentum(step, HP) for step in (0, 150, 300, 1770)]
    assert momenta == pytest.approx([0.85, 0.9, 0.95, 0.95])
    assert muon_momentum(0, with_(muon_momentum_steps=0)) == 0.95


def test_every_field_is_a_flag_of_its_name():
    for f in dataclasses.fields(Hyperparameters):
        value = getattr(PRESETS["demo"], f.name)
        hp, command = parse_flags(["--preset=speedrun", f"--{f.name}={value}"])
        assert hp == dataclasses.replace(HP, **{f.name: value}), f.name
        assert command.named == {f.name: value}


@pytest.mark.method
def test_forms_of_flags():
    hp, _ = parse_flags(["--preset=speedrun", "--seed", "3", "--seed=4", "--use_fp8=false"])
    assert hp == with_(seed=4, use_fp8=False)
    assert parse_flags(["--preset=demo", "--use_fp8=True"])[0].use_fp8
    assert parse_flags(["--preset=speedrun", "--adam_beta1=0.7"])[0] == with_(adam_beta1=0.7)
    hp, command = parse_flags(["--check"])
    assert (command.check, command.resume, command.named) == (True, None, {})
    assert not parse_flags([])[1].check
    assert parse_flags(["--resume=a/b.pt"])[1].resume == Path("a/b.pt")


@pytest.mark.parametrize("has_gpu, preset", [(True, "speedrun"), (False, "demo")])
def test_the_default_preset_is_the_hardwares(monkeypatch, has_gpu, preset):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    hp, command = parse_flags([])
    assert (hp, command.preset) == (PRESETS[preset], preset)


@pytest.mark.parametrize("flags, words", [
    (["--num_iteration=3"], "unrecognized arguments: --num_iteration=3"),
    (["--seed=x"], "--seed: invalid int value: 'x'"),
    (["--preset=big"], "choose from '?speedrun'?, '?demo"),
    (["--adam_beta1=0.8,0.9"], "invalid float value"),
    (["--use_fp8=maybe"], "invalid true_or_false value: 'maybe'"),
    (["--use_fp8"], "expected one argument"),
    (["stray"], "unrecognized arguments: stray"),
    (["--seed"], "expected one argument"),
    (["--resume"], "--resume: expected one argument"),
    (["--resume=a.pt", "--preset=demo"], "--preset: not allowed with argument --resume"),
])
def test_wrong_flags_are_one_line(flags, words):
    with pytest.raises(UserError, match=words) as caught:
        parse_flags(flags)
    assert "\n" not in str(caught.value)


def test_help_names_every_flag_with_its_value_in_each_preset(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_flags(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    for f in dataclasses.fields(Hyperparameters):
        assert f"--{f.name}" in text
    steps = ", ".join(f"{name}: {hp.num_iterations}" for name, hp in PRESETS.items())
    assert f"({steps})" in text


@pytest.fixture
def tiny(tmp_path):
    write_shard(tmp_path / "a_train_000001.bin", [256, *range(200)] * 50)
    write_shard(tmp_path / "a_val_000000.bin", [256, *range(200)] * 10)
    return dataclasses.replace(
        PRESETS["demo"], windows="LSLSSL", value_embeds="01..01", attention="xxx.xx", num_heads=2,
        train_files=f"{tmp_path}/a_train_*.bin", val_files=f"{tmp_path}/a_val_*.bin",
        val_tokens=2000, train_seq_len=256, val_seq_len=512, num_iterations=9)


def test_a_plan_has_the_shards_and_the_settings(tiny):
    plan = preflight(tiny, 2)
    assert [shard.tokens for shard in plan.train_shards] == [10050]
    assert [shard.tokens for shard in plan.val_shards] == [2010]
    assert plan.step == plan.seconds == 0
    assert preflight(dataclasses.replace(tiny, val_tokens=0), 2).hp.val_tokens == 2009
    # 9 steps a pass; the second begins at another offset, and fewer fit behind it.
    assert preflight(dataclasses.replace(tiny, num_iterations=18, epochs=2), 1).hp.epochs == 2


@pytest.mark.method
@pytest.mark.parametrize("changes, words", [
    (dict(num_iterations=10), "suffices for 9 steps.* raise --epochs"),
    (dict(val_tokens=2010), "2009 tokens to predict"),
    (dict(micro_batches=3), r"2 processes cannot share 3 micro-batches equally: start .* divides"),
    (dict(train_seq_len=200), "--train_seq_len=200.*128"),
    (dict(windows="LL"), "--attention and --windows differ"),
    (dict(windows="LSLSSX"), "--windows=LSLSSX"),
    (dict(windows="LSL", value_embeds="...", attention="xxx"), "--windows=LSL: .* even number"),
    (dict(windows="", value_embeds="", attention=""), "--windows= is not"),
    (dict(attention="......"), r"--value_embeds=01\.\.01 marks a layer without --attention"),
    (dict(value_embeds="01..0x"), r"--value_embeds=01\.\.0x"),
    (dict(value_embeds="01234."), r"--value_embeds=01234\."),
    (dict(num_heads=0), "--num_heads=0"),
    (dict(num_kv_heads=3), "--num_kv_heads must divide --num_heads"),
    (dict(head_dim=72), "--head_dim=72.*16"),
    (dict(model_dim=200), "--model_dim=200.*16"),
    (dict(seed=2**70), "--seed=1180591620717411303424"),
    (dict(attention_scale=float("nan")), "--attention_scale=nan"),
    (dict(adam_eps=0.0), "--adam_eps=0.0"),
    (dict(embed_lr=-0.1), "--embed_lr=-0.1"),
    (dict(window_start=0), "--window_start=0"),
    (dict(window_start=512), "--window_start is above --window_end"),
    (dict(train_seq_len=256 * 30), "suffices for 0 steps"),
    (dict(vocab_size=70000), "--vocab_size=70000.* 65536"),
    (dict(train_files="nowhere/*.bin"), "no file matches .*nowhere"),
    (dict(name="a/b"), "--name=a/b"),
    (dict(name=""), "--name="),
    (dict(dtype="half"), "--dtype=half.*float32"),
    (dict(cooldown_frac=1.5), "--cooldown_frac=1.5"),
    (dict(adam_beta2=1.0), "--adam_beta2=1.0"),
    (dict(muon_lr=float("inf")), "--muon_lr=inf is not from 0 to 1000000000"),
    (dict(muon_lr=1e308), "--muon_lr=1e.308"),
    (dict(epochs=0), "--epochs=0"),
    (dict(epochs=10**400), "--epochs=1000"),
    (dict(save_every=-1), "--save_every=-1"),
])
def test_what_cannot_start_is_refused_in_one_line(tiny, changes, words):
    with pytest.raises(UserError, match=words) as caught:
        preflight(dataclasses.replace(tiny, **changes), 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", [
    lambda b: b[:600], lambda b: b[:-2], lambda b: b[:-1], lambda b: b"\1" + b[1:],
    lambda b: b[:4] + b"\2" + b[5:], lambda b: b[:8] + bytes(4) + b[12:], lambda b: b"",
    lambda b: b[:5]],
    ids=["cut in the header", "a token short", "a byte short", "magic number", "version", "count",
         "no bytes", "5 bytes"])
def test_damaged_shards_are_named(tiny, damage):
    path = Path(glob.glob(tiny.train_files)[0])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match="is not a whole token shard") as caught:
        preflight(tiny, 1)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("units, dtype", [
    ("avx2 amx_bf16", "bfloat16"), ("avx2 avx512_bf16", "bfloat16"), ("avx512f", "float32"),
    (None, "float32")])
def test_a_cpu_has_no_fp8_and_takes_fast_or_chosen_bfloat16(monkeypatch, units, dtype):
    info = {"model name": "a CPU", "flags": units} if units else {}
    monkeypatch.setattr(train_gpt, "cpu_info", lambda: info)
    hp = with_(seed=1)
    assert resolve(hp, CPU) == dataclasses.replace(hp, use_fp8=False, dtype=dtype)
    for chosen in ("bfloat16", "float32"):
        hp = with_(dtype=chosen, seed=1)
        assert resolve(hp, CPU) == dataclasses.replace(hp, use_fp8=False)


@pytest.mark.skipif(not hasattr(torch.cpu, "get_capabilities"), reason="torch has it since 2.11")
def test_the_units_of_this_cpu_are_those_that_torch_finds():
    units = cpu_info().get("flags", "").split()
    capabilities = torch.cpu.get_capabilities()
    for unit in ("avx2", "avx512_bf16", "amx_bf16"):
        assert (unit in units) == capabilities.get(unit, False), unit


@pytest.mark.parametrize("capability, bf16, dtype, fp8", [
    ((9, 0), True, "bfloat16", True), ((8, 9), True, "bfloat16", True),
    ((8, 0), True, "bfloat16", False), ((7, 5), False, "float32", False)])
def test_a_gpu_computes_in_what_it_has(monkeypatch, capability, bf16, dtype, fp8):
    def supported(including_emulation=True):
        return including_emulation or bf16

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    hp = resolve(HP, torch.device("cuda"))
    assert (hp.dtype, hp.use_fp8) == (dtype, fp8)


def test_a_seed_is_drawn_where_none_is_given(tiny):
    seeds = {preflight(tiny, 1).hp.seed for _ in range(3)}
    assert len(seeds) == 3 and min(seeds) >= 0
    assert preflight(dataclasses.replace(tiny, seed=5), 1).hp.seed == 5


def test_importing_has_no_side_effect_and_a_cpu_never_loads_the_compiler(tmp_path, shards):
    """The compiler takes seconds to import; constructing a torch.optim optimizer would do it, or
    arithmetic on meta tensors."""
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import train_gpt, torch
print("after import:", torch.cuda.is_initialized(), torch.distributed.is_initialized())
train_gpt.main(sys.argv[2:])
print("compiler:", "torch._dynamo" in sys.modules)
"""
    folder = Path(train_gpt.__file__).parent
    flags = [*TINY, *shards, f"--records={tmp_path}", "--num_iterations=2", "--save_every=1"]
    out = subprocess.run([sys.executable, "-W", "error", "-c", code, str(folder), *flags],
                         capture_output=True, text=True,
                         env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert "after import: False False\n" in out.stdout, out.stdout + out.stderr
    assert "\ncompiler: False\n" in out.stdout, out.stdout + out.stderr
    assert "\nfinal_val_loss: " in out.stdout
