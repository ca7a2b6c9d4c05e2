"""The model's parts against their definitions."""

import dataclasses
import math
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import ENVIRONMENT, ROOT

from train_gpt import (GPT, PRESETS, Adam, CastedLinear, Muon, Rotary, UserError, World,
                       block_sparse, build_block_masks, build_optimizers, draw_weights, norm,
                       warm_up)

HP = dataclasses.replace(
    PRESETS["demo"], windows="LSSL", value_embeds="0..0", attention="xx.x", model_dim=32,
    num_heads=4, head_dim=16, attention_scale=0.12, smear=True, key_offset=True,
    pair_rows=500, train_seq_len=256, val_seq_len=512, vocab_size=257, use_fp8=False,
    dtype="float32")
ALONE = World(0, 1, torch.device("cpu"))


def tiny_model(seed=0, randomize=True, dtype=torch.float32, **changes):
    hp = dataclasses.replace(HP, dtype=str(dtype).removeprefix("torch."), **changes)
    hp = dataclasses.replace(hp, num_kv_heads=hp.num_kv_heads or hp.num_heads)
    model = GPT(hp, block_sparse, dtype)
    draw_weights(model, seed)
    if randomize:  # zero-initialized matrices would hide what comes before them
        for p in model.parameters():
            if not p.any():
                torch.nn.init.normal_(p, std=0.05)
    return model, hp


def features(model, tokens, window):
    """What the model hands to its loss: the normed stream after the last layer."""
    with mock.patch.object(model, "mean_loss", lambda x_TD, targets_T: x_TD):
        return model(tokens, None, window)


def sequence(length=256, seed=0, eots=(0, 100, 130)):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(256, (length,), generator=generator, dtype=torch.int32)
    tokens[list(eots)] = 256
    return tokens, torch.roll(tokens, -1).long()


WINDOW = torch.tensor(256)


def test_an_untrained_model_is_exactly_uniform_over_the_padded_vocabulary():
    model, _ = tiny_model(randomize=False)
    assert model(*sequence(), WINDOW).item() == pytest.approx(math.log(320), abs=1e-5)
    assert len(model.lm_head.weight) == 320 == len(model.embed.weight)


def test_the_speedruns_vocabulary_is_padded_to_50304():
    hp = dataclasses.replace(PRESETS["speedrun"], num_kv_heads=6)
    with torch.device("meta"):
        model = GPT(hp, block_sparse, torch.bfloat16)
    assert model.lm_head.weight.shape == (50304, 768)
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    assert sum(p.numel() for p in matrices) == (11 * 4 + 12 * 8) * 768**2
    assert len(model.value_embeds) == 3 and model.embed.weight.dtype == torch.bfloat16
    assert model.lm_head.weight.dtype == model.blocks[0].mlp.fc.weight.dtype == torch.float32


def test_initial_weights():
    model, _ = tiny_model(randomize=False, model_dim=256)
    for block in model.blocks:
        assert not block.mlp.proj.weight.any()
        assert float(block.mlp.fc.weight.detach().std()) == pytest.approx(0.5 / 16, rel=0.02)
        assert block.residual_mix.tolist() == [1, 0]
        if block.attn is not None:
            assert not block.attn.proj.weight.any()
            assert block.attn.value_mix.tolist() == [0.5, 0.5]
    assert not model.lm_head.weight.any()
    assert float(model.embed.weight.detach().std()) == pytest.approx(1, rel=0.02)
    assert model.skip_weights.tolist() == [1, 1]


def drawn(seed=3, **changes):
    """The initial weights of a tiny model, by name."""
    return tiny_model(seed, randomize=False, **changes)[0].state_dict()


def test_a_layer_more_or_less_leaves_the_initial_weights_of_all_others_as_they_were():
    """So that runs of two scripts can be compared in pairs of equal seeds."""
    base = drawn()
    random = {name for name, p in base.items() if p.is_floating_point() and p.std() > 0.01}
    assert {"embed.weight", "blocks.3.mlp.fc.weight", "blocks.0.attn.qkv.weight"} <= random
    for changes in (dict(windows="LSSLS", attention="xx.xx", value_embeds="0..0."),
                    dict(windows="LSS", attention="xx.", value_embeds="0.."),
                    dict(attention="xxxx"), dict(value_embeds="01.0"), dict(pair_rows=0)):
        other = drawn(**changes)
        shared = {name for name in random & set(other) if base[name].shape == other[name].shape}
        assert "embed.weight" in shared and len(shared) >= len(random) - 3
        assert all(torch.equal(base[name], other[name]) for name in shared), changes
    assert not torch.equal(base["embed.weight"], drawn(seed=4)["embed.weight"])
    fc = [base[f"blocks.{layer}.mlp.fc.weight"] for layer in range(4)]
    assert not any(torch.equal(fc[0], weight) for weight in fc[1:]), "layers begin alike"


