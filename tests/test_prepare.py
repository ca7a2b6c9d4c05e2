"""What is refused before a run begins, in one line: settings, data, parameters that nothing trains.
And what is not refused: ablations, and whatever a script may do."""

import dataclasses
import os
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import (SCRIPT, TINY, launch, load_checkpoint, load_script, log_of, losses, train,
                      write_shard)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import train_gpt
from train_gpt import UserError


def prepare(*flags, script=train_gpt):
    hp, command = script.parse_flags([*TINY, "--use_fp8=false", *map(str, flags)])
    return script.prepare(hp, command, "", script.World(0, 1, torch.device("cpu")), None)


@contextmanager
def time_limit(seconds: int):
    """Ends what hangs, by a TimeoutError."""
    def give_up(number, frame):
        raise TimeoutError(f"no answer after {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# --------------------------------------------------------------------------------------------------
# Data

LINKS = {"a copy": shutil.copy, "a hard link": os.link, "a link": os.symlink}


@pytest.mark.parametrize("link", LINKS)
def test_validation_on_training_data_is_refused(tmp_path, shards, link):
    """However the shard got there, and where a glob finds one shard twice."""
    train_files, val_files = (flag.partition("=")[2] for flag in shards)
    shard = Path(train_files).parent / "t_train_000002.bin"
    LINKS[link](shard, tmp_path / "copy.bin")
    tokens = "has the same tokens as .*name each shard once"
    with pytest.raises(UserError, match=tokens):
        prepare(shards[0], f"--val_files={tmp_path}/copy.bin", "--val_tokens=0")
    with pytest.raises(UserError, match=tokens):
        prepare(shards[0], f"--val_files={shard.parent}/t_*.bin", "--val_tokens=0")
    shutil.copy(shard, tmp_path / "a.bin")
    with pytest.raises(UserError, match=tokens):
        prepare(f"--train_files={tmp_path}/*.bin", shards[1])


def test_a_fifo_or_a_folder_as_a_shard_is_refused(tmp_path, shards):
    os.mkfifo(tmp_path / "fifo.bin")
    (tmp_path / "folder.bin").mkdir()
    for name in ("fifo.bin", "folder.bin"):
        with time_limit(60), pytest.raises(UserError, match=f"{name} is not "):
            prepare(f"--train_files={tmp_path}/{name}", shards[1])


def test_huge_numbers_get_an_answer(tmp_path, shards):
    """--check counts steps, but no more than it needs, and keeps none in memory."""
    for flags in (["--num_iterations=99999999999", "--epochs=100000"],
                  ["--num_iterations=10000000", "--epochs=10000"],
                  ["--train_seq_len=1000000000", "--epochs=10000"]):
        with time_limit(120), pytest.raises(UserError):
            prepare(*shards, *flags)
    path = write_shard(tmp_path / "large.bin", [256, *range(250)] * 4000)
    with time_limit(120):
        prepare(f"--train_files={path}", shards[1], "--train_seq_len=128", "--micro_batches=1",
                "--epochs=10000", "--num_iterations=1000000")


# --------------------------------------------------------------------------------------------------
# A user's own parameters

# Lines of the script at which a tweak is made.
TWEAK_MODEL = "        self.skip_weights = "
TWEAK_TABLE = "    table = [\n"
TWEAK_STREAM = "norm(self.embed(tokens_T))\n"


def tweaked(folder: Path, parameter: str, use: str = "", row: str = ""):
    """The path of a copy of the script whose model has one more parameter, `own`. What enters the
    layers is multiplied by `use`, if given, and `row` stands first in the optimizers' table."""
    text = SCRIPT.read_text()
    for place in (TWEAK_MODEL, TWEAK_TABLE, TWEAK_STREAM):
        assert text.count(place) == 1, f"the script has no single line {place!r} any more"
    own = f"        self.own = nn.Parameter({parameter})\n"
    text = text.replace(TWEAK_MODEL, own + TWEAK_MODEL)
    text = text.replace(TWEAK_TABLE, f"{TWEAK_TABLE}        {row}\n")
    if use:
        text = text.replace(TWEAK_STREAM, f"norm(self.embed(tokens_T)) * ({use})\n")
    path = folder / "tweaked.py"
    path.write_text(text)
    return path


@pytest.mark.method
def test_a_number_a_vector_and_a_row_of_a_users_own_train(tmp_path, shards):
    """A parameter without a dimension needs no row, and one with a row has its learning rate."""
    for name, parameter, use, row in (
            ("number", "torch.tensor(1.0)", "self.own", ""),
            ("vector", "torch.ones(2)", "self.own[0]", ""),
            ("row", "torch.tensor(1.0)", "self.own", '(r"own", Adam, 0.0),')):
        path = tweaked(tmp_path, parameter, use, row)
        script = load_script(path, "tweaked")
        train(script, *TINY, *shards, f"--records={tmp_path}/{name}")
        assert len(losses(log_of(tmp_path / name), "train_loss")) == 6
    launch(*TINY, *shards, f"--records={tmp_path}/two", script=path, ranks=2)
    curves = [losses(log_of(tmp_path / name), "train_loss") for name in ("row", "two")]
    assert curves[0] == pytest.approx(curves[1], abs=0.002)


@pytest.mark.method
def test_check_finds_a_matrix_that_no_row_takes(tmp_path, shards):
    script = load_script(tweaked(tmp_path, "torch.ones(2, 3)", "self.own.sum()"), "tweaked")
    with pytest.raises(script.UserError, match="no row of the table in .* takes own$"):
        train(script, *TINY, *shards, "--check")


@pytest.mark.method
def test_a_parameter_that_nothing_uses_is_named(tmp_path, shards):
    script = load_script(tweaked(tmp_path, "torch.ones(2)"), "tweaked")
    with pytest.raises(script.UserError, match="no gradient reaches own:"):
        train(script, *TINY, *shards, f"--records={tmp_path}")


@pytest.mark.method
@pytest.mark.parametrize("frozen", ["own", "blocks.0.mlp.fc.weight", "skip_weights"])
def test_frozen_parameters_stay_and_the_others_train(tmp_path, shards, frozen):
    """Also where a run resumes; a frozen matrix needs no row in the table."""
    path = tweaked(tmp_path, "torch.ones(2, 3)", "self.own.mean()")
    text = path.read_text()
    place = "    optimizers = build_optimizers("
    assert text.count(place) == 1
    freeze = "".join(f"    model.get_parameter({name!r}).requires_grad_(False)\n"
                     for name in {"own", frozen})
    path.write_text(text.replace(place, freeze + place))
    script = load_script(path, "tweaked")
    train(script, *TINY, *shards, f"--records={tmp_path}", "--save_every=3", "--micro_batches=2")
    first, last = (torch.load(path, weights_only=True)["state"]["model"]
                   for path in sorted(tmp_path.glob("*/step*.pt")))
    unchanged = {name for name in first if torch.equal(first[name], last[name])}
    assert unchanged == {"own", frozen}
    (saved, _) = sorted(tmp_path.glob("*/step*.pt"))
    train(script, f"--resume={saved}", f"--records={tmp_path}/again")
    again = load_checkpoint(tmp_path / "again")["state"]["model"]
    assert all(torch.equal(again[name], last[name]) for name in last)


@pytest.mark.both_scripts
@pytest.mark.parametrize("without", ["value_embeds", "attention"])
def test_an_ablation_of_every_layer_trains(tmp_path, shards, script, without):
    """The first ablation that anyone tries. Without attention there are no value embeddings."""
    dots = "." * len(script.PRESETS["demo"].windows)
    flags = ["--value_embeds=" + dots] + ["--attention=" + dots] * (without == "attention")
    train(script, *TINY, *shards, f"--records={tmp_path}", *flags)
    curve = losses(log_of(tmp_path), "train_loss")
    assert len(curve) == 6 and curve[-1] < curve[0] - 0.5
    names = load_checkpoint(tmp_path)["state"]["model"]
    assert not any("value_embeds" in name for name in names)
    assert any(".attn." in name for name in names) == (without == "value_embeds")


# --------------------------------------------------------------------------------------------------
# Strange settings

TEXT = st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), max_size=12)
VALUES = st.one_of(
    st.integers(-2, 600), st.integers(), st.floats(), TEXT,
    st.sampled_from(["true", "inf", "-0", "1e400", "0x10", "1_000", "LSSL", "x", "01.0", "*", "",
                     "LLL", "..10", "xxxx", "9999999999", "1e9", "128", "65536", "-1", "**"]))


