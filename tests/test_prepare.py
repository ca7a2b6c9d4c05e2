"""What `prepare` refuses beyond settings: a machine without a compiler, data on both sides."""
import dataclasses
import os
import sys
import sysconfig

import pytest
import torch
from conftest import TINY
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import train_gpt


def prepare(*flags, device="cpu"):
    hp, command = train_gpt.parse_flags([*TINY, "--use_fp8=false", *flags], "demo")
    return train_gpt.prepare(hp, command, "", train_gpt.Ranks(0, 1, torch.device(device)))


def test_triton_gets_a_compiler_and_headers_or_one_line(tmp_path, shards, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda *scheme: str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    for name in ("clang", "mycc"):
        (tmp_path / name).symlink_to(sys.executable)
    with pytest.raises(train_gpt.UserError, match=rf"Triton .* {tmp_path}/Python\.h: install"):
        prepare(*shards, device="cuda")
    prepare(*shards)  # on a CPU there is no Triton
    (tmp_path / "Python.h").touch()
    prepare(*shards, device="cuda")
    (tmp_path / "clang").unlink()
    for compiler in ("mycc", str(tmp_path / "mycc")):
        monkeypatch.setenv("CC", compiler)
        prepare(*shards, device="cuda")
    for compiler in ("gcc", "no-such-compiler"):
        monkeypatch.setenv("CC", compiler)
        with pytest.raises(train_gpt.UserError, match=r"C compiler \(gcc, clang or \$CC\)"):
            prepare(*shards, device="cuda")


def test_a_shard_of_both_sides_is_refused(tmp_path, shards):
    train = next(flag for flag in shards if flag.startswith("--train_files"))
    folder = os.path.dirname(train.partition("=")[2])
    (tmp_path / "val.bin").symlink_to(f"{folder}/t_train_000002.bin")
    for val in (f"{folder}/t_*.bin", f"{tmp_path}/val.bin"):
        with pytest.raises(train_gpt.UserError, match=r"share \S+/t_train_00000\d\.bin"):
            prepare(train, f"--val_files={val}", "--val_tokens=0")


def test_records_must_be_writable_before_anything_is_there(tmp_path, shards, monkeypatch):
    prepare(*shards, f"--records={tmp_path}/new/folder")
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    with pytest.raises(train_gpt.UserError, match=f"{tmp_path}/file is not writable"):
        prepare(*shards, f"--records={tmp_path}/file/x")
    locked = tmp_path / "locked"
    locked.mkdir()
    real = os.access

    def access(path, mode):  # root may write anywhere
        return real(path, mode) and path != f"{locked}/."

    monkeypatch.setattr(os, "access", access)
    with pytest.raises(train_gpt.UserError, match=f"{locked} is not writable"):
        prepare(*shards, f"--records={locked}/runs")


NAMES = [field.name for field in dataclasses.fields(train_gpt.Hyperparameters)]
TEXT = st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), max_size=12)
VALUES = st.one_of(
    st.integers(-2, 600), st.integers(), st.floats(), TEXT,
    st.sampled_from(["true", "inf", "-0", "1e400", "0x10", "1_000", "LSSL", "x", "01.0", "*", "",
                     "1:1:128,3:1.5:256", "..10", ",1:1:1", "9:0.0:1"]))


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, min_size=1, max_size=3))
def test_strange_settings_make_a_plan_or_one_line(shards, changes):
    flags = [f"--{name}={value}" for name, value in changes.items()]
    try:
        plan = prepare(*shards, *flags)
    except train_gpt.UserError as e:
        assert str(e).isprintable() or any(not str(value).isprintable()
                                           for value in changes.values())
    else:
        hp = plan.hp
        assert 0 <= train_gpt.lr_scale(0, hp) <= (100 if hp.stages else 1)
        assert len(train_gpt.tokens_before(hp)) == hp.num_iterations + 1
        assert train_gpt.window_tokens(hp.num_iterations, hp) > 0
        assert all(0 <= train_gpt.muon_momentum(step, hp) <= 1 for step in (0, 5, 10**6))
