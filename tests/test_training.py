"""Whole runs of the script: the golden trajectory, the log, the clock, errors and copies."""

import dataclasses
import hashlib
import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock
import pytest
import torch
import torch.nn.functional as F
from conftest import (ROOT, TINY, edited, launch, load_checkpoint, log_of, log_path, losses,
                      planted, train)
import train_gpt
from train_gpt import World

pytestmark = pytest.mark.quick

# Settings of the method, so that the presets may change without changing the trajectory.
GOLDEN = [*TINY, "--num_iterations=30", "--val_loss_every=10", "--micro_batches=4",
          "--val_tokens=0", "--windows=LSSL", "--attention=xx.x", "--value_embeds=0..0",
          "--window_start=128", "--window_end=384", "--muon_lr=0.05", "--adam_beta1=0.8",
          "--adam_eps=1e-7", "--attention_scale=0.12", "--rope_base=1024", "--embed_lr=0.6",
          "--num_kv_heads=0", "--muon_momentum_end=0.95", "--muon_momentum_steps=100",
          "--lr_floor=0.1"]
@pytest.mark.method
def test_golden_trajectory(tmp_path, shards):
    """Another CPU or torch sums in another order, which 30 steps let grow to about 1e-3; a change
    of the method moves the losses by more. To renew them, on purpose only: TRAIN_GPT_GOLDEN=1
    ./run.sh test tests/test_training.py -k golden -n 0"""
    train(train_gpt, *GOLDEN, *shards, f"--records={tmp_path}")
    log = log_of(tmp_path)
    trained = {kind: losses(log, kind) for kind in ("val_loss", "train_loss")}
    path = ROOT / "tests" / "golden.json"
    if os.environ.get("TRAIN_GPT_GOLDEN"):
        path.write_text(json.dumps(trained, indent=1) + "\n")
    stored = json.loads(path.read_text())
    assert trained["val_loss"][0] == pytest.approx(math.log(320), abs=1e-4)
    for kind in trained:
        assert trained[kind] == pytest.approx(stored[kind], abs=0.01)
    assert trained["val_loss"] == sorted(trained["val_loss"], reverse=True)
    assert trained["val_loss"][-1] < trained["val_loss"][0] - 2

def test_the_warmup_leaves_no_trace(tmp_path, shards, monkeypatch):
    train(train_gpt, *TINY, *shards, f"--records={tmp_path}/a")
    monkeypatch.setattr(train_gpt, "warm_up", lambda *args: None)
    train(train_gpt, *TINY, *shards, f"--records={tmp_path}/b")
    states = [load_checkpoint(tmp_path / folder)["state"] for folder in "ab"]
    torch.testing.assert_close(*states, rtol=0, atol=0)

@pytest.mark.method
@pytest.mark.parametrize("val_tokens", [700, 1024, 1111])
def test_a_validation_is_the_mean_over_its_targets(shards, runs_here, monkeypatch, val_tokens):
    from test_model import tiny_model  # of this script's own model
    sums = []  # of each rank, in place of an exchange
    monkeypatch.setattr(World, "all_reduce", lambda world, whole: (
        sums.append(whole.clone()), train_gpt.Pending(whole))[1])
    model, hp = tiny_model(val_tokens=val_tokens)
    (shard,) = train_gpt.find_shards(shards[1].removeprefix("--val_files="))
    stream = train_gpt.read_tokens(shard.path, 0, val_tokens + 1, 257).long()
    wanted = 0.0
    for at in range(0, val_tokens, hp.val_seq_len):
        targets = stream[at + 1:at + hp.val_seq_len + 1]
        tokens = F.pad(stream[at:at + len(targets)], (0, -len(targets) % train_gpt.BLOCK))
        with torch.no_grad():
            logits = model.logits(model.features(tokens.int(), torch.tensor(hp.window_start)))
        wanted += F.cross_entropy(logits[:len(targets)].double(), targets, reduction="sum")
    for size in (1, 2, 4):
        sums.clear()
        for rank in range(size):
            world = World(rank, size, torch.device("cpu"))
            if sequences := train_gpt.load_validation([shard], hp, world):
                mean = train_gpt.evaluate(model, sequences, 0, hp, world)
                assert mean == pytest.approx(float(sums[-1][0] / sums[-1][1]))
                assert all(module.training for module in model.modules()), "training goes on"
        loss, targets = sum(sums).tolist()
        assert targets == val_tokens and loss == pytest.approx(float(wanted), rel=1e-6)