def test_initial_weights_depend_neither_on_the_process_nor_on_the_random_state():
    code = ("from test_model import tiny_model\nimport hashlib, torch\ntorch.rand(hash('a') % 99)\n"
            "weights = tiny_model(7, randomize=False)[0].state_dict().values()\n"
            "print(hashlib.sha256(b''.join(w.numpy().tobytes() for w in weights)).hexdigest())")
    hashes = set()
    for seed in ("1", "2"):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                              cwd=ROOT / "tests", timeout=200, check=True,
                              env=ENVIRONMENT | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)})
        hashes.add(done.stdout)
    assert len(hashes) == 1 and len(hashes.pop()) == 65


@pytest.mark.parametrize("cap", [15.0, 30.0])
def test_logits_are_softcapped(cap):
    model, _ = tiny_model(lm_head_softcap=cap)
    x = torch.randn(8, 32) * 1000
    raw = F.linear(x, model.lm_head.weight)
    assert float(raw.detach().abs().max()) > 2 * cap
    got = model.logits(x)
    torch.testing.assert_close(got, cap + cap * torch.tanh(raw / cap))
    assert got.dtype == torch.float32
    assert 0 <= float(got.detach().min()) and float(got.detach().max()) <= 2 * cap
    small = torch.randn(4, 32) * 0.01
    uncapped = F.linear(small, model.lm_head.weight)
    torch.testing.assert_close(model.logits(small) - cap, uncapped, rtol=1e-2, atol=1e-4)


def test_the_loss_is_the_mean_cross_entropy_and_ignores_padding():
    model, _ = tiny_model()
    tokens, targets = sequence()
    logits = model.logits(features(model, tokens, WINDOW))
    want = F.cross_entropy(logits, targets)
    torch.testing.assert_close(model(tokens, targets, WINDOW), want)
    model.LOGITS_TOKENS = 100  # so that the logits are computed in three portions
    torch.testing.assert_close(model(tokens, targets, WINDOW), want)
    padded = targets.clone()
    padded[128:] = -1
    kept = F.cross_entropy(logits[:128], targets[:128], reduction="sum")
    torch.testing.assert_close(model(tokens, padded, WINDOW) * 256, kept)


def test_no_token_sees_the_future_or_another_document():
    model, _ = tiny_model()
    tokens, _ = sequence(eots=(0, 100, 130))
    embedded = model.embed.weight[tokens.long()].detach().requires_grad_()
    model.embed.forward = lambda _: embedded
    features(model, tokens, torch.tensor(512))[120].sum().backward()
    touched = embedded.grad.abs().sum(1).nonzero().flatten()
    assert touched.min() == 100 and touched.max() == 120 and len(touched) == 21


def test_what_came_before_in_the_document_and_nothing_else_changes_a_token():
    model, _ = tiny_model(model_dim=64)
    tokens, _ = sequence(eots=(0, 100, 130))
    expected = features(model, tokens, torch.tensor(512))
    for changed, last in ((99, 99), (110, 129), (129, 129)):
        other = tokens.clone()
        other[changed] = (other[changed] + 1) % 256
        differs = (features(model, other, torch.tensor(512)) != expected).any(1)
        assert differs.nonzero().flatten().tolist() == list(range(changed, last + 1))


def test_pairs_of_tokens_and_the_token_before_are_in_the_embedding():
    model, hp = tiny_model()
    tokens = torch.tensor([256, 5, 6, 256, 6, 5, 6], dtype=torch.int32)
    pairs = ((256, 256), (256, 5), (5, 6), (256, 256), (256, 6), (6, 5), (5, 6))
    rows = [(before * 2654435761 + token) % hp.pair_rows for before, token in pairs]
    x = norm(model.embed(tokens) + model.pair_embed(torch.tensor(rows)))
    nothing = torch.zeros(32)  # is what comes before a document
    before = torch.stack([nothing, x[0], x[1], nothing, *x[3:6]])
    begins = tokens == 256
    torch.testing.assert_close(model.embedded(tokens, begins), x + model.smear * before)
    plain, _ = tiny_model(smear=False, pair_rows=0)
    torch.testing.assert_close(plain.embedded(tokens, begins), norm(plain.embed(tokens)))
    assert not {"smear", "pair_embed.weight"} & set(plain.state_dict())


