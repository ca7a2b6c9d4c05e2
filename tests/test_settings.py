"""Settings, flags and presets, and what is refused in one line before a run begins."""

import dataclasses
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
import pytest
import torch
from conftest import TINY, refused, run_helper, train, write_shard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
import train_gpt
from train_gpt import PRESETS, Hyperparameters, parse_flags, resolve

pytestmark = pytest.mark.quick
HP = PRESETS["speedrun"]
CPU = torch.device("cpu")

def prepare(*flags, ranks=1):
    hp, command = train_gpt.parse_flags([*TINY, "--use_fp8=false", *map(str, flags)])
    return train_gpt.make_plan(hp, command, "", train_gpt.World(0, ranks, CPU), None)

def test_every_field_is_a_flag_of_its_name(capsys):
    for f in dataclasses.fields(Hyperparameters):
        value = getattr(PRESETS["demo"], f.name)
        hp, command = parse_flags(["--preset=speedrun", f"--{f.name}={value}"])
        assert hp == dataclasses.replace(HP, **{f.name: value}), f.name
        assert command.named == {f.name: value}
    with pytest.raises(SystemExit, match="^0$"):
        parse_flags(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(f"--{f.name}" in text for f in dataclasses.fields(Hyperparameters))
    steps = ", ".join(f"{name}: {hp.num_iterations}" for name, hp in PRESETS.items())
    assert f"({steps})" in text, "its value in each preset"
    assert "On a CPU each rank uses one thread, unless OMP_NUM_THREADS is set." in text

@pytest.mark.method
def test_forms_of_flags(monkeypatch):
    hp, _ = parse_flags(["--preset=speedrun", "--seed", "3", "--seed=4", "--use_fp8=false"])
    assert hp == dataclasses.replace(HP, seed=4, use_fp8=False)
    hp, command = parse_flags(["--check"])
    assert (command.check, command.resume, command.named) == (True, None, {})
    assert parse_flags(["--resume=a/b.pt"])[1].resume == Path("a/b.pt")
    for has_gpu, preset in ((True, "speedrun"), (False, "demo")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
        hp, command = parse_flags([])
        assert (hp, command.preset) == (PRESETS[preset], preset), "the hardware's"
        assert not command.check

@pytest.mark.parametrize("units, dtype", [
    ("avx2 amx_bf16", "bfloat16"), ("avx2 avx512_bf16", "bfloat16"), ("avx512f", "float32"),
    (None, "float32")])
def test_a_cpu_has_no_fp8_and_takes_fast_or_chosen_bfloat16(monkeypatch, units, dtype):
    monkeypatch.setattr(train_gpt, "cpu_info", lambda: {"flags": units} if units else {})
    for chosen, got in dict(auto=dtype, bfloat16="bfloat16", float32="float32").items():
        hp = dataclasses.replace(HP, dtype=chosen, seed=1)
        assert resolve(hp, CPU) == dataclasses.replace(hp, use_fp8=False, dtype=got)

@pytest.mark.skipif(not hasattr(torch.cpu, "get_capabilities"), reason="torch has it since 2.11")
def test_the_units_of_this_cpu_are_those_that_torch_finds():
    units = train_gpt.cpu_info().get("flags", "").split()
    capabilities = torch.cpu.get_capabilities()
    for unit in ("avx2", "avx512_bf16", "amx_bf16"):
        assert (unit in units) == capabilities.get(unit, False), unit

@pytest.mark.parametrize("capability, dtype, fp8", [
    ((9, 0), "bfloat16", True), ((8, 9), "bfloat16", True), ((8, 0), "bfloat16", False),
    ((7, 5), "float32", False)])
def test_a_gpu_computes_in_what_it_has(monkeypatch, capability, dtype, fp8):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True:
                        including_emulation or capability >= (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    hp = resolve(HP, torch.device("cuda"))
    assert (hp.dtype, hp.use_fp8) == (dtype, fp8)

def test_the_log_says_where_a_gpu_has_no_fp8(shards):
    plan = prepare(*shards)
    notices = {device: [*train_gpt.notices(plan, None, train_gpt.World(0, 1, torch.device(device)))]
               for device in ("cpu", "cuda")}
    assert not notices["cpu"] and notices["cuda"][0].startswith("fp8: off")
    plan.hp = dataclasses.replace(plan.hp, use_fp8=True)
    assert not [*train_gpt.notices(plan, None, train_gpt.World(0, 1, torch.device("cuda")))]

@pytest.mark.method
def test_importing_has_no_side_effect_and_a_cpu_never_loads_the_compiler(tmp_path, shards):
    """The compiler takes seconds to import; a torch.optim optimizer would do that."""
    printed = run_helper("first_start.py", *TINY, *shards, f"--records={tmp_path}",
                         "--num_iterations=2", "--save_every=1", PYTHONWARNINGS="error")
    assert printed.startswith("after import: False False\n")
    assert printed.endswith("\ncompiler: None\n") and "\nfinal_val_loss: " in printed

@pytest.fixture
def tiny(tmp_path):
    """Flags for data of ten steps a pass, and of 2,010 tokens to validate on."""
    write_shard(tmp_path / "a_train_000001.bin", [256, *range(200)] * 50)
    write_shard(tmp_path / "a_val_000000.bin", [256, *range(200)] * 10)
    return [f"--train_files={tmp_path}/a_train_*.bin", f"--val_files={tmp_path}/a_val_*.bin",
            "--val_tokens=2000", "--num_iterations=10", "--epochs=1", "--micro_batches=4"]

def test_a_plan_fills_in_the_tokens_to_validate_on_and_a_seed(tiny):
    short = [*tiny, "--num_iterations=5"]
    assert prepare(*short, "--val_tokens=0").hp.val_tokens == 2009
    seeds = {prepare(*short, "--seed=-1").hp.seed for _ in range(3)}
    assert len(seeds) == 3 and min(seeds) >= 0, "a seed is drawn where none is given"

OUT_OF_RANGE = f"""
    --adam_beta1=-0.1 --adam_beta1=nan --adam_beta2=1 --adam_eps=0 --adam_eps=1e-19
    --attention_scale=inf --cooldown_frac=1.5 --dtype=half --embed_lr=-0.1 --epochs=0
    --epochs=1{'0' * 400} --head_dim=72 --lm_head_softcap=0 --lm_head_softcap=38.1 --lr_floor=1.1
    --micro_batches=0 --model_dim=200 --muon_lr=1e308 --muon_momentum_end=1.5 --name=a/b
    --name={'a' * 101} --num_heads=0 --num_iterations=-1 --rope_base=0 --save_every=-1 --seed=-2
    --seed={2**70} --train_seq_len=200 --val_loss_every=-1 --vocab_size=70000 --windows=LSLX
    --window_start=0""".split()
@pytest.mark.method
@pytest.mark.parametrize("flags, words", [*((flag, flag.split("=")[0]) for flag in OUT_OF_RANGE),
    ("--num_iteration=3", "unrecognized arguments: --num_iteration=3"),
    ("--seed=x", "--seed: invalid int value: 'x'"),
    ("--preset=big", "choose from '?speedrun'?, .*'?demo"),
    ("--use_fp8=maybe", "invalid true_or_false value: 'maybe'"),
    ("--resume=a.pt", "--resume: not allowed with argument --preset"),
    ("--num_iterations=11", "suffices for 10 steps.* raise --epochs"),
    ("--train_seq_len=7680", "suffices for 0 steps"),
    ("--val_tokens=2010", "2009 tokens to predict"),
    ("--micro_batches=3", r"2 ranks cannot share 3 micro-batches equally: use .* divides"),
    ("--windows=LSL --value_embeds=... --attention=xxx", "--windows=LSL: .* even number"),
    ("--attention=..", "--value_embeds=.0 marks a layer that has no attention"),
    ("--value_embeds=0..00", "--value_embeds and --windows differ"),
    ("--num_kv_heads=3", "--num_kv_heads must divide --num_heads"),
    ("--window_start=4096", "--window_start is above --window_end"),
    ("--train_files=nowhere/*.bin", "no file matches .*nowhere")], ids=lambda text: text[:30])
def test_settings_that_make_no_sense_are_refused(tiny, flags, words):
    with refused(words):
        prepare(*tiny, *flags.split(), ranks=2)

def test_check_makes_every_check_and_starts_nothing(tmp_path, shards, monkeypatch, capsys):
    flags = [*TINY, *shards, "--check", "--micro_batches=4", f"--records={tmp_path}/none"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "0", "1":
        monkeypatch.setenv("RANK", rank)
        train(train_gpt, *flags)
        assert capsys.readouterr().out == "checks passed\n"
    path = write_shard(tmp_path / "bad.bin", [256] * 900 + [257] + [256] * 5000)
    with refused(f"{path} .* 257.*--vocab_size=257"):
        train(train_gpt, *flags, f"--val_files={path}")
    assert not (tmp_path / "none").exists()

TEXT = st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), max_size=12)
VALUES = st.one_of(
    st.integers(-2, 600), st.integers(), st.floats(), TEXT,
    st.sampled_from(["true", "inf", "-0", "1e400", "0x10", "1_000", "LSSL", "x", "01.0", "*", "",
                     "LLL", "..10", "xxxx", "9999999999", "1e9", "128", "65536", "-1", "**"]))
@settings(max_examples=int(os.environ.get("STRANGE_SETTINGS", 100)), deadline=None,
          suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_strange_settings_make_a_plan_or_one_line(shards, tmp_path, monkeypatch, data):
    """STRANGE_SETTINGS=2000 ./run.sh test tests/test_settings.py -k strange tries more of them."""
    monkeypatch.chdir(tmp_path)
    names = [field.name for field in dataclasses.fields(train_gpt.Hyperparameters)]
    names += ["preset", "resume", "no_such_flag"]
    changes = data.draw(st.dictionaries(st.sampled_from(names), VALUES, min_size=1, max_size=3))
    flags = [f"--{name}={value}" for name, value in changes.items()]
    try:
        plan = prepare(*shards, *flags)
    except train_gpt.UserError as e:
        assert "\n" not in str(e) or any("\n" in str(value) for value in changes.values())
    else:
        hp = plan.hp
        for step in (0, hp.num_iterations):
            assert 0 <= train_gpt.lr_factor(step, hp) <= 100
            assert train_gpt.window_tokens(step, hp) > 0 <= train_gpt.tokens_seen(step, hp)
        assert all(0 <= train_gpt.muon_momentum(step, hp) <= 1 for step in (0, 5, 10**6))

@pytest.mark.parametrize("link", [shutil.copy, os.symlink])
def test_validation_on_training_data_is_refused(tmp_path, shards, link):
    """However the shard got there, and where a glob finds one shard twice."""
    shard = Path(shards[0].partition("=")[2]).parent / "t_train_000002.bin"
    for name in ("copy.bin", "again.bin"):
        link(shard, tmp_path / name)
    for flags in ([shards[0], f"--val_files={tmp_path}/copy.bin", "--val_tokens=0"],
                  [shards[0], f"--val_files={shard.parent}/t_*.bin", "--val_tokens=0"],
                  [f"--train_files={tmp_path}/*.bin", shards[1]]):
        with refused("has the same tokens as .*: keep only one"):
            prepare(*flags)

@pytest.mark.method
@pytest.mark.parametrize("sizes, short", [
    ([8000, 2048, 2048], 2), ([8000, 164], 1), ([8000, 2049], 0), ([8000, 163], 0)], ids=str)
def test_training_shards_without_a_step_are_refused(tmp_path, shards, sizes, short):
    """Where they hold more than 2 % of the tokens. A step's last target is one token further."""
    for number, size in enumerate(sizes):
        write_shard(tmp_path / f"{number}.bin", [256, *range(number, number + size - 1)])
    words = fr"{short} training shards are no longer than a step \(2048 tokens\): merge them"
    with refused(words) if short else nullcontext():
        plan = prepare(shards[1], f"--train_files={tmp_path}/*.bin", "--micro_batches=8")
        assert [shard.tokens for shard in plan.train_shards] == sizes
