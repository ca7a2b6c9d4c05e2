"""The record attempt: what it has in common with train_gpt.py, and its model and loss against plain
definitions. Its candidates are in test_memory.py."""

import ast
import dataclasses
import difflib
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import (ATTEMPT, ROOT, launch, load_script, newest_checkpoint, refused, train)
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
CHANGED = {"Hyperparameters", "PRESETS", "GPT", "build_optimizers", "train_step", "check_settings",
           "main"}
ADDED = {"Candidates", "HASH", "context_hashes", "recall_from_document", "Memory"}


def test_only_the_method_differs():
    """All else is a copy, to the letter: a fix in train_gpt.py must be made in the attempt too."""
    assert {name for name in THEIRS if THEIRS[name] != OURS.get(name)} == CHANGED
    assert set(OURS) - set(THEIRS) == ADDED


def test_the_run_differs_in_what_is_compiled():
    lines = difflib.ndiff(THEIRS["main"].splitlines(), OURS["main"].splitlines())
    changes = [line.split(maxsplit=1) for line in lines if line[0] in "-+"]
    assert changes == [
        ["-", "model.compile(dynamic=False, fullgraph=True)"],
        ["+", "model.loss = torch.compile(model.loss, dynamic=False, fullgraph=True)"]]


def test_the_presets_are_possible():
    attempt.check_settings(FULL, 8)
    attempt.check_settings(attempt.PRESETS["demo"], 2)
    assert attempt.tokens_seen(FULL.num_iterations, FULL) == 870 * 2**18 < 0.33 * 696e6


def test_the_order_of_the_lengths_makes_no_difference():
    shuffled = dataclasses.replace(TINY, memory="6,2,4,3", document_memory="3,1,6,2,4")
    one, other = (tiny_model(hp, torch.float32) for hp in (TINY, shuffled))
    tokens = sequence(512, eots=BEGINS)[0]
    assert all(map(torch.equal, one.candidates(tokens), other.candidates(tokens)))


def test_a_single_layer_is_refused():
    with refused("--windows=L: name at least two layers", attempt.UserError):
        attempt.check_settings(
            dataclasses.replace(FULL, windows="L", attention="x", value_embeds="."), 1)


def test_a_run_that_the_memory_cannot_count_is_refused():
    with refused(r"=16384: the memory counts fewer than 2\^32 tokens", attempt.UserError):
        attempt.check_settings(dataclasses.replace(FULL, num_iterations=2**14), 1)


# ---- Model and loss

BEGINS = (0, 100, 130, 300)  # of documents


def tiny_model(hp, dtype):
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


