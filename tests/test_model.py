"""The model against the same model written plainly, and the precision of its parts."""

import dataclasses
import math
import pytest
import torch
from test_masks_attention import dense_mask
from train_gpt import BLOCK, GPT, PRESETS, Embedding, Rotary, World, draw_weights

pytestmark = pytest.mark.quick
HP = dataclasses.replace(
    PRESETS["demo"], windows="LSSL", value_embeds="0..0", attention="xx.x", model_dim=32,
    num_heads=4, num_kv_heads=4, head_dim=16, attention_scale=0.12, train_seq_len=256,
    val_seq_len=512, vocab_size=257, use_fp8=False, dtype="float32")
ALONE = World(0, 1, torch.device("cpu"))
WINDOW = torch.tensor(256)

def tiny_model(seed=0, randomize=True, dtype=torch.float32, **changes):
    hp = dataclasses.replace(HP, dtype=str(dtype).removeprefix("torch."), **changes)
    model = GPT(hp, dtype, flex=False)
    draw_weights(model, seed)
    if randomize:  # zero-initialized matrices would hide what comes before them
        torch.manual_seed(seed)
        for p in model.parameters():
            if not p.any():
                torch.nn.init.normal_(p, std=0.05)
    return model, hp

def sequence(length=256, seed=0, eots=(0, 100, 130)):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(256, (length,), generator=generator, dtype=torch.int32)
    tokens[list(eots)] = 256
    return tokens, torch.roll(tokens, -1).long()

def rms_norm(x):
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()

def rotated(x_TK, base):
    """Rotates the first half of the channels: pairs of them are complex numbers."""
    T, K = x_TK.shape
    quarter = K // 4
    frequencies = [base ** (-i / (quarter - 1)) for i in range(quarter)]
    angles = torch.tensor([[-t * f for f in frequencies] for t in range(T)], dtype=torch.float64)
    a, b, content = x_TK.split((quarter, quarter, 2 * quarter), dim=1)
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag, content), dim=1)

def plain_attention(p, prefix, x_TD, embedded, seen, hp):
    """Attention of one layer, head by head. p has the parameters by their names."""
    K, groups = hp.head_dim, hp.num_heads // hp.num_kv_heads
    heads = x_TD @ p[f"{prefix}.qkv"].flatten(0, 1).T
    heads = list(heads.split(K, dim=1))
    queries, keys = heads[:hp.num_heads], heads[hp.num_heads:-hp.num_kv_heads]
    values = heads[-hp.num_kv_heads:]
    mix = p[f"{prefix}.value_mix"]
    outputs = []
    for head, query in enumerate(queries):
        shared = head // groups  # query heads 0 and 1 share the kv head 0, and so on
        value = mix[0] * values[shared]
        if embedded is not None:
            value = value + mix[1] * embedded[:, shared * K:(shared + 1) * K]
        q = rotated(rms_norm(query), hp.rope_base)
        k = rotated(rms_norm(keys[shared]), hp.rope_base)
        scores = (q @ k.T * hp.attention_scale).masked_fill(~seen, -math.inf)
        weights = (scores - scores.amax(1, keepdim=True)).exp()
        outputs.append(weights / weights.sum(1, keepdim=True) @ value)
    return torch.cat(outputs, dim=1) @ p[f"{prefix}.proj.weight"].T

def plain_loss(p, tokens, targets, window, hp):
    long = window // BLOCK
    blocks = {"L": long, "S": max(1, long // 2)}
    layers = len(hp.windows)
    x = x0 = rms_norm(p["embed.weight"][tokens])
    outputs = []
    for i in range(layers):
        if i >= layers / 2:
            x = x + p["skip_weights"][i - layers // 2] * outputs[layers - 1 - i]
        mix = p[f"layers.{i}.residual_mix"]
        x = mix[0] * x + mix[1] * x0
        if hp.attention[i] == "x":
            mark = hp.value_embeds[i]
            embedded = None if mark == "." else p[f"value_tables.{mark}.weight"][tokens]
            seen = dense_mask(tokens, blocks[hp.windows[i]], hp.vocab_size - 1)
            x = x + plain_attention(p, f"layers.{i}.attn", rms_norm(x), embedded, seen, hp)
        hidden = rms_norm(x) @ p[f"layers.{i}.mlp.fc.weight"].T
        x = x + hidden.clamp(min=0) ** 2 @ p[f"layers.{i}.mlp.proj.weight"].T
        outputs.append(x)
    c = hp.lm_head_softcap
    logits = c + c * torch.tanh(rms_norm(x) @ p["lm_head.weight"].T / c)
    total = 0
    for row, target in zip(logits, targets.tolist()):
        if target >= 0:
            total = total + torch.logsumexp(row, 0) - row[target]
    return total

@pytest.mark.parametrize("window", [128, 256, 384, 1024])
@pytest.mark.parametrize("changes", [
    dict(windows="LSSLSL", attention="xx.xxx", value_embeds="01..01", num_kv_heads=2),
    dict(windows="SLLS", attention="xxxx", value_embeds="0.10", num_kv_heads=1),
    dict(windows="LS", attention="..", value_embeds="..")], ids=lambda changes: changes["windows"])
def test_the_model_equals_its_definition_in_float64(changes, window, monkeypatch):
    # What the script keeps in float32 whatever the dtype is in float64 here.
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    hp = dataclasses.replace(HP, lm_head_softcap=2.0, train_seq_len=512, **changes)
    model = GPT(hp, torch.float64, flex=False).double()
    monkeypatch.setattr(model, "LOGITS_TOKENS", 200)  # the logits exist in three portions
    torch.manual_seed(window)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (0.2 if p.ndim > 1 else 0.5))
    tokens, targets = sequence(512, eots=(0, 1, 100, 128, 250, 255))
    targets[[7, 300, 511]] = -1
    params = dict(model.named_parameters())
    loss = model(tokens, targets, torch.tensor(window))
    want = plain_loss(params, tokens, targets, window, hp)
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, want, rtol=1e-13, atol=0)
    gradients = torch.autograd.grad(loss, list(params.values()))
    wanted = torch.autograd.grad(want, list(params.values()))
    for name, got, want in zip(params, gradients, wanted):
        assert want.any(), name
        error = float((got - want).norm() / want.norm())
        assert error < 1e-11, (name, error)

def test_rotary_is_exact_at_256k():
    rotary = Rotary(8, 262144, 1024.0)
    angle = (262143 / 1024**1.0) % (2 * math.pi)
    assert float(rotary.cos[-1, 0, 1]) == pytest.approx(math.cos(angle), abs=1e-6)

def test_the_bfloat16_model_is_close_to_float32():
    exact, _ = tiny_model()
    rounded, _ = tiny_model(dtype=torch.bfloat16)
    rounded.load_state_dict(exact.state_dict())
    x = rounded.features(sequence()[0], WINDOW)
    assert x.dtype == torch.bfloat16 and rounded.logits(x).dtype == torch.float32
    want, got = (model(*sequence(), WINDOW).item() / 256 for model in (exact, rounded))
    assert got == pytest.approx(want, abs=0.03)

def test_the_gradient_of_an_embedding_is_summed_in_float32():
    """In bfloat16 a sum of equal gradients would stop at 256 of them."""
    embed = Embedding(4, 8, torch.bfloat16)
    embed(torch.ones(1000, dtype=torch.int32)).sum().backward()
    assert embed.weight.grad.dtype == torch.bfloat16
    assert embed.weight.grad[:2].tolist() == [[0] * 8, [1000] * 8]
