"""The record attempt: what it has in common with train_gpt.py, and its schedules, model, loss and
optimizers against plain definitions."""

import ast
import dataclasses
import difflib
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import (ATTEMPT, ROOT, launch, load_script, newest_checkpoint, refused, train,
                      write_shard)
from test_masks_attention import dense_mask
from test_model import rms_norm, rotated, sequence
from test_reliability import assert_same_losses, assert_same_state, curve

attempt = sys.modules.get("speedrun_2026") or load_script(ATTEMPT, "speedrun_2026")

FULL = attempt.PRESETS["speedrun"]
CPU = torch.device("cpu")
ALONE = attempt.World(0, 1, CPU)
# All eleven layers of the attempt, made narrow.
TINY = attempt.resolve(dataclasses.replace(
    FULL, model_dim=32, num_heads=2, head_dim=16, vocab_size=257, train_seq_len=512,
    val_seq_len=512, memory_rows=2**12, memory_lag=0, micro_batches=2, num_iterations=12,
    adam_eps=1e-7, seed=1, num_kv_heads=2, dtype="float32", use_fp8=False), CPU)


# ---- What it shares with train_gpt.py

def statements(path) -> dict[str, str]:
    """{name or first words: text} of a script's functions, classes and other statements, without
    its description and imports."""
    text = path.read_text()
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body[1:]:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        first = min([node, *getattr(node, "decorator_list", [])], key=lambda part: part.lineno)
        code = lines[first.lineno - 1:node.end_lineno]
        found[getattr(node, "name", code[0].partition(" = ")[0])] = "\n".join(code)
    return found


THEIRS = statements(ROOT / "train_gpt.py")
OURS = statements(ATTEMPT)
CHANGED = {
    "Hyperparameters", "PRESETS", "tokens_seen", "window_tokens", "lr_scale",
    "CausalSelfAttention", "Block", "GPT", "Optimizer", "Adam", "build_optimizers",
    "step_starts", "train_batches", "train_step", "warm_up", "check_settings", "main"}
ADDED = {
    "STAGE", "Stage", "stage", "batch_size", "future_weights", "previous_token", "Candidates",
    "HASH", "context_hashes", "recall_from_document", "Memory"}


def test_only_the_method_differs():
    """All else is a copy, to the letter: a fix in train_gpt.py must be made in the attempt too."""
    assert {name for name in THEIRS if THEIRS[name] != OURS.get(name)} == CHANGED
    assert set(OURS) - set(THEIRS) == ADDED


def test_the_run_differs_in_two_lines():
    """In what it says of a batch that grows, and in what is compiled."""
    lines = difflib.ndiff(THEIRS["main"].splitlines(), OURS["main"].splitlines())
    assert sum(line.startswith("- ") for line in lines) == 2


# ---- Schedules

def test_the_preset_is_the_published_schedule():
    attempt.check_settings(FULL, 8)
    attempt.check_settings(attempt.PRESETS["demo"], 4)
    thirds = [0, 290, 580]
    assert [attempt.batch_size(step, FULL) * FULL.train_seq_len for step in thirds] == [
        131072, 262144, 393216]
    assert [attempt.window_tokens(step, FULL) for step in thirds] == [384, 896, 1408]
    assert [attempt.stage(step - 1, FULL).batch for step in thirds[1:]] == [1, 2]
    assert attempt.stage(FULL.num_iterations, FULL).batch == 3
    assert attempt.tokens_seen(FULL.num_iterations, FULL) == 290 * 6 * 131072 < 0.33 * 696e6


def test_learning_rates_fall_from_the_stage_to_the_floor():
    """m (1 - t) + 0.15 t, over the last 60 %."""
    peaks = {0: 1.0, 289: 1.0, 290: 1.52, 579: 1.52, 580: 1.73, 870: 1.73}
    for step, m in peaks.items():
        t = max(0, (step - 0.4 * 870) / (0.6 * 870))
        assert attempt.lr_scale(step, FULL) == pytest.approx(m * (1 - t) + 0.15 * t)


