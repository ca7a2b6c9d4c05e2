"""The record attempt: its schedules, model, loss and optimizers against plain definitions, and what
it has in common with train_gpt.py."""

import ast
import dataclasses
import importlib.util
import math
import re
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, launch, log_of, log_path, losses, write_shard
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as flex_module

ATTEMPT = ROOT / "records" / "speedrun_2026" / "train_gpt.py"
if "speedrun_2026" not in sys.modules:
    spec = importlib.util.spec_from_file_location("speedrun_2026", ATTEMPT)
    sys.modules["speedrun_2026"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["speedrun_2026"])
attempt = sys.modules["speedrun_2026"]

FULL = attempt.PRESETS["speedrun"]
CPU = torch.device("cpu")
ALONE = attempt.World(0, 1, CPU)
# All eleven layers of the attempt, made narrow.
TINY = attempt.resolve(dataclasses.replace(
    FULL, model_dim=32, num_heads=2, head_dim=16, vocab_size=257, train_seq_len=512,
    val_seq_len=512, pair_rows=500, micro_batches=2, num_iterations=12, adam_eps=1e-7, seed=1,
    dtype="float32", use_fp8=False), CPU)
TINY_FLAGS = [
    "--preset=speedrun", "--model_dim=32", "--num_heads=2", "--head_dim=16", "--vocab_size=257",
    "--train_seq_len=256", "--val_seq_len=512", "--val_tokens=1000", "--pair_rows=500",
    "--micro_batches=2", "--stages=1:1:128,2:1.52:256,3:1.73:384", "--num_iterations=12",
    "--save_every=4", "--val_loss_every=4", "--adam_eps=1e-7", "--seed=1", "--dtype=float32",
    "--use_fp8=false", "--epochs=100",
]


# ---- What it shares with train_gpt.py

def sections(path) -> dict[str, str]:
    """{title: text} of a script's sections; what comes before the first one has no title."""
    head, *parts = re.split(r"(?m)^(?=# ---- \d+\. )", path.read_text())
    titles = [re.match(r"# ---- \d+\. ([\w ]+)", part)[1].strip() for part in parts]
    return {"": head} | dict(zip(titles, parts))


def test_only_the_sections_of_the_method_differ():
    """The others are copies: a fix in train_gpt.py must be made in the attempt as well."""
    ours = sections(ATTEMPT)
    theirs = sections(ROOT / "train_gpt.py")
    assert list(ours) == list(theirs) and len(ours) > 10
    differ = {title for title in ours if ours[title] != theirs[title]}
    assert differ <= {"", "Settings", "Schedules", "Model", "Optimizers", "Training"}


