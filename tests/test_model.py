"""The model's parts against their definitions."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from train_gpt import (GPT, PRESETS, CastedLinear, Rotary, ValueEmbedding, block_sparse, build_block_masks, generate, norm,
                       optimizer_groups, train_flops)

HP = dataclasses.replace(PRESETS["demo"], windows="LSSL", value_embeds="0..0", attention="xx.x", model_dim=32, num_heads=4,
                         num_kv_heads=4, head_dim=16, attention_scale=0.12, smear=True, key_offset=True, pair_rows=500,
                         train_seq_len=256, val_seq_len=512, vocab_size=257, use_fp8=False)


def tiny_model(seed=0, randomize=True, dtype=torch.float32, **changes):
    torch.manual_seed(seed)
    hp = dataclasses.replace(HP, **changes)
    model = GPT(hp, block_sparse, dtype)
    if randomize:  # zero-initialized matrices would hide what comes before them
        for p in model.parameters():
            if not p.any():
                torch.nn.init.normal_(p, std=0.05)
    return model, hp


def sequence(length=256, seed=0, eots=(0, 100, 130)):
    tokens = torch.randint(256, (length,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    tokens[list(eots)] = 256
    return tokens, torch.roll(tokens, -1).long()


WINDOW = torch.tensor(256)


def test_untrained_model_is_exactly_uniform_over_the_padded_vocabulary():
    model, _ = tiny_model(randomize=False)
    assert model(*sequence(), WINDOW).item() == pytest.approx(math.log(320), abs=1e-5)
    assert len(model.lm_head.weight) == 320 == len(model.embed.weight)


def test_speedrun_vocabulary_is_padded_to_50304():
    with torch.device("meta"):
        model = GPT(dataclasses.replace(PRESETS["speedrun"], num_kv_heads=6), block_sparse, torch.bfloat16)
    assert model.lm_head.weight.shape == (50304, 768)
    assert sum(p.numel() for p in model.blocks.parameters()) == (11 * 4 + 12 * 8) * 768**2
    assert len(model.value_embed.tables) == 3 and model.embed.weight.dtype == torch.bfloat16
    assert model.lm_head.weight.dtype == model.blocks[0].mlp.fc.weight.dtype == torch.float32


def test_initial_weights():
    model, _ = tiny_model(randomize=False, model_dim=256)
    for block in model.blocks:
        assert not block.mlp.proj.weight.any() and (block.attn is None or not block.attn.proj.weight.any())
        assert float(block.mlp.fc.weight.detach().std()) == pytest.approx(0.5 / 16, rel=0.02)
    assert float(model.embed.weight.detach().std()) == pytest.approx(1, rel=0.02)
    assert model.residual_mix.tolist() == [[1, 0]] * 4 and model.value_mix.tolist() == [[0.5, 0.5]] * 4
    assert model.skip_weights.tolist() == [1, 1]


@pytest.mark.parametrize("cap", [15.0, 30.0])
def test_logits_are_softcapped(cap):
    model, _ = tiny_model(lm_head_softcap=cap)
    x = torch.randn(8, 32) * 1000
    raw = F.linear(x, model.lm_head.weight)
    assert float(raw.detach().abs().max()) > 2 * cap
    got = model.logits(x)
    torch.testing.assert_close(got, cap + cap * torch.tanh(raw / cap))
    assert got.dtype == torch.float32 and 0 <= float(got.detach().min()) and float(got.detach().max()) <= 2 * cap
    small = torch.randn(4, 32) * 0.01
    torch.testing.assert_close(model.logits(small) - cap, F.linear(small, model.lm_head.weight), rtol=1e-2, atol=1e-4)


def test_loss_is_the_mean_cross_entropy_and_ignores_padding():
    model, _ = tiny_model()
    tokens, targets = sequence()
    want = F.cross_entropy(model.logits(model.features(tokens, WINDOW)), targets)
    torch.testing.assert_close(model(tokens, targets, WINDOW), want)
    model.LOGITS_TOKENS = 100  # in portions
    torch.testing.assert_close(model(tokens, targets, WINDOW), want)
    padded = targets.clone()
    padded[128:] = -1
    kept = F.cross_entropy(model.logits(model.features(tokens, WINDOW))[:128], targets[:128], reduction="sum")
    torch.testing.assert_close(model(tokens, padded, WINDOW) * 256, kept)


def test_no_token_sees_the_future_or_another_document():
    model, _ = tiny_model()
    tokens, _ = sequence(eots=(0, 100, 130))
    embedded = model.embed.weight[tokens.long()].detach().requires_grad_()
    model.embed.forward = lambda _: embedded
    model.features(tokens, torch.tensor(512))[120].sum().backward()
    touched = embedded.grad.abs().sum(1).nonzero().flatten()
    assert touched.min() == 100 and touched.max() == 120 and len(touched) == 21


def test_what_came_before_in_the_document_and_nothing_else_changes_a_token():
    model, _ = tiny_model(model_dim=64)
    tokens, _ = sequence(eots=(0, 100, 130))
    expected = model.features(tokens, torch.tensor(512))
    for changed, last in ((99, 99), (110, 129), (129, 129)):
        other = tokens.clone()
        other[changed] = (other[changed] + 1) % 256
        differs = (model.features(other, torch.tensor(512)) != expected).any(1).nonzero().flatten()
        assert differs.tolist() == list(range(changed, last + 1))


def test_pairs_of_tokens_and_the_token_before_are_in_the_embedding():
    model, hp = tiny_model()
    tokens = torch.tensor([256, 5, 6, 256, 6, 5, 6], dtype=torch.int32)
    rows = [(b * 2654435761 + t) % hp.pair_rows for b, t in ((256, 256), (256, 5), (5, 6), (256, 256), (256, 6), (6, 5), (5, 6))]
    x = norm(model.embed(tokens) + model.pair_embed(torch.tensor(rows)))
    before = torch.stack([torch.zeros(32), x[0], x[1], torch.zeros(32), *x[3:6]])  # nothing comes before a document
    begins = tokens == 256
    torch.testing.assert_close(model.embedded(tokens, begins), x + model.smear * before)
    plain, _ = tiny_model(smear=False, pair_rows=0)
    torch.testing.assert_close(plain.embedded(tokens, begins), norm(plain.embed(tokens)))
    assert not {"smear", "pair_embed.weight"} & set(plain.state_dict())


def test_half_of_each_key_is_the_token_befores():
    """The rotated half and the queries and values stay; nothing comes before a document."""
    tokens, _ = sequence(eots=(0, 100, 130))
    seen = {}
    for offset in (False, True):
        model, _ = tiny_model(key_offset=offset)
        model.attend = lambda mask, scale: lambda *qkv: seen.setdefault(offset, qkv)[0]
        model.features(tokens, WINDOW)
    (q, k, v), (offset_q, offset_k, offset_v) = seen[False], seen[True]
    want = k.clone()
    want[:, :, 1:, 8:] = k[:, :, :-1, 8:]
    want[:, :, [0, 100, 130], 8:] = 0
    torch.testing.assert_close(offset_k, want)
    torch.testing.assert_close((offset_q, offset_v), (q, v))


def test_rotary_turns_half_of_the_channels_by_relative_angles():
    rotary = Rotary(16, 100, 1024.0)
    q, k = torch.randn(1, 1, 16).expand(100, 1, 16), torch.randn(1, 1, 16).expand(100, 1, 16)
    turned_q, turned_k = rotary(q), rotary(k)
    torch.testing.assert_close(turned_q[..., 8:], q[..., 8:])
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm(dim=-1))
    scores = turned_q[:, 0] @ turned_k[:, 0].T
    for distance in (1, 7, 50):  # a score depends on the distance alone
        along = scores.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(scores[10, 0], scores[50, 0])
    assert rotary(q[:30]).shape == (30, 1, 16)
    frequencies = torch.tensor([1, 1024 ** (-1 / 3), 1024 ** (-2 / 3), 1 / 1024])
    pairs = torch.complex(q[:, 0, :4], q[:, 0, 4:8]) * torch.polar(torch.ones(100, 4), -torch.arange(100)[:, None] * frequencies)
    torch.testing.assert_close(turned_q[:, 0, :8], torch.cat((pairs.real, pairs.imag), dim=1), rtol=1e-4, atol=1e-4)


def test_rotary_is_exact_at_256k():
    rotary = Rotary(8, 262144, 1024.0)
    angle = (262143 / 1024**1.0) % (2 * math.pi)
    assert float(rotary.cos[-1, 0, 0, 0, 1]) == pytest.approx(math.cos(angle), abs=1e-6)


def test_rotary_rounds_once_in_bfloat16():
    """A second rounding, of cos and sin or of the two terms of a gradient, makes it 0.0023."""
    rotary = Rotary(16, 5000, 1024.0)
    x, dy = torch.randn(5000, 2, 16).bfloat16().requires_grad_(), torch.randn(5000, 2, 16).bfloat16()
    exact = x.detach().float().requires_grad_()
    y, want = rotary(x), rotary(exact)
    for a, b in ((y.detach(), want.detach()), (*torch.autograd.grad(y, x, dy), *torch.autograd.grad(want, exact, dy.float()))):
        assert float((a.float() - b)[..., :8].norm() / b[..., :8].norm()) < 0.002


def test_value_embeddings_follow_the_pattern():
    tokens = torch.arange(5)
    mirrored = ValueEmbedding("012345543210", 7, 3)
    out = mirrored(tokens)
    assert len(mirrored.tables) == 6 and len(out) == 12
    for i in range(12):
        torch.testing.assert_close(out[i], mirrored.tables[str(min(i, 11 - i))].weight[tokens])
    sparse = ValueEmbedding("012......012", 7, 3)
    assert [v is None for v in sparse(tokens)] == [False] * 3 + [True] * 6 + [False] * 3 and len(sparse.tables) == 3
    assert len(ValueEmbedding("....", 7, 3).tables) == 0


def test_forward_equals_the_definition_written_plainly():
    """The whole forward pass again, dense and one head at a time."""
    model, hp = tiny_model()
    with torch.no_grad():
        model.residual_mix += torch.rand(4, 2)
        model.value_mix += torch.rand(4, 2)
        model.skip_weights += torch.rand(2)
    tokens, _ = sequence()
    T, position = len(tokens), torch.arange(256)
    document = (tokens == 256).cumsum(0)

    def attend(layer, i, x):
        blocks = 2 if hp.windows[i] == "L" else 1
        seen = ((document[:, None] == document) & (position <= position[:, None])
                & (position[:, None] // 128 - position // 128 < blocks))
        q, k, v = (F.linear(x, w).view(T, 4, 16) for w in layer.qkv.weight.split(64))
        v = model.value_mix[i, 0] * v
        if hp.value_embeds[i] != ".":
            v = v + model.value_mix[i, 1] * model.value_embed.tables[hp.value_embeds[i]](tokens).view(T, 4, 16)
        q, k = model.rotary(norm(q)), model.rotary(norm(k))
        k = torch.cat([k[:, :, :8], torch.where((tokens == 256)[:, None, None], 0, k.roll(1, 0))[:, :, 8:]], dim=2)
        heads = [torch.where(seen, q[:, h] @ k[:, h].T * 0.12, -torch.inf).softmax(-1) @ v[:, h] for h in range(4)]
        return F.linear(torch.cat(heads, dim=1), layer.proj.weight)

    x = x0 = model.embedded(tokens, tokens == 256)
    outputs = []
    for i, block in enumerate(model.blocks):
        if i >= 2:
            x = x + model.skip_weights[i - 2] * outputs[3 - i]
        x = model.residual_mix[i, 0] * x + model.residual_mix[i, 1] * x0
        if hp.attention[i] == "x":
            x = x + attend(block.attn, i, norm(x))
        x = x + F.linear(F.relu(F.linear(norm(x), block.mlp.fc.weight)) ** 2, block.mlp.proj.weight)
        outputs.append(x)
    torch.testing.assert_close(model.features(tokens, torch.tensor(256)), norm(x), rtol=1e-4, atol=1e-5)


def test_grouped_query_attention_equals_repeated_key_heads():
    """With key and value rows repeated, full attention is the same function, and its gradients sum over the group."""
    grouped, _ = tiny_model(num_kv_heads=2)
    full, _ = tiny_model(num_kv_heads=4)
    state = grouped.state_dict()
    for name, tensor in state.items():
        if name.endswith("qkv.weight"):
            q, k, v = tensor.split((64, 32, 32))
            state[name] = torch.cat([q, *(x.view(2, 16, -1).repeat_interleave(2, 0).flatten(0, 1) for x in (k, v))])
        if "value_embed" in name:
            state[name] = tensor.view(-1, 2, 16).repeat_interleave(2, 1).flatten(1)
    full.load_state_dict(state)
    a, b = grouped(*sequence(), WINDOW), full(*sequence(), WINDOW)
    torch.testing.assert_close(a, b)
    a.backward()
    b.backward()
    k, repeated = grouped.blocks[0].attn.qkv.weight.grad[64:96], full.blocks[0].attn.qkv.weight.grad[64:128]
    torch.testing.assert_close(k, repeated.view(2, 2, 16, -1).sum(1).flatten(0, 1), rtol=1e-4, atol=1e-6)
    assert len(optimizer_groups(grouped, grouped.hp)[0]) == 3 * 2 + 4 * 2


def test_every_parameter_gets_a_gradient_and_one_optimizer():
    model, hp = tiny_model()
    optimizer_groups(model, hp)
    model(*sequence(), WINDOW).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    model.extra = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(AssertionError, match="no group"):
        optimizer_groups(model, hp)


def test_odd_number_of_layers_has_a_middle_without_skip():
    model, _ = tiny_model(windows="LSSSL", value_embeds="0...0", attention="xxxxx")
    assert len(model.skip_weights) == 2
    model(*sequence(), WINDOW).backward()
    assert model.skip_weights.grad.all()


def test_bfloat16_model_is_close_to_float32():
    exact, _ = tiny_model()
    rounded, _ = tiny_model(dtype=torch.bfloat16)
    rounded.load_state_dict(exact.state_dict())
    x = rounded.features(sequence()[0], WINDOW)
    assert x.dtype == torch.bfloat16
    assert rounded(*sequence(), WINDOW).item() == pytest.approx(exact(*sequence(), WINDOW).item(), abs=0.03)


def test_casted_linear_casts_its_weight():
    layer = CastedLinear(8, 4)
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    torch.testing.assert_close(layer(x), x @ layer.weight.bfloat16().T)
    assert layer.weight.dtype == torch.float32 and layer.bias is None


def test_generate_is_the_models_own_distribution():
    model, hp = tiny_model()
    seed = lambda: torch.Generator().manual_seed(3)  # noqa: E731
    a, b = (generate(model, [256], 40, 256, generator=seed()) for _ in range(2))
    assert a == b and a[0] == 256 and max(a[1:]) <= 256 and model.training and model.attend is block_sparse
    greedy = generate(model, [256, 5], 3, 256, temperature=0.0)
    tokens = torch.tensor(greedy[:-1] + [7] * (128 - len(greedy) + 1), dtype=torch.int32)  # what follows has no influence
    assert greedy[-1] == int(model.logits(model.features(tokens, WINDOW))[len(greedy) - 2][:257].argmax())
    short = generate(model, [1] * 511, 3, 256, generator=seed())  # the prefix outgrows the longest sequence
    assert len(short) == 514 or short[-1] == 256


def test_masks_of_the_model_are_long_and_short():
    masks = build_block_masks(sequence(1024, eots=(0,))[0], 256, torch.tensor(512))
    counts = [int((m.kv_num_blocks + m.full_kv_num_blocks).max()) for m in masks]
    assert counts == [4, 2]


def test_flops_of_the_speedrun_are_those_worked_out_by_hand():
    hp = dataclasses.replace(PRESETS["speedrun"], num_kv_heads=6, window_end=128)  # one block: a token sees (1 + ... + 128) / 128
    with torch.device("meta"):
        model = GPT(hp, block_sparse, torch.bfloat16)
    in_blocks, in_head = train_flops(model, hp)
    assert in_head == 6 * 50304 * 768
    assert in_blocks == pytest.approx(6 * (11 * 4 + 12 * 8) * 768**2 + 12 * 768 * 11 * 64.5)
    grown, _ = train_flops(model, dataclasses.replace(hp, window_end=1792))
    assert 40e6 < grown - 6 * (11 * 4 + 12 * 8) * 768**2 < 60e6  # 44 MFLOP with document borders, over the schedule