@pytest.mark.method
def test_the_warmup_is_like_a_step_on_random_tokens(shards, monkeypatch):
    """Its gradients are of a mean: those of the sum would overflow in FP8. It reads a batch as
    training does, so that nothing is done for the first time within the clock. Only rank 0 copies
    what it undoes."""
    from test_model import ALONE, tiny_model
    model, hp = tiny_model(val_seq_len=256)
    files = train_gpt.find_shards(shards[0].removeprefix("--train_files="))
    first, _ = next(train_gpt.train_batches(files, hp, ALONE, 0))[0]
    scales, inputs, reads = [], [], []
    def watch(module, batch, loss):
        if loss.requires_grad:
            inputs.append(batch[0])
            loss.register_hook(lambda gradient: scales.append(float(gradient)))
    def read_tokens(*args, read=train_gpt.read_tokens):
        reads.append(args)
        return read(*args)
    monkeypatch.setattr(train_gpt, "read_tokens", read_tokens)
    model.register_forward_hook(watch)
    train_gpt.warm_up(model, train_gpt.build_optimizers(model, hp, ALONE), files, hp, ALONE)
    assert scales == pytest.approx([1 / hp.tokens_per_step] * 2)
    assert len(reads) == 1 and len(inputs) == 2
    for tokens in inputs:
        assert tokens.shape == first.shape and tokens.dtype == first.dtype
        assert (tokens == first).float().mean() < 0.1, "it would train on the text"
    copies = []
    monkeypatch.setattr(train_gpt, "load_training_state", lambda saved, *rest: copies.append(saved))
    for rank in (0, 1):
        train_gpt.warm_up(model, [], files, hp, World(rank, 1, torch.device("cpu")))
    assert copies[0].keys() == {"model"} and copies[1] is None

def test_the_log_has_its_sections_and_its_last_lines(tmp_path, shards, capsys):
    train(train_gpt, *TINY, *shards, f"--records={tmp_path}", "--name=my_try",
          "--muon_lr=0.0123")
    log = log_of(tmp_path)
    console = capsys.readouterr().out
    assert re.fullmatch(r"[\d-]{10}T[\d-]{8}Z_my_try\.log", log_path(tmp_path).name)
    separator = "\n" + "=" * 100 + "\n"
    settings, environment, rest = log.split(separator, 2)
    source, steps = rest.rsplit(separator, 1)
    assert {"num_iterations = 6", "seed = 1"} < set(settings.splitlines())
    assert len(settings.splitlines()) == len(dataclasses.fields(train_gpt.Hyperparameters))
    assert set(re.findall(r"(?m)^(\w+): .", environment)) >= {
        "command", "host", "cpu", "torch", "ranks", "threads", "git", "data", "val_data", "unread",
        "script"}
    text = Path(train_gpt.__file__).read_text()
    assert source.rstrip("\n") == text.rstrip("\n")
    assert hashlib.sha256(text.encode()).hexdigest() in environment
    lines = re.findall(r"(?m)^step:(\d+)/6 (\w+)_loss:\d+\.\d{4} train_time:\d+ms "
                       r"step_avg:(?:nan|\d+\.\d\d)ms tokens:\d+ lr:\d\.\d{3} window:\d+$", steps)
    assert [(int(step), kind) for step, kind in lines] == [
        (0, "val"), (1, "train"), (2, "train"), (3, "train"), (3, "val"), (4, "train"),
        (5, "train"), (6, "train"), (6, "val")] and steps.count("\nstep:") == len(lines)
    assert set(re.findall(r"(?m)^([a-z_ ]+): .", steps)) >= {
        "to resume", "model", "warmup", "checkpoint", "final_val_loss", "log"}
    final = f"final_val_loss: {losses(log)[-1]:.4f} nats per token, "
    assert final in steps and "on 1000 tokens" in steps.split(final)[1]
    assert steps.splitlines()[-1] == f"log: {log_path(tmp_path)}"
    assert re.search(r"\n\w*Muon, lr 0\.0123: .*layers\.0\.", steps)
    hidden = r"(?m)^\w+, lr [\d.e-]+: .+\n"
    assert console == re.sub(hidden, "", steps), "the console shows all else after the source"

@pytest.mark.method
def test_step_lines_give_the_tokens_and_the_schedules(tmp_path, shards):
    """A validation has those of its weights, a training loss those of the step that computed it."""
    train(train_gpt, *TINY, *shards, f"--records={tmp_path}", "--micro_batches=4",
          "--window_start=128", "--window_end=384", "--cooldown_frac=1", "--lr_floor=0",
          "--lm_head_lr=0.0123")
    assert "\nAdam, lr 0.0123: lm_head.weight\n" in log_of(tmp_path)
    form = r"(?m)^step:(\d+)/6 (\w+)_loss:.* tokens:(\d+) lr:(\S+) window:(\d+)$"
    lines = re.findall(form, log_of(tmp_path))
    assert len(lines) == 9
    for number, kind, tokens, lr, window in lines:
        step = int(number) - (kind == "train")
        assert int(tokens) == int(number) * 4 * 256
        assert float(lr) == pytest.approx(1 - step / 6, abs=0.001)
        assert int(window) == [128, 128, 128, 256, 256, 384, 384][step]