def definitions(path) -> dict[str, str]:
    """{name: text} of a script's functions and classes."""
    text = path.read_text()
    return {node.name: ast.get_source_segment(text, node) for node in ast.parse(text).body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def test_only_the_definitions_of_the_method_differ():
    """Sections that differ have copies in them as well, such as the state that checkpoints save."""
    ours = definitions(ATTEMPT)
    theirs = definitions(ROOT / "train_gpt.py")
    assert set(theirs) <= set(ours)
    differ = {name for name in theirs if ours[name] != theirs[name]}
    assert differ <= {
        "Hyperparameters", "check_method",
        "batch_size", "tokens_seen", "window_tokens", "lr_scale",
        "CausalSelfAttention", "Block", "GPT",
        "build_optimizers", "Optimizer", "Adam", "MatrixOptimizer", "Muon",
        "train_step", "warm_up", "train"}


# ---- Schedules

def test_the_preset_is_the_published_schedule():
    attempt.check_settings(FULL, 8)
    attempt.check_settings(attempt.PRESETS["demo"], 4)
    thirds = [0, 428, 856]
    assert [attempt.batch_size(step, FULL) * FULL.train_seq_len for step in thirds] == [
        131072, 262144, 393216]
    assert [attempt.window_tokens(step, FULL) for step in thirds] == [384, 896, 1408]
    assert [attempt.stage(step - 1, FULL).batch for step in thirds[1:]] == [1, 2]
    assert attempt.stage(FULL.num_iterations, FULL).batch == 3
    assert attempt.tokens_seen(FULL.num_iterations, FULL) == 428 * 6 * 131072 < 339e6


@pytest.mark.parametrize("num_iterations", [0, 2, 7, 1284])
def test_tokens_seen_before_a_step_are_those_of_all_earlier_steps(num_iterations):
    hp = dataclasses.replace(FULL, num_iterations=num_iterations)
    tokens = 0
    for step in range(num_iterations + 1):
        assert attempt.tokens_seen(step, hp) == tokens
        tokens += attempt.batch_size(step, hp) * hp.train_seq_len


def test_learning_rates_fall_from_the_stage_to_the_floor():
    """m (1 - t) + 0.15 t, over the last 60 %."""
    peaks = {0: 1.0, 427: 1.0, 428: 1.52, 855: 1.52, 856: 1.73, 1284: 1.73}
    for step, m in peaks.items():
        t = max(0, (step - 0.4 * 1284) / (0.6 * 1284))
        assert attempt.lr_scale(step, FULL) == pytest.approx(m * (1 - t) + 0.15 * t)


def test_future_tokens_weigh_ever_less():
    hp = dataclasses.replace(FULL, num_iterations=1200, future_tokens=2)
    expected = {0: [0.5, 0.25], 200: [0.5, 0.125], 400: [0.5, 0], 600: [0.25, 0], 800: [0, 0],
                1200: [0, 0]}
    for step, weights in expected.items():
        assert attempt.future_weights(step, hp) == pytest.approx(weights)
    assert attempt.future_weights(5, dataclasses.replace(FULL, future_tokens=0)) == []


# ---- Data

STAGED = dataclasses.replace(FULL, train_seq_len=128, micro_batches=2, num_iterations=6,
                             vocab_size=65536, epochs=2)


def test_steps_lie_end_to_end_in_a_shard_whatever_their_size():
    shards = [attempt.Shard("a", 20 * 128 + 1, ""), attempt.Shard("b", 30 * 128, "")]
    steps = list(attempt.step_starts(shards, STAGED))[:6]
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


# ---- Settings

@pytest.mark.parametrize("changes, words", [
    (dict(stages=""), "--stages=: '' is not BATCH:LR:WINDOW, such as 2:1.52:896"),
    (dict(stages="1:1"), "--stages=1:1: '1:1' is not"),
    (dict(stages="1:1:128,"), "--stages=1:1:128,: '' is not"),
    (dict(stages="0:1:128"), "--stages=0:1:128: '0:1:128' is not"),
    (dict(stages="1:1.2.3:128"), "--stages="),
    (dict(skips="......3..."), r"--skips=\.{6}3\.{3} .*the same two or more layers"),
    (dict(skips="..........."), "at least one layer must have a skip"),
    (dict(skips="......6...."), "layer 6 cannot add the output of layer 6"),
    (dict(skips="......x...."), r"--skips=\.{6}x\.{4}"),
    (dict(late_input=11), "of which the last one is 10"),
    (dict(backout=99), "of which the last one is 10"),
    (dict(adam_every=3), "must be multiples of --adam_every=3"),
    (dict(num_iterations=1285), "must be multiples of --adam_every=2"),
    (dict(save_every=501), "must be multiples of --adam_every=2"),
    (dict(softcap_height=71.0), "--softcap_height=71.0 is not from"),
])
def test_contradictions_are_refused_in_one_line(changes, words):
    with pytest.raises(attempt.UserError, match=words) as caught:
        attempt.check_settings(dataclasses.replace(FULL, **changes), 1)
    assert "\n" not in str(caught.value)


# ---- Model and loss

def tiny_model(hp=TINY):
    """A model without weights of 0 or 1, which would hide what they are multiplied by."""
    torch.manual_seed(0)
    model = attempt.GPT(hp, attempt.block_sparse, torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape)
    return model


def sequence(seed=0, length=512, begins=(0, 100, 130, 300)):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(256, (length,), generator=generator, dtype=torch.int32)
    tokens[list(begins)] = 256
    return tokens, torch.roll(tokens, -1).long()


def plain_norm(x):
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()


def plain_attention(p, name, x, value_embed, visible, begins, key_offset, hp):
    """Attention in a layer, with every score computed, one head after the other's kv head."""
    T, H, K = len(x), hp.num_heads, hp.head_dim
    kv_heads = hp.num_kv_heads
    q, k, v = (x @ p[f"{name}.qkv.weight"].T).view(T, -1, K).split([H, kv_heads, kv_heads], dim=1)
    angle = torch.outer(torch.arange(T), hp.rope_base ** -torch.linspace(0, 1, K // 4).double())
    turn = torch.polar(torch.ones_like(angle), -angle)[:, None]
    rotated = []
    for y in (plain_norm(q), plain_norm(k)):
        turned = torch.complex(y[..., :K // 4], y[..., K // 4:K // 2]) * turn
        rotated.append(torch.cat((turned.real, turned.imag, y[..., K // 2:]), dim=-1))
    q, k = rotated
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


def plain_logits(p, tokens, window, hp):
    """The attempt's forward pass, written from its definitions; p has its weights in float64."""
    T = len(tokens)
    begins = (tokens == 256).tolist()
    signs = np.random.RandomState(0).choice([-1, 1], (8192, hp.model_dim))
    x = torch.empty(T, hp.model_dim, dtype=torch.float64)
    for t, token in enumerate(tokens.tolist()):
        before = 256 if t == 0 or begins[t] else int(tokens[t - 1])
        pair = p["pair_embed.weight"][(before * 2654435761 + token) % hp.pair_rows]
        x[t] = p["embed.weight"][token] + pair * torch.tensor(signs[(before ^ token) % 8192])
    x = plain_norm(x)
    smeared = x.clone()
    for t in range(T):
        if not begins[t]:
            smeared[t] = x[t] + p["smear"] * x[t - 1]
    x = x0 = smeared
    document = torch.tensor(begins).cumsum(0)
    query, key = torch.arange(T)[:, None], torch.arange(T)
    visible = {}
    for mark, blocks in (("L", window // 128), ("S", max(1, window // 256))):
        near = query // 128 - key // 128 < blocks
        visible[mark] = (key <= query) & near & (document[:, None] == document)
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
            x = x + plain_attention(p, f"blocks.{i}.attn", plain_norm(read), value_embed,
                                    visible["L" if long else "S"], begins, long, hp)
        hidden = (plain_norm(x) @ p[f"blocks.{i}.mlp.fc.weight"].T).clamp(min=0) ** 2
        x = x + hidden @ p[f"blocks.{i}.mlp.proj.weight"].T
        outputs[i] = x
    raw = plain_norm(x - p["backout"] * outputs[7]) @ p["lm_head.weight"].T
    return 23 / (1 + torch.exp(-(raw + 5) / 7.5))


def test_pairs_of_the_full_vocabulary_read_their_rows_with_the_same_signs_in_every_run():
    """Where tokens differ in more than their lowest 13 bits, and with signs that stay the same in
    every version of NumPy and torch."""
    hp = dataclasses.replace(TINY, vocab_size=50257)
    model = attempt.GPT(hp, attempt.block_sparse, torch.float32)
    signs = np.random.RandomState(0).randint(0, 2, (8192, hp.model_dim)) * 2 - 1
    assert model.signs[0].tolist() == [-1, 1, 1, -1, 1, 1, 1, 1, 1, 1, 1, -1, -1, 1, -1, -1, -1, -1,
                                       -1, 1, -1, 1, 1, -1, -1, 1, 1, 1, 1, -1, 1, -1]
    tokens = torch.tensor([50256, 8191, 0, 8192, 50255, 50255], dtype=torch.int32)
    x = model.embedded(tokens)
    for t, (before, token) in enumerate(zip([50256, *tokens.tolist()], tokens.tolist())):
        pair = model.pair_embed.weight[(before * 2654435761 + token) % hp.pair_rows]
        sign = torch.tensor(signs[(before ^ token) % 8192])
        assert torch.allclose(x[t], model.embed.weight[token] + sign * pair, atol=1e-6), t


@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 2)])
def test_loss_and_gradients_are_those_of_the_plain_definition(heads, kv_heads):
    """The whole model: pairs and their signs, smear, key offset, skips, late input, backout, the
    shifted cap and further tokens in the loss; token by token, those past the end and targets of -1
    left out."""
    hp = dataclasses.replace(TINY, num_heads=heads, num_kv_heads=kv_heads)
    model = tiny_model(hp)
    model.LOGITS_TOKENS = 100  # so that the logits are computed in portions
    tokens, targets = sequence()
    targets[77] = -1
    weights = [1, 0.5, 0.125]
    loss = model(tokens, targets, torch.tensor(384), tuple(map(torch.tensor, weights[1:])))
    loss.backward()
    p = {name: x.detach().double().requires_grad_() for name, x in model.named_parameters()}
    log_probabilities = plain_logits(p, tokens, 384, hp).log_softmax(-1)
    want = 0.0
    for t in range(512):
        for k, weight in enumerate(weights):
            if t + k < 512 and targets[t + k] >= 0:
                want = want - weight * log_probabilities[t, targets[t + k]] / 512
    want.backward()
    assert float(loss.detach()) == pytest.approx(float(want.detach()), rel=1e-5)
    for name, x in model.named_parameters():
        got = attempt.summed_gradient(x).double()
        error = (got - p[name].grad).norm() / p[name].grad.norm()
        assert error < 1e-4, (name, float(error))


def test_validation_counts_the_next_token_alone():
    model = tiny_model()
    tokens, targets = sequence()
    p = {name: x.detach().double() for name, x in model.named_parameters()}
    want = F.cross_entropy(plain_logits(p, tokens, 256, TINY), targets)
    got = model(tokens, targets, torch.tensor(256)).detach()
    assert float(got) == pytest.approx(float(want), rel=1e-5)


# ---- Optimizers

def test_every_parameter_has_the_optimizer_that_is_meant_for_it():
    with torch.device("meta"):
        model = attempt.GPT(dataclasses.replace(FULL, num_kv_heads=6), attempt.flex, torch.float32)
    hp = dataclasses.replace(FULL, dtype="float32")
    nowhere = attempt.World(0, 1, torch.device("meta"))
    rows = {}
    for optimizer in attempt.build_optimizers(model, hp, nowhere):
        decay = getattr(optimizer, "decay", None)
        for name in optimizer.params:
            rows[name] = (type(optimizer).__name__, optimizer.lr, optimizer.every, decay)
    assert set(rows) == set(dict(model.named_parameters()))
    for name, row in rows.items():
        if "embed" in name:
            assert row == ("Adam", hp.embed_lr, 2, 0.025), name
        elif re.search(r"(qkv|proj|fc)\.weight", name):
            assert row == ("Muon", hp.muon_lr, 1, None), name
        else:
            lr = hp.head_lr if name == "lm_head.weight" else hp.scalar_lr
            assert row == ("Adam", lr, 2, 0.0), name


def stepped(optimizer, step=0):
    with torch.no_grad():
        optimizer.begin()
        optimizer.update(step)
        optimizer.finish(step)


@pytest.mark.parametrize("kind", ["Adam", "Muon"])
def test_decay_acts_where_the_update_shrinks_the_weight(kind, monkeypatch):
    monkeypatch.setattr(attempt, "lr_scale", lambda step, hp: 0.5)
    torch.manual_seed(0)
    hp = dataclasses.replace(TINY, adam_every=1)
    starts = [torch.randn(8, 4), torch.randn(8, 4)]
    gradients = [torch.randn(8, 4), torch.randn(8, 4)]
    ends = {}
    for decays in (False, True):
        params = {}
        for i, (start, gradient) in enumerate(zip(starts, gradients)):
            params[str(i)] = torch.nn.Parameter(start.clone())
            params[str(i)].grad = gradient.clone()
        if kind == "Adam":
            factor = 0.025 * 0.3**2
            stepped(attempt.Adam(params, 0.6, hp, ALONE, decay=0.025 if decays else 0.0))
        else:
            factor = 1.2 * 0.3**2
            changed = dataclasses.replace(hp, muon_decay=1.2 if decays else 0.0)
            stepped(attempt.Muon(params, 0.6, changed, ALONE))
        ends[decays] = [p.detach() for p in params.values()]
    for start, without, with_decay in zip(starts, ends[False], ends[True]):
        want = without.clone()
        for i in range(8):
            for j in range(4):
                if (start[i, j] - without[i, j]) * start[i, j] > 0:
                    want[i, j] -= factor * start[i, j]
        assert not torch.allclose(want, without, atol=1e-4)
        torch.testing.assert_close(with_decay, want, rtol=1e-5, atol=1e-6)


def test_normuon_evens_the_rows_and_keeps_the_norm():
    """Three steps of Muon on two stacks of three matrices, each against loops over rows."""
    torch.manual_seed(0)
    hp = dataclasses.replace(TINY, muon_beta2=0.9)
    params = {str(i): torch.nn.Parameter(torch.randn(24, 12)) for i in range(2)}
    for p in params.values():
        p.parts = 3
    optimizer = attempt.Muon(params, 0.1, hp, ALONE)
    momentum = torch.zeros(2, 24, 12)
    squares = torch.zeros(2, 24, dtype=torch.float64)
    for step in range(3):
        gradients = torch.randn(2, 24, 12) * torch.linspace(0.1, 3, 24)[:, None]
        got = optimizer.direction(gradients, step)
        beta = attempt.muon_momentum(step, hp)
        momentum = beta * momentum + (1 - beta) * gradients
        ahead = beta * momentum + (1 - beta) * gradients
        for i in range(2):
            update = torch.cat([attempt.newton_schulz(part[None])[0]
                                for part in ahead[i].split(8)]).double()
            norm = update.norm()
            for row in range(24):
                squares[i, row] = 0.9 * squares[i, row] + 0.1 * update[row].square().mean()
                update[row] /= squares[i, row].sqrt()
            update *= norm / update.norm()
            torch.testing.assert_close(got[i].double(), update, rtol=1e-3, atol=1e-4)
        rows = got.norm(dim=-1)
        assert rows.max() / rows.min() < 2.5


def test_adam_steps_on_the_sum_of_two_steps_gradients():
    """Against torch.optim.Adam, which gets the sum. Muon takes part in every step, and no gradient
    of its matrices is left over for the next one."""
    hp = dataclasses.replace(TINY, cooldown_frac=0.0, embed_decay=0.0, stages="1:1:256",
                             num_iterations=10, future_tokens=0)
    model = tiny_model(hp)
    optimizers = attempt.build_optimizers(model, hp, ALONE)
    lrs = {name: o.lr for o in optimizers if o.every == 2 for name in o.params}
    twin = tiny_model(hp)  # follows the model, to take each step's gradients without a step
    reference = {name: torch.nn.Parameter(model.get_parameter(name).detach().clone())
                 for name in lrs}
    adam = torch.optim.Adam([dict(params=[reference[name]], lr=lr) for name, lr in lrs.items()],
                            betas=(hp.adam_beta1, hp.adam_beta2), eps=hp.adam_eps, fused=True)
    summed = {name: torch.zeros_like(p) for name, p in reference.items()}
    for step in range(4):
        batches = [sequence(seed=10 * step + i) for i in range(2)]
        twin.load_state_dict(model.state_dict())
        twin.zero_grad()
        for batch in batches:
            (twin(*batch, torch.tensor(256)) / 2).backward()
        for name in summed:
            gradient = twin.get_parameter(name).grad
            assert gradient.is_sparse == ("embed" in name), name
            summed[name] += gradient.to_dense()
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


# ---- Compiled

@pytest.fixture
def compiler(monkeypatch):
    """A backend for torch.compile that collects the graphs. FlexAttention refuses gradients on CPU
    tensors, which stand for CUDA's here."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *args: None)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
    backend.graphs = graphs
    torch._dynamo.reset()
    yield backend
    torch._dynamo.reset()


def number_of(graph, name):
    return sum(name in str(node.target) for module in graph.modules()
               if isinstance(module, torch.fx.GraphModule) for node in module.graph.nodes)


# Every kind of layer, in fewer of them, which take less time to compile.
FEW_LAYERS = dict(windows="SLSS", attention="xx.x", value_embeds="0..0", skips="..1.",
                  late_input=2, backout=1)


def test_the_step_is_one_graph_in_every_stage(compiler):
    """At full width and length, in bfloat16 with the FP8 head."""
    hp = dataclasses.replace(FULL, num_kv_heads=FULL.num_heads, dtype="bfloat16", **FEW_LAYERS)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = attempt.GPT(hp, attempt.flex, torch.bfloat16)
        model.loss = torch.compile(model.loss, backend=compiler, fullgraph=True, dynamic=False)
        for step in (0, 428, 1283):
            tokens = torch.zeros(hp.train_seq_len, dtype=torch.int32)
            loss = model(tokens, tokens.long(), attempt.window_tensor(step, hp, ALONE),
                         attempt.future_tensors(step, hp, ALONE))
            loss.backward()
        assert len(compiler.graphs) == 1 and loss.dtype == torch.float32
        for name, p in model.named_parameters():
            assert p.grad is not None and p.grad.dtype == p.dtype, name
        model.eval()
        with torch.no_grad():
            tokens = torch.zeros(hp.val_seq_len, dtype=torch.int32)
            model(tokens, tokens.long(), attempt.window_tensor(1284, hp, ALONE))
    training, validation = compiler.graphs
    for graph, products in ((training, 3), (validation, 0)):
        assert number_of(graph, "flex_attention") == 3
        assert number_of(graph, "_scaled_mm") == products  # of the FP8 head


def dense(mask, scale):
    """Attention that torch.compile takes whole on a CPU, in place of FlexAttention."""
    def attend(q, k, v):
        position = torch.arange(q.size(2))
        seen = mask.mask_mod(0, 0, position[:, None], position[None, :])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    return attend


def test_nothing_recompiles_after_the_warmup(compiler, monkeypatch):
    """The model and what the optimizers compile on CUDA, through all stages of a run."""
    monkeypatch.setattr(attempt, "compiled", lambda function, device: torch.compile(
        function, dynamic=False, fullgraph=True, backend=compiler))
    hp = dataclasses.replace(TINY, train_seq_len=256, num_iterations=6, dtype="bfloat16",
                             stages="1:1:128,2:1.52:256,3:1.73:384", **FEW_LAYERS)
    model = attempt.GPT(hp, dense, torch.bfloat16)
    model.loss = torch.compile(model.loss, dynamic=False, fullgraph=True, backend=compiler)
    optimizers = attempt.build_optimizers(model, hp, ALONE)
    attempt.warm_up(model, optimizers, dataclasses.replace(hp, val_tokens=512), ALONE)
    warmed = len(compiler.graphs)
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in range(6):
            batches = [sequence(seed=step, length=256, begins=(0, 100))
                       for _ in range(attempt.batch_size(step, hp))]
            loss = attempt.train_step(model, batches, optimizers, step, hp, ALONE)
            assert loss.isfinite()
    # Training and validation; four shapes of matrices, in Newton-Schulz, NorMuon and the decay; and
    # two shapes of embeddings, in the decay.
    assert len(compiler.graphs) == warmed == 2 + 3 * 4 + 2


# ---- Whole runs

def newest(folder) -> tuple:
    """The newest checkpoint in a records folder, by its path and its contents."""
    path = attempt.checkpoints_of(log_path(folder))[0]
    return path, torch.load(path, weights_only=True)


def test_two_processes_train_the_same_and_a_resumed_run_gives_the_same_bits(tmp_path, shards):
    flags = [*TINY_FLAGS, *shards]
    launch(*flags, f"--records={tmp_path}/1", script=ATTEMPT)
    launch(*flags, f"--records={tmp_path}/2", script=ATTEMPT, ranks=2)
    logs = [log_of(tmp_path / "1"), log_of(tmp_path / "2")]
    for kind in ("train_loss", "val_loss"):
        assert losses(logs[1], kind) == pytest.approx(losses(logs[0], kind), abs=0.003)
        assert losses(logs[0], kind)[-1] < math.log(320) - 1
    tokens = 4 * (2 + 4 + 6) * 256
    assert "step:12/12 train_loss:" in logs[0] and f"tokens:{tokens} lr:" in logs[0]
    # From step 8 on, the first one of the third stage, once more.
    last, whole = newest(tmp_path / "2")
    last.unlink()
    launch(f"--resume={log_path(tmp_path / '2')}", script=ATTEMPT, ranks=2)
    assert "\nresumed: step 8 at" in log_of(tmp_path / "2")
    again, resumed = newest(tmp_path / "2")
    assert again == last
    assert sorted(whole["optimizers"]) == ["mean", "mean_square", "momentum", "row_squares"]
    for name, group in [("model", whole["model"]), *whole["optimizers"].items()]:
        others = resumed["model"] if name == "model" else resumed["optimizers"][name]
        assert set(group) == set(others)
        for parameter, tensor in group.items():
            assert torch.equal(tensor, others[parameter]), (name, parameter)
    # Both would move the stages, and with them the place in the data.
    for change in ("--num_iterations=14", "--stages=1:1:128"):
        done = launch(f"--resume={log_path(tmp_path / '2')}", change, script=ATTEMPT, check=False)
        assert done.returncode == 2 and "but must stay" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_run_that_would_save_between_adams_steps_is_refused(tmp_path, shards):
    done = launch(*TINY_FLAGS, *shards, "--save_every=3", f"--records={tmp_path}", script=ATTEMPT,
                  check=False)
    assert done.returncode == 2 and "must be multiples of --adam_every=2" in done.stderr
    assert not list(tmp_path.iterdir())