def test_half_of_each_key_is_the_token_befores():
    """The rotated half and the queries and values stay as they are; nothing comes before a
    document."""
    tokens, _ = sequence(eots=(0, 100, 130))
    seen = {}
    for offset in (False, True):
        model, _ = tiny_model(key_offset=offset)
        model.attend_under = lambda mask, scale: lambda *qkv: seen.setdefault(offset, qkv)[0]
        features(model, tokens, WINDOW)
    (q, k, v), (offset_q, offset_k, offset_v) = seen[False], seen[True]
    want = k.clone()
    want[:, :, 1:, 8:] = k[:, :, :-1, 8:]
    want[:, :, [0, 100, 130], 8:] = 0
    torch.testing.assert_close(offset_k, want)
    torch.testing.assert_close((offset_q, offset_v), (q, v))


def test_rotary_rotates_half_of_the_channels_by_relative_angles():
    rotary = Rotary(16, 100, 1024.0)
    q, k = (norm(torch.randn(1, 1, 16)).expand(100, 1, 16) for _ in range(2))
    rotated_q, rotated_k = rotary(q), rotary(k)
    torch.testing.assert_close(rotated_q[..., 8:], q[..., 8:])
    torch.testing.assert_close(rotated_q.norm(dim=-1), q.norm(dim=-1))
    scores = rotated_q[:, 0] @ rotated_k[:, 0].T
    for distance in (1, 7, 50):  # a score depends on the distance alone
        along = scores.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(scores[10, 0], scores[50, 0])
    assert rotary(q[:30]).shape == (30, 1, 16)
    frequencies = torch.tensor([1, 1024 ** (-1 / 3), 1024 ** (-2 / 3), 1 / 1024])
    turns = torch.polar(torch.ones(100, 4), -torch.arange(100)[:, None] * frequencies)
    pairs = torch.complex(q[:, 0, :4], q[:, 0, 4:8]) * turns
    want = torch.cat((pairs.real, pairs.imag), dim=1)
    torch.testing.assert_close(rotated_q[:, 0, :8], want, rtol=1e-4, atol=1e-4)


def test_rotary_is_exact_at_256k():
    rotary = Rotary(8, 262144, 1024.0)
    angle = (262143 / 1024**1.0) % (2 * math.pi)
    assert float(rotary.cos[-1, 0, 1]) == pytest.approx(math.cos(angle), abs=1e-6)


def test_rotary_rounds_once_in_bfloat16():
    """If cos and sin were rounded as well, or the two terms of the sum, the error would be
    0.0023."""
    rotary = Rotary(16, 5000, 1024.0)
    x = torch.randn(5000, 2, 16).bfloat16().requires_grad_()
    dy = torch.randn(5000, 2, 16).bfloat16()
    exact = x.detach().float().requires_grad_()
    y, want = rotary(x), rotary(exact)
    gradient, = torch.autograd.grad(y, x, dy)
    exact_gradient, = torch.autograd.grad(want, exact, dy.float())
    for a, b in ((y.detach(), want.detach()), (gradient, exact_gradient)):
        assert float((a.float() - b)[..., :8].norm() / b[..., :8].norm()) < 0.002


