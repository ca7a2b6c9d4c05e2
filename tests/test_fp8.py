"""The head: the FP8 linear on the CPU's reference kernels, at small sizes, and the loss."""

import dataclasses
import pytest
import torch
import torch.nn.functional as F
from test_model import sequence, tiny_model
from train_gpt import (BLOCK, GPT, INPUT_SCALE, PRESETS, TOKEN_GRADIENT_SCALE, WEIGHT_SCALE,
                       CastedLinear, CrossEntropy, FP8Linear, to_e4m3)

pytestmark = pytest.mark.quick

def operands(T=32, D=48, V=64):
    generator = torch.Generator().manual_seed(0)
    x = F.rms_norm(torch.randn(T, D, generator=generator), (D,)).bfloat16()
    w = torch.randn(V, D, generator=generator) * 0.05
    g = (torch.randn(T, V, generator=generator) * 1e-6).bfloat16()
    return x, w, g

def relative_error(got, want):
    got, want = got.detach().float(), want.detach().float()
    return float((got - want).norm() / want.norm())

@pytest.mark.parametrize("small", [False, True])
def test_forward_and_gradients_are_close_to_float32(small):
    """Also gradients that e5m2 has, which reaches down to 2^-16, and e4m3 has not (2^-9)."""
    x, w, g = operands()
    if small:
        g.fill_(2.0**-14 / 2**19)
    x8, w8 = x.clone().requires_grad_(), w.clone().requires_grad_()
    got = FP8Linear.apply(x8, w8, 2.0**19)
    got.backward(g)
    x32, w32 = x.float().requires_grad_(), w.clone().requires_grad_()
    y = F.linear(x32, w32)
    y.backward(g.float())
    assert got.dtype == x8.grad.dtype == torch.bfloat16 and w8.grad.dtype == torch.float32
    assert w8.grad.is_contiguous()
    # Rounding to 3 bits of mantissa is wrong by at most 2^-4 of a value, to 2 bits by 2^-3; in sums
    # much of that cancels.
    assert 0.001 < relative_error(got, y.detach()) < 0.06
    assert 0.001 < relative_error(x8.grad, x32.grad) < 0.12
    assert 0.001 < relative_error(w8.grad, w32.grad) < 0.12

def test_casts_saturate_and_stay_finite():
    x = torch.tensor([1e9, -1e9, 3e38, 224.0, 1.0])
    assert to_e4m3(x, 2.0).float().tolist() == [448, -448, 448, 448, 2]
    broken = torch.tensor([float("nan")])
    assert to_e4m3(broken, 1.0).float().isnan().all()  # a broken run must stay visible

def test_scales_fit_the_losses_of_a_training_step():
    hp = PRESETS["speedrun"]
    tokens, V, D = hp.tokens_per_step, 2048, 768
    with torch.device("meta"):
        # Validation is short because the table of angles would be large.
        head = GPT(dataclasses.replace(hp, val_seq_len=BLOCK), torch.bfloat16, flex=True).lm_head
    # The record's, for a mean over the 48K tokens of a micro-batch
    assert (INPUT_SCALE, WEIGHT_SCALE) == (2, 2**9)
    assert TOKEN_GRADIENT_SCALE * hp.train_seq_len == 2**19
    assert head.gradient_scale == 2**19 * hp.micro_batches
    assert D**0.5 * INPUT_SCALE <= 448  # a normed row has no larger value
    assert 0.8 < 448 / WEIGHT_SCALE < 0.9  # the largest weight that does not saturate
    # A token that is wrong for sure has a gradient of -1 / tokens; the others p / tokens. Head
    # gradients of a fresh and a trained model.
    for peak in (0.0, 12.0):
        logits = torch.randn(64, V)
        logits[:, 0] += peak
        logits.requires_grad_()
        (CrossEntropy.apply(logits, torch.randint(V, (64,))) / tokens).backward()
        g8 = (logits.grad * head.gradient_scale).to(torch.float8_e5m2).float()
        assert float(g8.abs().max()) < 12  # it was at most 10.7 before it was rounded
        flushed = logits.grad.abs().where(g8 == 0, 0).sum() / logits.grad.abs().sum()
        assert float(flushed) < 0.01, "too large a part of the gradient is flushed to zero"
    # The gradient of a sum over tokens, in place of their mean, would saturate.
    assert float((logits.grad * tokens * head.gradient_scale).abs().max()) > 57344

def test_plain_outside_training_and_without_fp8():
    x, w, _ = operands(V=32)
    layer = CastedLinear(48, 32, gradient_scale=2.0**19)
    layer.weight = torch.nn.Parameter(w)
    plain = F.linear(x, w.bfloat16())
    assert not torch.equal(layer(x), plain)
    torch.testing.assert_close(layer.eval()(x), plain, rtol=0, atol=0)
    layer.gradient_scale = None
    torch.testing.assert_close(layer.train()(x), plain, rtol=0, atol=0)

def test_a_whole_training_step_of_the_model():
    models = [tiny_model(dtype=torch.bfloat16, use_fp8=use_fp8)[0] for use_fp8 in (False, True)]
    tokens, targets = (t[:128] for t in sequence())
    losses = [model(tokens, targets, torch.tensor(128)) / 128 for model in models]
    assert losses[0] != losses[1] and losses[0].item() == pytest.approx(losses[1].item(), abs=0.002)
    plain, with_fp8 = (torch.autograd.grad(loss, list(model.parameters()))
                       for loss, model in zip(losses, models))
    names = [name for name, _ in models[0].named_parameters()]
    mixing = [i for i, name in enumerate(names) if name.endswith(("_mix", "skip_weights"))]
    # Each of these is a sum in which most cancels, so they are compared as one vector.
    together = [torch.cat([found[i].flatten() for i in mixing]) for found in (with_fp8, plain)]
    assert len(mixing) == 4 + 3 + 1 and relative_error(*together) < 0.25
    for i, name in enumerate(names):
        assert i in mixing or relative_error(with_fp8[i], plain[i]) < 0.1, name

@pytest.mark.parametrize("dtype, vocabulary, tolerance", [
    (torch.float64, 500, 1e-13), (torch.float32, 500, 1e-5), (torch.float32, 65536, 1e-5)])
@pytest.mark.parametrize("largest", [1.0, 76.0])
def test_the_loss_and_its_gradient_are_those_of_torch(dtype, vocabulary, tolerance, largest,
                                                      monkeypatch):
    """Also at the largest logits that a softcap of 38 lets through, and for targets of -1."""
    if dtype == torch.float64:
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    generator = torch.Generator().manual_seed(0)
    values = largest * torch.rand(40, vocabulary, dtype=dtype, generator=generator)
    values[0], values[1], values[2, 1:] = 0, largest, largest
    target = torch.randint(vocabulary, (40,), generator=generator)
    target[[2, 3, 39]] = torch.tensor([0, -1, -1])
    ours, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
    got = CrossEntropy.apply(ours, target)
    want = F.cross_entropy(theirs, target, ignore_index=-1, reduction="sum")
    torch.testing.assert_close(got, want, rtol=tolerance, atol=0)
    for loss in (got, want):
        (loss / 7).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=tolerance)
    assert not ours.grad[[3, 39]].any() and ours.grad[2].any()
    assert CrossEntropy.apply(values, torch.full((40,), -1)) == 0