def test_future_tokens_weigh_ever_less():
    hp = dataclasses.replace(FULL, num_iterations=1200, future_tokens=2)
    expected = {0: [0.5, 0.25], 200: [0.5, 0.125], 400: [0.5, 0], 600: [0.25, 0], 800: [0, 0],
                1200: [0, 0]}
    for step, weights in expected.items():
        assert attempt.future_weights(step, hp, CPU) == pytest.approx(weights)
    assert attempt.future_weights(5, FULL, CPU) == []


# ---- Data

STAGED = dataclasses.replace(FULL, train_seq_len=128, micro_batches=2, num_iterations=6,
                             vocab_size=65536, epochs=2)


def test_steps_lie_end_to_end_in_a_shard_whatever_their_size():
    shards = [attempt.Shard("a", 20 * 128 + 1, ""), attempt.Shard("b", 30 * 128, "")]
    steps = [(shard.path, start) for shard, start in attempt.step_starts(shards, STAGED)][:6]
    assert steps == [("a", 0), ("a", 256), ("a", 512), ("a", 1024), ("a", 1536), ("b", 0)]


def test_processes_share_the_micro_batches_of_each_stage(tmp_path):
    shards = [attempt.Shard(write_shard(tmp_path / "a.bin", range(4000)), 4000, "")]
    shares = [list(attempt.train_batches(shards, STAGED, attempt.World(rank, 2, CPU), 0))
              for rank in (0, 1)]
    for step in range(6):
        micro_batches = shares[0][step] + shares[1][step]
        assert len(shares[0][step]) == len(shares[1][step]) == attempt.stage(step, STAGED).batch
        first = attempt.tokens_seen(step, STAGED)
        inputs = torch.cat([inputs for inputs, _ in micro_batches])
        targets = torch.cat([targets for _, targets in micro_batches])
        assert inputs.tolist() == list(range(first, first + len(inputs)))
        assert targets.tolist() == list(range(first + 1, first + 1 + len(inputs)))
    resumed = next(attempt.train_batches(shards, STAGED, ALONE, 3))
    assert int(resumed[0][0][0]) == attempt.tokens_seen(3, STAGED) and len(resumed) == 4


@pytest.mark.parametrize("changes, moves", [
    (dict(stages="1:1:384,3:1:896,3:1:1408"), True), (dict(num_iterations=9), True),
    (dict(stages="1:2:128,2:2:128,5:1:1408"), False), (dict(num_iterations=5), False)], ids=str)
def test_a_resumed_run_may_change_a_stage_unless_that_moves_its_place_in_the_data(changes, moves):
    """After four of six steps, which are two stages."""
    shards = [attempt.Shard("a", 100 * 128, "fingerprint")]
    plan = attempt.Plan(STAGED, "", shards, [], None)
    changed = attempt.Plan(dataclasses.replace(STAGED, **changes), "", shards, [], None)
    assert (plan.data_read(4) != changed.data_read(4)) == moves


# ---- Settings

@pytest.mark.parametrize("changes, words", [
    (dict(stages="1:1"), "--stages=1:1 is not BATCH:LR:WINDOW"),
    (dict(stages="0:1:128"), "--stages="),
    (dict(skips="......3..."), "--skips and --windows differ in their length"),
    (dict(skips="..........."), r"--skips=\.{11} must name earlier layers, at least one"),
    (dict(late_input=11), "--late_input or --backout too high"),
    (dict(backout=99), "--late_input or --backout too high"),
    (dict(adam_every=3), "must be multiples of --adam_every=3"),
    (dict(num_iterations=871), "must be multiples of --adam_every=2"),
    (dict(save_every=501), "must be multiples of --adam_every=2"),
])
def test_contradictions_are_refused_in_one_line(changes, words):
    with refused(words, attempt.UserError):
        attempt.check_settings(dataclasses.replace(FULL, **changes), 1)