def test_validating_and_saving_stop_the_clock(tmp_path, shards, monkeypatch):
    """On a CPU each step's line has the time of this step: its loss is read at once."""
    now = [0.0]
    monkeypatch.setattr(train_gpt.time, "perf_counter", lambda: now[0])
    for name, seconds in dict(evaluate=1000, save_checkpoint=500, train_step=2).items():
        def slow(*args, original=getattr(train_gpt, name), seconds=seconds, **kwargs):
            now[0] += seconds
            return original(*args, **kwargs)
        monkeypatch.setattr(train_gpt, name, slow)
    train(train_gpt, *TINY, *shards, f"--records={tmp_path}", "--save_every=2")
    form = r"step:(\d+)/6 \w+:\S+ train_time:(\d+)ms step_avg:(\S+)ms"
    times = re.findall(form, log_of(tmp_path))
    assert [int(t) for _, t, _ in times] == [2000 * int(step) for step, _, _ in times]
    assert times[0][2] == "nan" and times[1][2] == "2000.00"

@pytest.mark.parametrize("switch", ["NEITHER", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_each_switch_of_the_compiler_turns_flex_attention_off(shards, monkeypatch, switch):
    """Uncompiled, it would ignore the window."""
    model = Mock(side_effect=ZeroDivisionError)  # ends the run
    for name, value in dict(
            GPT=model, resolve=lambda hp, device: hp,
            world_of_this_process=lambda: World(0, 1, torch.device("cuda"))).items():
        monkeypatch.setattr(train_gpt, name, value)
    monkeypatch.setattr(os, "environ", {switch: "1"})
    with pytest.raises(ZeroDivisionError):
        train_gpt.main([*TINY, *shards])
    assert model.call_args.kwargs == {"flex": switch == "NEITHER"}

def test_the_clock_on_cuda_has_the_devices_time_of_each_step(monkeypatch):
    """A loss comes with the time at which the device was done with its step, however late."""
    now = 10.0  # when the device will have done all that was launched
    class Event:
        def __init__(self, enable_timing):
            self.waited = False
            self.copies = []  # (tensor, what it gets by a copy that ends before this event)
        def synchronize(self):
            self.waited = True
            for tensor, value in self.copies:
                tensor.fill_(value)
        def elapsed_time(self, later):
            assert later.waited
            return 1000 * (later.done - self.done)
    def record_event(event):
        event.done = now
        return event
    monkeypatch.setattr(torch.cuda, "current_stream",
                        lambda: SimpleNamespace(record_event=record_event))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = train_gpt.StepClock(torch.device("cuda"), 0.5)
    clock.start()
    now += 3.4
    clock.stop()
    now += 1.0  # a validation
    clock.start()
    times = []
    for step in range(1, 6):
        now += step
        loss = torch.tensor(math.nan)
        clock.add_loss(step, loss)
        clock.pending[-1][2].copies.append((loss, step))
        times += clock.read_losses(keep=clock.lag)
        assert len(times) == max(0, step - 3), "the GPU would wait for a slow read or write"
    times += clock.read_losses(keep=0)
    for number, (step, loss, seconds) in enumerate(times, 1):
        assert step == loss == number and seconds == pytest.approx(3.9 + step * (step + 1) / 2)
    now += 0.3
    clock.stop()
    assert len(times) == 5 and clock.seconds == pytest.approx(3.9 + 15 + 0.3)

def test_a_copy_elsewhere_under_another_name_runs_and_an_error_in_it_keeps_its_traceback(
        tmp_path, shards):
    """Even one that the script itself reports in one line where it opens a file."""
    code = "open('/no/such/file')"
    copy = planted(tmp_path, f"if step == 2: {code}")
    done = launch(*TINY, *shards, "--save_every=1", script=copy, cwd=tmp_path, check=False)
    assert load_checkpoint(tmp_path / "records")["step"] == 2
    message = "No such file or directory: '/no/such/file'"
    assert done.returncode == 1 and done.stderr.splitlines()[-1].endswith(message), done.stderr
    assert "error: " not in done.stderr and code in done.stderr
    last = log_of(tmp_path / "records").splitlines()[-1]
    assert last.startswith("error: ") and last.endswith(message)

def test_the_log_has_the_source_that_started_and_an_old_torch_is_refused(tmp_path, shards):
    copy = edited(tmp_path / "edited.py", "\nimport numpy as np\n«→open(__file__, 'a')"
                  ".write('# later' * 2)\n»")
    text = copy.read_text()
    launch(*TINY, *shards, "--num_iterations=0", f"--records={tmp_path}", script=copy)
    log = log_of(tmp_path)
    assert hashlib.sha256(text.encode()).hexdigest() in log and "# later# later" not in log
    assert losses(log) == pytest.approx([math.log(320)], abs=0.01), "0 steps are a validation"
    edited(copy, "\nimport torch\n«→torch.__version__ = torch.torch_version.TorchVersion('2.8.0')"
           "\n»")
    done = launch(script=copy, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: torch 2.8.0: install 2.9.1 or newer\n"