@pytest.mark.both_scripts
@settings(max_examples=int(os.environ.get("STRANGE_SETTINGS", 100)), deadline=None,
          suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_strange_settings_make_a_plan_or_one_line(shards, tmp_path, script, monkeypatch, data):
    """STRANGE_SETTINGS=2000 ./run.sh test tests/test_prepare.py -k strange tries more of them."""
    monkeypatch.chdir(tmp_path)
    names = [field.name for field in dataclasses.fields(script.Hyperparameters)]
    names += ["preset", "resume", "no_such_flag"]
    changes = data.draw(st.dictionaries(st.sampled_from(names), VALUES, min_size=1, max_size=3))
    flags = [f"--{name}={value}" for name, value in changes.items()]
    try:
        with time_limit(120):
            plan = prepare(*shards, *flags, script=script)
    except script.UserError as e:
        assert str(e).isprintable() or any(not str(value).isprintable()
                                           for value in changes.values())
    else:
        hp = plan.hp
        last = hp.num_iterations
        assert 0 <= script.lr_scale(0, hp) <= 100 and 0 <= script.lr_scale(last, hp) <= 100
        assert script.window_tokens(0, hp) > 0 and script.window_tokens(last, hp) > 0
        assert script.tokens_seen(0, hp) == 0 <= script.tokens_seen(last, hp)
        assert all(0 <= script.muon_momentum(step, hp) <= 1 for step in (0, 5, 10**6))