@pytest.mark.parametrize("pattern", ["012210", "01..01", "......"])
def test_value_embeddings_follow_the_pattern(pattern):
    model, _ = tiny_model(windows="LSSSSL", value_embeds=pattern, attention="xxxxxx")
    tokens, _ = sequence()
    marks = sorted(set(pattern) - {"."})
    assert list(model.value_embeds) == marks
    seen = []
    for block in model.blocks:
        block.attn.register_forward_pre_hook(lambda attn, args: seen.append(args[1]))
    features(model, tokens, WINDOW)
    for mark, value_embed in zip(pattern, seen, strict=True):
        if mark == ".":
            assert value_embed is None
        else:
            assert torch.equal(value_embed, model.value_embeds[mark].weight[tokens])


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_the_forward_pass_equals_its_definition_written_plainly(kv_heads):
    """The whole forward pass again, dense and one head at a time. With fewer kv heads, each is
    repeated for the query heads that share it."""
    model, hp = tiny_model(num_kv_heads=kv_heads)
    with torch.no_grad():
        for block in model.blocks:
            block.residual_mix += torch.rand(2)
            if block.attn is not None:
                block.attn.value_mix += torch.rand(2)
        model.skip_weights += torch.rand(2)
    tokens, _ = sequence()
    T, position = len(tokens), torch.arange(256)
    document = (tokens == 256).cumsum(0)

    def attend(layer, i, x):
        blocks = 2 if hp.windows[i] == "L" else 1
        seen = ((document[:, None] == document) & (position <= position[:, None])
                & (position[:, None] // 128 - position // 128 < blocks))
        rows = layer.qkv.weight.split((64, 16 * kv_heads, 16 * kv_heads))
        q, k, v = (F.linear(x, w).view(T, -1, 16) for w in rows)
        v = layer.value_mix[0] * v
        if hp.value_embeds[i] != ".":
            embedded = model.value_embeds[hp.value_embeds[i]](tokens)
            v = v + layer.value_mix[1] * embedded.view(T, kv_heads, 16)
        q, k = layer.rotary(norm(q)), layer.rotary(norm(k))
        k_before = torch.where((tokens == 256)[:, None, None], 0, k.roll(1, 0))
        k = torch.cat([k[:, :, :8], k_before[:, :, 8:]], dim=2)
        heads = []
        for h in range(4):
            shared = h * kv_heads // 4
            scores = torch.where(seen, q[:, h] @ k[:, shared].T * 0.12, -torch.inf)
            heads.append(scores.softmax(-1) @ v[:, shared])
        return F.linear(torch.cat(heads, dim=1), layer.proj.weight)

    x = x0 = model.embedded(tokens, tokens == 256)
    outputs = []
    for i, block in enumerate(model.blocks):
        if i >= 2:
            x = x + model.skip_weights[i - 2] * outputs[3 - i]
        x = block.residual_mix[0] * x + block.residual_mix[1] * x0
        if hp.attention[i] == "x":
            x = x + attend(block.attn, i, norm(x))
        hidden = F.relu(F.linear(norm(x), block.mlp.fc.weight)) ** 2
        x = x + F.linear(hidden, block.mlp.proj.weight)
        outputs.append(x)
    got = features(model, tokens, torch.tensor(256))
    torch.testing.assert_close(got, norm(x), rtol=1e-4, atol=1e-5)


def test_with_shared_kv_heads_muon_takes_q_apart_into_matrices_as_high_as_k_and_v():
    model, hp = tiny_model(num_kv_heads=2)
    assert model.blocks[0].attn.qkv.weight.shape == ((4 + 2 + 2) * 16, 32)
    assert model.value_embeds["0"].weight.shape == (320, 2 * 16)
    optimizers = build_optimizers(model, hp, ALONE)
    qkv, = (o for o in optimizers if "blocks.0.attn.qkv.weight" in o.params)
    assert qkv.parts == 4  # Q in two parts of two heads, K and V of two heads each
    equal = tiny_model()[0].blocks[0].attn.qkv.weight
    assert equal.parts == 3


def test_every_parameter_gets_a_gradient_and_one_optimizer():
    model, hp = tiny_model()
    optimizers = build_optimizers(model, hp, ALONE)
    in_muon = [name for row in optimizers if isinstance(row, Muon) for name in row.params]
    assert len(in_muon) == 3 * 2 + 4 * 2
    assert set(in_muon) == {name for name, p in model.blocks.named_parameters("blocks")
                            if p.ndim == 2}
    assert sorted(name for row in optimizers for name in row.params) == sorted(
        name for name, _ in model.named_parameters())
    model(*sequence(), WINDOW).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_a_vector_or_a_number_that_no_row_names_is_trained_by_adam():
    """The last row takes them, with scalar_lr; a parameter without dimensions is no trouble."""
    model, hp = tiny_model()
    model.gains = torch.nn.Parameter(torch.ones(7))
    model.temperature = torch.nn.Parameter(torch.tensor(1.0))
    optimizers = build_optimizers(model, hp, ALONE)
    last = optimizers[-1]
    assert type(last) is Adam and last.lr == hp.scalar_lr
    assert {"gains", "temperature", "smear", "skip_weights"} <= set(last.params)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with torch.no_grad():
        last.begin()
        last.update(0)
        last.finish(0)
    for p in (model.gains, model.temperature):
        torch.testing.assert_close(p.detach(), torch.ones_like(p) - hp.scalar_lr)


def test_a_matrix_that_no_row_names_is_an_error_that_names_it():
    model, hp = tiny_model()
    model.gate = CastedLinear(32, 4)
    with pytest.raises(UserError, match="build_optimizers") as caught:
        build_optimizers(model, hp, ALONE)
    assert "gate.weight" in str(caught.value) and "\n" not in str(caught.value)


def test_the_first_row_that_fits_takes_a_parameter():
    model, hp = tiny_model()
    model.value_embeds["7"] = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict()})
    model.value_embeds["7"]["mlp"]["fc"] = CastedLinear(32, 128)  # which looks like Muon's
    optimizers = build_optimizers(model, hp, ALONE)
    taking = [o for o in optimizers if "value_embeds.7.mlp.fc.weight" in o.params]
    assert len(taking) == 1 and type(taking[0]) is Adam and taking[0].lr == hp.embed_lr