# ---- Model and loss

BEGINS = (0, 100, 130, 300)  # of documents


def tiny_model(hp=TINY, dtype=torch.float32):
    """A model without weights of 0 or 1, which would hide what they are multiplied by, whose memory
    has read a text like those of sequence(), and the beginning of some of them."""
    torch.manual_seed(0)
    model = attempt.GPT(hp, dtype, flex=False).to(dtype)
    for seed in range(3):
        model.memory.remember(sequence(512, seed, BEGINS)[0])
    model.memory.remember(sequence(512, eots=BEGINS)[0][:400].roll(1, 0))
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape)
    return model


@pytest.fixture
def float64(monkeypatch):
    """What the script keeps in float32 whatever the dtype is then in float64."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def plain_attention(p, name, x, value_embed, visible, begins, key_offset, hp):
    """Attention in a layer, with every score computed, one head after the other's kv head."""
    T, H, K = len(x), hp.num_heads, hp.head_dim
    kv_heads = hp.num_kv_heads
    qkv = x @ p[f"{name}.qkv"].flatten(0, 1).T
    q, k, v = qkv.view(T, -1, K).split([H, kv_heads, kv_heads], dim=1)
    q, k = (torch.stack([rotated(rms_norm(y_TK), hp.rope_base) for y_TK in y.unbind(1)], dim=1)
            for y in (q, k))
    shifted = k.clone()
    if key_offset:  # the half without a position comes from the token before
        for t in range(T):
            shifted[t, :, K // 2:] = 0 if begins[t] else k[t - 1, :, K // 2:]
    mix = p[f"{name}.value_mix"]
    v = mix[0] * v
    if value_embed is not None:
        v = v + mix[1] * value_embed.view(T, kv_heads, K)
    shared = [head * kv_heads // H for head in range(H)]  # the kv head of each query head
    shifted, v = shifted[:, shared], v[:, shared]
    scores = torch.einsum("qhc,khc->hqk", q, shifted) * hp.attention_scale
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    y = torch.einsum("hqk,khc->qhc", weights, v).reshape(T, H * K)
    return y @ p[f"{name}.proj.weight"].T


def plain_predictions(p, tokens, window, hp, model):
    """The attempt's forward pass, written from its definitions; p has its weights in float64, and
    the model's candidates are right by test_memory.py. Returns the log-probabilities of the model's
    own, and those of its mixture with the candidates."""
    T = len(tokens)
    begins = (tokens == 256).tolist()
    candidates = model.candidates(tokens)
    x = torch.empty(T, hp.model_dim, dtype=torch.float64)
    for t, token in enumerate(tokens.tolist()):
        x[t] = p["embed.weight"][token]
        for best in candidates.best[t]:
            kind = candidates.kinds[t, best]
            if kind >= 0:
                recalled = p["recalled_embed.weight"][candidates.tokens[t, best]]
                x[t] += p["recalled_mix"][kind] * recalled
    x = rms_norm(x)
    x0 = x
    visible = {"L": dense_mask(tokens, window // 128, 256),
               "S": dense_mask(tokens, max(1, window // 256), 256)}
    outputs = {}
    for i in range(11):
        if i >= 6:
            x = x + p["skip_weights"][i - 6] * outputs[10 - i]
        mix = p[f"blocks.{i}.residual_mix"]
        x = mix[0] * x + mix[1] * x0
        if i != 6:
            read = outputs[7] if i > 7 else x
            embed = {0: "1", 1: "2", 8: "0", 9: "1", 10: "2"}.get(i)
            value_embed = p[f"value_embeds.{embed}.weight"][tokens.long()] if embed else None
            long = i in (3, 10)
            x = x + plain_attention(p, f"blocks.{i}.attn", rms_norm(read), value_embed,
                                    visible["L" if long else "S"], begins, long, hp)
        hidden = (rms_norm(x) @ p[f"blocks.{i}.mlp.fc.weight"].T).clamp(min=0) ** 2
        x = x + hidden @ p[f"blocks.{i}.mlp.proj.weight"].T
        outputs[i] = x
    x = rms_norm(x - p["backout"] * outputs[7])
    raw = x @ p["lm_head.weight"].T
    own = (23 / (1 + torch.exp(-(raw + 5) / 7.5))).log_softmax(-1)
    mixed = []
    for t in range(T):
        known = candidates.kinds[t] >= 0
        scores = p["candidate_scores"][candidates.kinds[t, known]]
        shares = torch.cat(((x[t] @ p["own_score"])[None], scores)).softmax(0)
        named = F.one_hot(candidates.tokens[t, known], len(own[t])).double()
        mixed.append((shares[0] * own[t].exp() + shares[1:] @ named).log())
    return own, torch.stack(mixed)


@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 2)])
def test_loss_and_gradients_are_those_of_the_plain_definition(heads, kv_heads, float64):
    """The whole model: the candidates, key offset, skips, late input, backout, the shifted cap and
    further tokens in the loss; token by token, those past the end and targets of -1 left out."""
    hp = dataclasses.replace(TINY, num_heads=heads, num_kv_heads=kv_heads)
    model = tiny_model(hp, torch.float64)
    model.LOGITS_TOKENS = 100  # so that the logits are computed in portions
    tokens, targets = sequence(512, eots=BEGINS)
    targets[77] = -1
    weights = [1, 0.5, 0.125]
    loss = model(tokens, targets, torch.tensor(384), tuple(map(torch.tensor, weights[1:])))
    loss.backward()
    p = {name: x.detach().double().requires_grad_() for name, x in model.named_parameters()}
    own, mixed = plain_predictions(p, tokens, 384, hp, model)
    want = 0.0
    for t in range(512):
        for k, weight in enumerate(weights):
            if t + k < 512 and targets[t + k] >= 0:
                want = want - weight * (own if k else mixed)[t, targets[t + k]] / 512
    want.backward()
    assert float(loss.detach()) == pytest.approx(float(want.detach()), rel=1e-12)
    for name, x in model.named_parameters():
        error = (x.grad - p[name].grad).norm() / p[name].grad.norm()
        assert error < 1e-11, (name, float(error))


def test_validation_counts_the_next_token_alone(float64):
    model = tiny_model(dtype=torch.float64)
    tokens, targets = sequence(512, eots=BEGINS)
    p = {name: x.detach().double() for name, x in model.named_parameters()}
    _, mixed = plain_predictions(p, tokens, 256, TINY, model)
    want = F.nll_loss(mixed, targets)
    got = model(tokens, targets, torch.tensor(256)).detach()
    assert float(got) == pytest.approx(float(want), rel=1e-12)
    logits = model.logits(model.features(tokens, torch.tensor(256)))
    torch.testing.assert_close(logits, mixed)


# ---- Optimizers

def test_every_parameter_has_the_optimizer_that_is_meant_for_it():
    with torch.device("meta"):
        model = attempt.GPT(FULL, torch.float32, flex=True)
    hp = dataclasses.replace(FULL, dtype="float32")
    nowhere = attempt.World(0, 1, torch.device("meta"))
    rows = {}
    for optimizer in attempt.build_optimizers(model, hp, nowhere):
        for name in optimizer.params:
            rows[name] = (type(optimizer).__name__, optimizer.peak_lr, optimizer.every)
    assert set(rows) == set(dict(model.named_parameters()))
    for name, row in rows.items():
        if "embed" in name:
            assert row == ("Adam", hp.embed_lr, 2), name
        elif re.search(r"qkv|(proj|fc)\.weight", name):
            assert row == ("Muon", hp.muon_lr, 1), name
        else:
            lr = hp.head_lr if name == "lm_head.weight" else hp.scalar_lr
            assert row == ("Adam", lr, 2), name


def test_adam_steps_on_the_sum_of_two_steps_gradients():
    """Against torch.optim.Adam, which gets the sum. Muon takes part in every step, and no gradient
    of its matrices is left over for the next one."""
    hp = dataclasses.replace(TINY, cooldown_frac=0.0, stages="1:1:256",
                             num_iterations=10, future_tokens=0)
    model = tiny_model(hp)
    optimizers = attempt.build_optimizers(model, hp, ALONE)
    lrs = {name: o.peak_lr for o in optimizers if o.every == 2 for name in o.params}
    twin = tiny_model(hp)  # follows the model, to take each step's gradients without a step
    reference = {name: torch.nn.Parameter(model.get_parameter(name).detach().clone())
                 for name in lrs}
    adam = torch.optim.Adam([dict(params=[reference[name]], lr=lr) for name, lr in lrs.items()],
                            betas=(hp.adam_beta1, hp.adam_beta2), eps=hp.adam_eps, fused=True)
    summed = {name: torch.zeros_like(p) for name, p in reference.items()}
    for step in range(4):
        batches = [sequence(512, 10 * step + i, BEGINS) for i in range(2)]
        twin.load_state_dict(model.state_dict())
        twin.zero_grad()
        for batch in batches:
            (twin(*batch, torch.tensor(256)) / 2).backward()
        for name in summed:
            summed[name] += twin.get_parameter(name).grad
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        attempt.train_step(model, batches, optimizers, step, hp, ALONE)
        for name, p in model.named_parameters():
            acts = name not in lrs or step % 2 == 1
            assert acts != torch.equal(p, before[name]), (step, name)
            assert acts == (p.grad is None), (step, name)
        if step % 2 == 1:
            for name, p in reference.items():
                p.grad = summed[name]
            adam.step()
            summed = {name: torch.zeros_like(p) for name, p in reference.items()}
            for name, p in reference.items():
                torch.testing.assert_close(model.get_parameter(name), p, rtol=1e-4, atol=1e-4)


# ---- A whole run

def test_two_processes_train_the_same_and_a_resumed_run_gives_the_same_bits(tmp_path, shards):
    """In three stages, with Adam on every second step."""
    flags = [
        "--preset=speedrun", "--model_dim=32", "--num_heads=2", "--head_dim=16", "--seed=1",
        "--vocab_size=257", "--train_seq_len=256", "--val_seq_len=512", "--val_tokens=1000",
        "--memory_rows=4096", "--memory_lag=300", "--micro_batches=2",
        "--stages=1:1:128,2:1.52:256,3:1.73:384",
        "--num_iterations=12", "--save_every=4", "--val_loss_every=4", "--adam_eps=1e-7",
        "--dtype=float32", "--use_fp8=false", "--epochs=100", *shards]
    train(attempt, *flags, f"--records={tmp_path}/1")
    launch(*flags, f"--records={tmp_path}/2", script=ATTEMPT, ranks=2)
    assert_same_losses(tmp_path / "1", tmp_path / "2")
    assert curve(tmp_path / "1")[-1].tokens == 4 * (2 + 4 + 6) * 256
    one, two = (torch.load(newest_checkpoint(tmp_path / ranks), weights_only=True)["state"]["model"]
                for ranks in "12")
    assert torch.equal(one["memory.entries"], two["memory.entries"])
    assert (one["memory.entries"] > 0).sum() > 4000
    middle = newest_checkpoint(tmp_path / "2").with_name("step00000008.pt")  # before stage three
    launch(f"--resume={middle}", f"--records={tmp_path}/resumed", script=ATTEMPT, ranks=2)
    assert_same_state(tmp_path / "resumed", tmp_path / "2")
    with pytest.raises(attempt.UserError, match="keep the steps' tokens"):
        train(attempt, f"--resume={middle}", "--num_iterations=14")