def plain_attention(p, name, x, value_embed, visible, hp):
    """Attention in a layer, with every score computed, one head after the other's kv head."""
    T, H, K = len(x), hp.num_heads, hp.head_dim
    kv_heads = hp.num_kv_heads
    qkv = x @ p[f"{name}.qkv"].flatten(0, 1).T
    q, k, v = qkv.view(T, -1, K).split([H, kv_heads, kv_heads], dim=1)
    q, k = (torch.stack([rotated(rms_norm(y_TK), hp.rope_base) for y_TK in y.unbind(1)], dim=1)
            for y in (q, k))
    mix = p[f"{name}.value_mix"]
    v = mix[0] * v
    if value_embed is not None:
        v = v + mix[1] * value_embed.view(T, kv_heads, K)
    shared = [head * kv_heads // H for head in range(H)]  # the kv head of each query head
    k, v = k[:, shared], v[:, shared]
    scores = torch.einsum("qhc,khc->hqk", q, k) * hp.attention_scale
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    y = torch.einsum("hqk,khc->qhc", weights, v).reshape(T, H * K)
    return y @ p[f"{name}.proj.weight"].T


def plain_predictions(p, tokens, window, hp, model):
    """The attempt's forward pass, written from its definitions; p has its weights in float64, and
    the model's candidates are right by test_memory.py. Returns log-probabilities [T, V]."""
    T = len(tokens)
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
            embed = {0: "1", 1: "2", 8: "0", 9: "1", 10: "2"}.get(i)
            value_embed = p[f"value_embeds.{embed}.weight"][tokens.long()] if embed else None
            x = x + plain_attention(p, f"blocks.{i}.attn", rms_norm(x), value_embed,
                                    visible["L" if i in (3, 10) else "S"], hp)
        hidden = (rms_norm(x) @ p[f"blocks.{i}.mlp.fc.weight"].T).clamp(min=0) ** 2
        x = x + hidden @ p[f"blocks.{i}.mlp.proj.weight"].T
        outputs[i] = x
    x = rms_norm(x)
    raw = x @ p["lm_head.weight"].T
    own = (23 / (1 + torch.exp(-(raw + 5) / 7.5))).log_softmax(-1)
    mixed = []
    for t in range(T):
        known = candidates.kinds[t] >= 0
        scores = p["candidate_scores"][candidates.kinds[t, known]]
        shares = torch.cat(((x[t] @ p["own_score"])[None], scores)).softmax(0)
        named = F.one_hot(candidates.tokens[t, known], len(own[t])).double()
        mixed.append((shares[0] * own[t].exp() + shares[1:] @ named).log())
    return torch.stack(mixed)


@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 2)])
def test_loss_and_gradients_are_those_of_the_plain_definition(heads, kv_heads, float64):
    """The whole model: the candidates, the skips, the shifted cap, and a target of -1."""
    hp = dataclasses.replace(TINY, num_heads=heads, num_kv_heads=kv_heads)
    model = tiny_model(hp, torch.float64)
    model.LOGITS_TOKENS = 100  # so that the logits are computed in portions
    tokens, targets = sequence(512, eots=BEGINS)
    targets[77] = -1
    loss = model(tokens, targets, torch.tensor(384))
    loss.backward()
    p = {name: x.detach().double().requires_grad_() for name, x in model.named_parameters()}
    mixed = plain_predictions(p, tokens, 384, hp, model)
    want = F.nll_loss(mixed, targets, ignore_index=-1, reduction="sum") / 512
    want.backward()
    assert float(loss.detach()) == pytest.approx(float(want.detach()), rel=1e-12)
    for name, x in model.named_parameters():
        error = (x.grad - p[name].grad).norm() / p[name].grad.norm()
        assert error < 1e-11, (name, float(error))
    logits = model.logits(model.features(tokens, torch.tensor(384)))
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
            rows[name] = type(optimizer).__name__, optimizer.peak_lr
    assert set(rows) == set(dict(model.named_parameters()))
    for name, row in rows.items():
        if "embed" in name:
            assert row == ("Adam", hp.embed_lr), name
        elif re.search(r"qkv|(proj|fc)\.weight", name):
            assert row == ("Muon", hp.muon_lr), name
        else:
            lr = hp.head_lr if name == "lm_head.weight" else hp.scalar_lr
            assert row == ("Adam", lr), name


# ---- A whole run

def test_two_processes_train_the_same_and_a_resumed_run_gives_the_same_bits(tmp_path, shards):
    flags = [
        "--preset=speedrun", "--model_dim=32", "--num_heads=2", "--head_dim=16", "--seed=1",
        "--vocab_size=257", "--train_seq_len=256", "--val_seq_len=512", "--val_tokens=1000",
        "--memory_rows=4096", "--memory_lag=300", "--micro_batches=4", "--window_end=384",
        "--num_iterations=12", "--save_every=4", "--val_loss_every=4", "--adam_eps=1e-7",
        "--dtype=float32", "--use_fp8=false", "--epochs=100", *shards]
    train(attempt, *flags, f"--records={tmp_path}/1")
    launch(*flags, f"--records={tmp_path}/2", script=ATTEMPT, ranks=2)
    assert_same_losses(tmp_path / "1", tmp_path / "2")
    assert curve(tmp_path / "1")[-1].tokens == 12 * 4 * 256
    one, two = (torch.load(newest_checkpoint(tmp_path / ranks), weights_only=True)["state"]["model"]
                for ranks in "12")
    assert torch.equal(one["memory.entries"], two["memory.entries"])
    assert (one["memory.entries"] > 0).sum() > 4000
    middle = newest_checkpoint(tmp_path / "2").with_name("step00000008.pt")
    launch(f"--resume={middle}", f"--records={tmp_path}/resumed", script=ATTEMPT, ranks=2)
    assert_same_state(tmp_path / "resumed", tmp_path / "2")
