"""The FP8 linear on the CPU's reference kernels, at small sizes."""

import pytest
import torch
import torch.nn.functional as F
from test_model import sequence, tiny_model

from train_gpt import PRESETS, CastedLinear, fp8_linear, to_fp8

SCALES = (2.0, 2.0**9, 2.0**19)  # the speedrun's, for a mean loss over 48K tokens


def operands(T=32, D=48, V=64):
    generator = torch.Generator().manual_seed(0)
    x = F.rms_norm(torch.randn(T, D, generator=generator), (D,)).bfloat16()
    w = torch.randn(V, D, generator=generator) * 0.05
    g = (torch.randn(T, V, generator=generator) * 1e-6).bfloat16()
    return x, w, g


def relative_error(got, want):
    return float((got.float() - want.float()).norm() / want.float().norm())


def test_forward_and_gradients_are_close_to_float32():
    x, w, g = operands()
    x8, w8 = x.clone().requires_grad_(), w.clone().requires_grad_()
    fp8_linear(x8, w8, *SCALES)[0].backward(g)
    x32, w32 = x.float().requires_grad_(), w.clone().requires_grad_()
    y = F.linear(x32, w32)
    y.backward(g.float())
    got = fp8_linear(x, w, *SCALES)[0]
    assert got.dtype == torch.bfloat16 and x8.grad.dtype == torch.bfloat16 and w8.grad.dtype == torch.float32
    assert w8.grad.is_contiguous()
    # Rounding to 3 bits of mantissa costs at most 2^-4 an element, to 2 bits 2^-3; sums average it out.
    assert 0.001 < relative_error(got, y.detach()) < 0.06
    assert 0.001 < relative_error(x8.grad, x32.grad) < 0.12
    assert 0.001 < relative_error(w8.grad, w32.grad) < 0.12


def test_exact_where_values_are_representable():
    x = torch.randint(-4, 5, (16, 16)).bfloat16()
    w = torch.randint(-4, 5, (32, 16)).float() / 512
    y, x8, w8 = fp8_linear(x, w, *SCALES)
    torch.testing.assert_close(y.float(), x.float() @ w.T, rtol=0, atol=0)
    assert x8.dtype == w8.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("dtype, limit", [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)])
def test_casts_saturate_and_stay_finite(dtype, limit):
    x = torch.tensor([1e9, -1e9, 3e38, limit, 1.0])
    assert to_fp8(x, 1.0, dtype).float().tolist() == [limit, -limit, limit, limit, 1.0]
    assert to_fp8(torch.tensor([float("nan")]), 1.0, dtype).float().isnan().all()  # a broken run must stay visible


def test_scales_fit_a_mean_loss_over_the_training_sequence():
    """Neither saturation nor flush-to-zero at the values that the speedrun's head meets."""
    T, V, D = PRESETS["speedrun"].train_seq_len, 2048, 768
    hp = PRESETS["speedrun"]
    assert (hp.fp8_x_scale, hp.fp8_w_scale, hp.fp8_grad_scale) == SCALES
    x = F.rms_norm(torch.randn(64, D), (D,))
    spike = torch.zeros(1, D)
    spike[0, 0] = D**0.5  # the largest value that a normed row can have
    for rows in (x, spike):
        assert float((rows * hp.fp8_x_scale).abs().max()) <= 448
    # A token that is wrong for sure has a gradient of -1/T; the others p/T. Head gradients of a fresh and a trained model.
    for peak in (0.0, 12.0):
        logits = torch.randn(64, V, requires_grad=True)
        with torch.no_grad():
            logits[:, 0] += peak
        (F.cross_entropy(logits, torch.randint(V, (64,)), reduction="sum") / T).backward()
        g8 = to_fp8(logits.grad, hp.fp8_grad_scale, torch.float8_e5m2).float()
        assert float(g8.abs().max()) < 57344 / 16
        flushed = logits.grad.abs().where(g8 == 0, 0).sum() / logits.grad.abs().sum()
        assert float(flushed) < 0.01, "share of the gradient's mass that is flushed to zero"
    # With the scale of another loss convention (a sum over tokens has x448) the same check fails.
    assert float((logits.grad * T * hp.fp8_grad_scale).abs().max()) > 57344
    assert 0.8 < 448 / hp.fp8_w_scale < 0.9  # the largest weight that does not saturate


def test_plain_outside_training_and_without_fp8():
    x, _, _ = operands(V=32)
    layer = CastedLinear(48, 32, True, *SCALES)
    plain = F.linear(x, layer.weight.bfloat16())
    assert not torch.equal(layer(x), plain)
    torch.testing.assert_close(layer.eval()(x), plain, rtol=0, atol=0)
    assert CastedLinear(48, 32)(x).dtype == torch.bfloat16


def test_a_whole_training_step_of_the_model():
    """Loss and gradients of a tiny model with the FP8 head against the same model without it."""
    plain, hp = tiny_model(dtype=torch.bfloat16)
    with_fp8, _ = tiny_model(dtype=torch.bfloat16, use_fp8=True, fp8_grad_scale=2.0**12)
    assert with_fp8.lm_head.use_fp8 and not plain.lm_head.use_fp8
    tokens, targets = (t[:128] for t in sequence())
    window = torch.tensor(128)
    a, b = plain(tokens, targets, window), with_fp8(tokens, targets, window)
    assert a.item() != b.item() and a.item() == pytest.approx(b.item(), abs=0.02)
    a.backward()
    b.backward()
    mixing = ("residual_mix", "value_mix", "skip_weights")  # each number's gradient is a sum that may cancel: judged together
    together = [torch.cat([getattr(model, name).grad.flatten() for name in mixing]) for model in (with_fp8, plain)]
    assert relative_error(*together) < 0.25
    for (name, p), q in zip(plain.named_parameters(), with_fp8.parameters()):
        assert name in mixing or relative_error(q.grad, p.grad) < 0.1, name


def test_traces_into_one_graph_with_the_right_shapes():
    x, w, _ = operands()
    layer = CastedLinear(48, 64, True, *SCALES)
    torch.library.opcheck(fp8_linear, (x, w.requires_grad_(), *SCALES),
                          test_utils=("test_autograd_registration", "test_faketensor"))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    y = compiled(x)
    y.sum().backward()
    torch.testing.assert_close(y, layer(x))
    assert layer.weight.grad.shape == (64, 48)