@pytest.mark.parametrize("name", ["gains", "embed.weight", "blocks.0.mlp.fc.weight"])
def test_a_parameter_in_another_precision_is_an_error(name):
    model, hp = tiny_model()
    model.gains = torch.nn.Parameter(torch.ones(7))
    owner, _, attribute = name.rpartition(".")
    parameter = torch.nn.Parameter(model.get_parameter(name).detach().double())
    setattr(model.get_submodule(owner), attribute, parameter)
    with pytest.raises(UserError, match="float64") as caught:
        build_optimizers(model, hp, ALONE)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_parameter_that_no_gradient_reaches_is_named():
    model, hp = tiny_model()
    model.value_embeds["7"] = torch.nn.Embedding(320, 64)  # which no layer mixes in
    optimizers = build_optimizers(model, hp, ALONE)
    with pytest.raises(UserError, match=r"gradient.* value_embeds\.7\.weight") as caught:
        warm_up(model, optimizers, hp, ALONE)
    assert "\n" not in str(caught.value)


def test_an_odd_number_of_layers_has_a_middle_without_a_skip():
    model, _ = tiny_model(windows="LSSSL", value_embeds="0...0", attention="xxxxx")
    assert len(model.skip_weights) == 2
    model(*sequence(), WINDOW).backward()
    assert model.skip_weights.grad.all()


def test_the_bfloat16_model_is_close_to_float32():
    exact, _ = tiny_model()
    rounded, _ = tiny_model(dtype=torch.bfloat16)
    rounded.load_state_dict(exact.state_dict())
    x = features(rounded, sequence()[0], WINDOW)
    assert x.dtype == torch.bfloat16
    want = exact(*sequence(), WINDOW).item()
    assert rounded(*sequence(), WINDOW).item() == pytest.approx(want, abs=0.03)


def test_a_vector_that_is_not_cast_is_caught_and_a_number_is_not():
    """A float32 vector would turn the stream to float32 in silence, at a large part of the
    speed."""
    class Scaled(torch.nn.Module):
        def __init__(self, mlp, scale):
            super().__init__()
            self.mlp = mlp
            self.scale = torch.nn.Parameter(scale)

        def forward(self, x_TD):
            return self.scale * self.mlp(x_TD)

    for scale, caught in ((torch.ones(32), True), (torch.tensor(1.0), False)):
        model, _ = tiny_model(dtype=torch.bfloat16)
        model.blocks[1].mlp = Scaled(model.blocks[1].mlp, scale)
        if caught:
            with pytest.raises(AssertionError, match="type_as"):
                model(*sequence(), WINDOW)
        else:
            assert model(*sequence(), WINDOW).isfinite()

    model, _ = tiny_model(dtype=torch.bfloat16)
    embedded = model.embedded
    model.embedded = lambda *args: embedded(*args).float()  # before the first layer
    with pytest.raises(AssertionError, match="type_as"):
        model(*sequence(), WINDOW)


def test_casted_linear_casts_its_weight():
    layer = CastedLinear(8, 4)
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    torch.testing.assert_close(layer(x), x @ layer.weight.bfloat16().T)
    assert layer.weight.dtype == torch.float32 and layer.bias is None


def test_the_models_masks_are_long_and_short():
    masks = build_block_masks(sequence(1024, eots=(0,))[0], 256, torch.tensor(512))
    counts = [int((m.kv_num_blocks + m.full_kv_num_blocks).max()) for m in masks]
    assert counts == [4, 2]
