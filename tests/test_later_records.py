"""What `speedrun_2026` adds, each technique against its definition written plainly."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, launch, log_of, log_path, losses, newest_checkpoint, write_shard
from test_model import ALONE, WINDOW, sequence, tiny_model

import train_gpt
from train_gpt import (PRESETS, Adam, Muon, Ranks, UserError, batch_size,
                       build_optimizers, check_settings, future_weights, lr_scale,
                       norm, run, stage, steps_of, tokens_before, train_batches, train_step,
                       window_tokens)

LATER = PRESETS["speedrun_2026"]
# All of them, in a model of a few layers.
ALL = ["--stages=1:1:128,2:1.5:256,3:2:384", "--skips=..1.", "--late_input=1", "--backout=1",
       "--smear", "--pair_rows=500", "--softcap_height=23", "--softcap_shift=5",
       "--future_tokens=2", "--muon_decay=1.2", "--embed_decay=0.025",
       "--adam_every=2", "--micro_batches=2", "--cooldown_frac=0.6", "--lr_floor=0.15"]


# ---- The preset and the stages

def test_the_preset_is_the_published_schedule():
    assert len(LATER.windows) == len(LATER.attention) == len(LATER.skips) == 11
    check_settings(LATER, 8)
    thirds = [0, 428, 856]
    assert [batch_size(step, LATER) * LATER.train_seq_len for step in thirds] == [
        131072, 262144, 393216]
    assert [window_tokens(step, LATER) for step in thirds] == [384, 896, 1408]
    assert [stage(step - 1, LATER).batch for step in thirds[1:]] == [1, 2]
    assert stage(LATER.num_iterations, LATER).batch == 3
    assert tokens_before(LATER)[-1] == 428 * 6 * 131072 < 339e6


def test_learning_rates_fall_from_the_stage_to_the_floor():
    """m (1 - t) + 0.15 t, over the last 60 %."""
    peaks = {0: 1.0, 427: 1.0, 428: 1.52, 855: 1.52, 856: 1.73, 1284: 1.73}
    for step, m in peaks.items():
        t = max(0, (step - 0.4 * 1284) / (0.6 * 1284))
        assert lr_scale(step, LATER) == pytest.approx(m * (1 - t) + 0.15 * t)


def test_future_tokens_weigh_ever_less():
    def weights(progress):
        return future_weights(round(1200 * progress), dataclasses.replace(
            LATER, num_iterations=1200))
    assert weights(0) == [0.5, 0.25] and weights(1 / 6) == pytest.approx([0.5, 0.125])
    assert weights(1 / 3) == pytest.approx([0.5, 0]) and weights(0.5) == pytest.approx([0.25, 0])
    assert weights(2 / 3) == pytest.approx([0, 0]) and weights(1) == [0, 0]
    assert future_weights(5, PRESETS["speedrun"]) == []


STAGED = dataclasses.replace(LATER, train_seq_len=128, micro_batches=2, num_iterations=6,
                             vocab_size=65536, epochs=2)


def test_steps_of_a_shard_lie_end_to_end_whatever_their_size():
    steps = list(steps_of({"a": 20 * 128 + 1, "b": 30 * 128}, STAGED))[:6]
    assert steps == [("a", 0), ("a", 256), ("a", 512), ("a", 1024), ("a", 1536), ("b", 0)]
    assert tokens_before(STAGED) == [0, 256, 512, 1024, 1536, 2304, 3072]


def test_ranks_share_the_micro_batches_of_each_stage(tmp_path):
    path = write_shard(tmp_path / "a.bin", range(4000))
    shares = [list(train_batches({path: 4000}, STAGED, Ranks(rank, 2, torch.device("cpu"))))
              for rank in (0, 1)]
    for step, mine in enumerate(list(zip(*shares))[:6]):
        micro_batches = [batch for rank in mine for batch in rank]
        assert len(micro_batches) == batch_size(step, STAGED)
        first = tokens_before(STAGED)[step]
        inputs = torch.cat([inputs for inputs, _ in micro_batches])
        assert inputs.tolist() == list(range(first, first + len(inputs)))
    resumed = list(train_batches({path: 4000}, STAGED, ALONE, first=3))
    assert int(resumed[0][0][0][0]) == tokens_before(STAGED)[3] and len(resumed[0]) == 4


@pytest.mark.parametrize("changes, words", [
    (dict(stages="1:1"), "--stages=1:1:"),
    (dict(stages="1:1:1282:1:256"), "--stages=1:1:1282:1:256:"),
    (dict(stages="1:1:128,"), "--stages=1:1:128,:"),
    (dict(skips="..........."), r"--skips=\.\.\."),
    (dict(stages="0:1:128"), "--stages=0:1:128:"),
    (dict(stages="1:1.2.3:128"), "--stages="),
    (dict(skips="......3..."), "--skips: not for the same number of layers"),
    (dict(skips="......7...."), "--skips=......7....: .* comes later"),
    (dict(late_input=11), "the last layer is 10"),
    (dict(backout=99), "the last layer is 10"),
    (dict(adam_every=3), "multiples of --adam_every=3"),
    (dict(num_iterations=1285), "multiples of --adam_every=2"),
])
def test_contradictions_are_refused_in_one_line(changes, words):
    with pytest.raises(UserError, match=words) as caught:
        check_settings(dataclasses.replace(LATER, **changes), 1)
    assert "\n" not in str(caught.value)


# ---- Model and loss

def test_layers_read_skip_and_take_out_what_the_settings_say():
    """Against a loop over the blocks, each called with what it is to read."""
    changes = dict(windows="SLSSL", value_embeds="0...0", attention="xx.xx", skips="..0.3",
                   late_input=1, backout=2)
    model, hp = tiny_model(**changes)
    with torch.no_grad():
        model.skip_weights += torch.rand(2)
        model.residual_mix += torch.rand(5, 2)
    tokens, _ = sequence()
    given = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, args: given.append(args[1]))
    got = model.features(tokens, WINDOW)
    x = model.embedded(tokens, tokens == 256)
    outputs = []
    for i, block in enumerate(list(model.blocks)):
        skip = {2: (0, 0), 4: (1, 3)}.get(i)
        if skip:
            x = x + model.skip_weights[skip[0]] * outputs[skip[1]]
        x = model.residual_mix[i, 0] * x + model.residual_mix[i, 1] * given[0].x0_TD
        if block.attn is not None:
            x = x + block.attn(norm(outputs[1] if i > 1 else x), given[i])
        x = x + block.mlp(norm(x))
        outputs.append(x)
    assert model.backout.tolist() == [0.5]
    torch.testing.assert_close(got, norm(x - 0.5 * outputs[2]), rtol=1e-4, atol=1e-5)


def test_the_cap_of_the_logits_is_lower_and_begins_later():
    model, _ = tiny_model(softcap_height=23.0, softcap_shift=5.0)
    x = torch.randn(8, 32) * 30
    raw = F.linear(x, model.lm_head.weight).double()
    torch.testing.assert_close(model.logits(x).double(), 23 / (1 + torch.exp(-(raw + 5) / 7.5)),
                               rtol=1e-4, atol=1e-4)


def test_the_training_loss_counts_the_tokens_after_the_next():
    """Token by token; what lies past the end drops out, and so does padding."""
    model, _ = tiny_model(future_tokens=2)
    model.LOGITS_TOKENS = 100  # in portions
    tokens, targets = sequence()
    targets[77] = -1
    weights = [1, 0.5, 0.125]
    with torch.no_grad():
        logits = model.logits(model.features(tokens, WINDOW)).double()
        got = model(tokens, targets, WINDOW, tuple(map(torch.tensor, weights[1:])))
    want = 0.0
    for t in range(256):
        for k, weight in enumerate(weights):
            if t + k < 256 and targets[t + k] >= 0:
                p = logits[t].softmax(0)[targets[t + k]]
                want -= weight * math.log(p) / 256
    assert float(got) == pytest.approx(want, rel=1e-5)


# ---- Optimizers

def params_with_gradients(*shapes):
    params = {str(i): torch.nn.Parameter(torch.randn(shape)) for i, shape in enumerate(shapes)}
    for p in params.values():
        p.grad = torch.randn_like(p)
    return params


def test_decay_acts_where_the_update_shrinks_the_weight(monkeypatch):
    monkeypatch.setattr(train_gpt, "lr_scale", lambda step, hp: 0.5)
    plain = dataclasses.replace(LATER, dtype="float32", adam_every=1, muon_decay=0, muon_beta2=0)
    decaying = dataclasses.replace(plain, muon_decay=1.2)
    torch.manual_seed(0)
    for kind in ("Adam", "Muon"):
        ours = params_with_gradients((8, 4), (8, 4))
        twins = {name: torch.nn.Parameter(p.detach().clone()) for name, p in ours.items()}
        for name, p in twins.items():
            p.grad = ours[name].grad.clone()
        starts = {name: p.detach().clone() for name, p in ours.items()}
        if kind == "Adam":
            with_decay = Adam(ours, 0.6, plain, ALONE, 0.025)
            without = Adam(twins, 0.6, plain, ALONE)
            factor = 0.025 * 0.3**2
        else:
            with_decay, without = (Muon(p, 0.6, hp, ALONE)
                                   for p, hp in ((ours, decaying), (twins, plain)))
            factor = 1.2 * 0.3**2
        with torch.no_grad():
            for optimizer in (with_decay, without):
                optimizer.send_gradients()
                optimizer.compute(0)
                optimizer.apply(0)
        for name, start in starts.items():
            update = start - twins[name].detach()
            want = start.clone()
            for i in range(8):
                for j in range(4):
                    shrinks = float(update[i, j]) * float(start[i, j]) > 0
                    want[i, j] -= update[i, j] + factor * start[i, j] * shrinks
            assert not torch.allclose(want, start - update, atol=1e-6)
            torch.testing.assert_close(ours[name].detach(), want, rtol=1e-5, atol=1e-6)


def test_adam_steps_on_the_sum_of_two_steps_gradients():
    model, hp = tiny_model(adam_every=2, num_iterations=10, micro_batches=2, cooldown_frac=0.0)
    optimizers = build_optimizers(model, hp, ALONE)
    of_muon = {name for o in optimizers if isinstance(o, Muon) for name in o.params}
    reference = {name: torch.nn.Parameter(p.detach().clone())
                 for name, p in model.named_parameters() if name not in of_muon}
    rates = {name: o.lr for o in optimizers for name in o.params}
    theirs = torch.optim.Adam(
        [dict(params=[p], lr=rates[name]) for name, p in reference.items()],
        betas=(hp.adam_beta1, hp.adam_beta2), eps=hp.adam_eps, fused=True)
    for step in range(4):
        batches = [sequence(seed=10 * step + i) for i in range(2)]
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.zero_grad()
        for batch in batches:
            (model(*batch, torch.tensor(window_tokens(step, hp))) / 2).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        if step % 2 == 0:
            kept = {name: gradients[name] for name in reference}
        model.zero_grad()  # train_step makes them itself, but for those that Adam has kept
        if step % 2:
            for name, gradient in kept.items():
                model.get_parameter(name).grad = gradient.clone()
        train_step(model, batches, optimizers, step, hp, ALONE)
        for name, p in model.named_parameters():
            moved = not torch.equal(p, before[name])
            assert moved == (name in of_muon or step % 2 == 1), name
            assert (p.grad is None) == (name in of_muon or step % 2 == 1), name
        if step % 2:
            for name, p in reference.items():
                p.grad = kept[name] + gradients[name]
            theirs.step()
            for name, p in reference.items():
                torch.testing.assert_close(model.get_parameter(name), p, rtol=1e-4, atol=1e-4)


# ---- Whole runs

@pytest.mark.usefixtures("runs_here")
def test_all_of_them_on_any_number_of_ranks_and_resumed(tmp_path, shards):
    """Alike on 1 and 2 ranks; and on 2, from the checkpoint of step 8 on, the same bits again."""
    flags = [*TINY, *ALL, *shards, "--num_iterations=12", "--save_every=4", "--val_loss_every=4",
             "--adam_eps=1e-7"]
    run([*flags, f"--records={tmp_path}/1"])
    launch(*flags, f"--records={tmp_path}/2", ranks=2)
    logs = [log_of(tmp_path / str(ranks)) for ranks in (1, 2)]
    for kind in ("train_loss", "val_loss"):
        assert losses(logs[1], kind) == pytest.approx(losses(logs[0], kind), abs=0.003)
    assert "step:12/12 train_loss:" in logs[0] and "tokens:12288 lr:" in logs[0]
    whole = newest_checkpoint(tmp_path / "2")
    folder = log_path(tmp_path / "2").with_suffix("")
    (folder / "step00000012.pt").unlink()
    launch(f"--resume={log_path(tmp_path / '2')}", "--num_iterations=12", ranks=2)
    again = newest_checkpoint(tmp_path / "2")
    assert again["step"] == 12
    for kind in ("model", "exp_avg", "exp_avg_sq", "momentum", "row_squares"):
        for name, tensor in whole[kind].items():
            assert torch.equal(tensor, again[kind][name]), (kind, name)
    for others in (["--num_iterations=14"], ["--num_iterations=12", "--stages="]):
        with pytest.raises(UserError, match="stages are parts of --num_iterations; both must"):
            run([f"--resume={log_path(tmp_path / '2')}", *others])


@pytest.mark.usefixtures("runs_here")
@pytest.mark.parametrize("flag", ALL)
def test_each_works_alone(flag, tmp_path, shards):
    run([*TINY, "--smear=false", "--pair_rows=0", "--key_offset=false", "--muon_beta2=0", flag,
         *shards, f"--records={tmp_path}", "--num_iterations=2", "--save_every=0",
         "--val_loss_every=0"])
    assert losses(log_of(tmp_path))[-1] < math.log(320)
