"""What only a CUDA GPU can show: `./run.sh test -m gpu`, some minutes on one GPU. Skipped elsewhere."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, losses
from test_fp8 import relative_error
from test_training import log_of

from train_gpt import GPT, PRESETS, block_sparse, build_block_masks, flex, fp8_linear, run, to_fp8

pytestmark = pytest.mark.gpu
SCALES = (2.0, 2.0**9, 2.0**19)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


def tokens_with_documents(T, spacing):
    tokens = torch.zeros(T, dtype=torch.int32, device="cuda")
    tokens[::spacing] = 9
    return tokens


@pytest.mark.parametrize("T, spacing, window, heads, kv_heads", [
    (2048, 10**6, 256, 6, 6), (2048, 77, 1024, 6, 2), (4096, 1000, 128, 6, 6), (49152, 900, 1792, 6, 6), (49152, 900, 896, 6, 2),
    (262144, 5000, 1792, 1, 1)])
def test_compiled_flex_attention_equals_the_block_sparse_path(T, spacing, window, heads, kv_heads):
    """Long and short masks, forward and gradients, in bfloat16 against the plain path in float32."""
    tokens = tokens_with_documents(T, spacing)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dy = (torch.randn(1, h, T, 128, device="cuda", dtype=torch.bfloat16, generator=generator, requires_grad=True)
                   for h in (heads, kv_heads, kv_heads, heads))

    @torch.compile(dynamic=False, fullgraph=True)
    def compiled(tokens, q, k, v, window):
        return [flex(mask, 0.12)(q, k, v) for mask in build_block_masks(tokens, 9, window)]

    got = compiled(tokens, q, k, v, torch.tensor(window, device="cuda", dtype=torch.int32))
    for i, mask in enumerate(build_block_masks(tokens, 9, torch.tensor(window, device="cuda"))):
        q32, k32, v32 = (x.detach().float().requires_grad_() for x in (q, k, v))
        want = block_sparse(mask, 0.12)(q32, k32, v32)
        assert relative_error(got[i], want.detach()) < 0.01
        got_grads = torch.autograd.grad(got[i], (q, k, v), dy, retain_graph=True)
        for a, b in zip(got_grads, torch.autograd.grad(want, (q32, k32, v32), dy.float())):
            assert relative_error(a, b) < 0.02


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs FP8 matrix units")
def test_fp8_head_at_full_size_is_close_to_bf16(capsys):
    T, D, V = 49152, 768, 50304
    generator = torch.Generator("cuda").manual_seed(0)
    x = F.rms_norm(torch.randn(T, D, device="cuda", generator=generator), (D,)).bfloat16().requires_grad_()
    w = (torch.randn(V, D, device="cuda", generator=generator) * 0.05).requires_grad_()
    targets = torch.randint(V, (T,), device="cuda", generator=generator)

    def loss(y):
        return F.cross_entropy(30 * torch.sigmoid(y.float() / 7.5), targets)

    plain = F.linear(x, w.bfloat16())
    plain.retain_grad()
    a, gx, gw, gy = (t.detach() for t in (loss(plain), *torch.autograd.grad(loss(plain), (x, w, plain))))
    b = loss(torch.compile(lambda x, w: fp8_linear(x, w, *SCALES)[0], fullgraph=True)(x, w))
    hx, hw = torch.autograd.grad(b, (x, w))
    g8 = to_fp8(gy, SCALES[2], torch.float8_e5m2).float().abs()
    flushed = gy.float().abs().where(g8 == 0, 0).sum() / gy.float().abs().sum()
    saturated = (g8 == 57344).float().mean()
    with capsys.disabled():
        print(f"\nFP8 head: loss {b.item():.5f} against {a.item():.5f}; relative error of the gradients {relative_error(hx, gx):.4f} (x), "
              f"{relative_error(hw, gw):.4f} (w); gradient mass flushed to zero {100 * flushed:.3f} %, saturated {100 * saturated:.5f} %")
    assert b.item() == pytest.approx(a.item(), abs=0.01)
    assert relative_error(hx, gx) < 0.12 and relative_error(hw, gw) < 0.12 and flushed < 0.01 and saturated == 0


def test_a_training_step_on_gpu_equals_the_cpu(tmp_path, shards):
    """Ten steps through the whole script: compiled, FlexAttention, bfloat16 against the CPU's float32."""
    settings = [*TINY, *shards, "--num_iterations=10", "--val_loss_every=5", "--val_tokens=0", "--use_fp8=false"]
    run([*settings, "--dtype=bfloat16", f"--records={tmp_path}/gpu"])
    gpu = log_of(tmp_path / "gpu")
    assert "\ngpus: " in gpu
    torch.compiler.set_stance("default")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        run([*settings, f"--records={tmp_path}/cpu"])
    cpu = log_of(tmp_path / "cpu")
    assert losses(gpu) == pytest.approx(losses(cpu), abs=0.05)
    assert losses(gpu, "train_loss") == pytest.approx(losses(cpu, "train_loss"), abs=0.08)


def test_twenty_full_size_steps_without_a_recompile_or_a_wait_for_data(tmp_path):
    """The speedrun preset on random tokens: the stance makes a recompile an error; data must not stall the step."""
    from conftest import write_shard
    hp = PRESETS["speedrun"]
    generator = torch.Generator().manual_seed(0)
    for side, count in (("train", 20 * hp.micro_batches * hp.train_seq_len + 1), ("val", 2 * hp.val_seq_len + 1)):
        tokens = torch.randint(50256, (count,), generator=generator)
        tokens[::900] = 50256
        write_shard(tmp_path / f"r_{side}_000001.bin", tokens.numpy())
    run(["--preset=speedrun", f"--train_files={tmp_path}/r_train_*.bin", f"--val_files={tmp_path}/r_val_*.bin", "--val_tokens=0",
         "--num_iterations=20", "--val_loss_every=10", "--save=false", f"--records={tmp_path}/records"])
    log = log_of(tmp_path / "records")
    curve = losses(log, "train_loss")
    assert len(curve) == 20 and curve[0] == pytest.approx(10.8258, abs=1e-3) and curve[-1] < curve[0]
    wait = float(log.split("data_wait: ")[1].split(" ms")[0])
    assert wait < 1, f"{wait} ms a step spent waiting for data"


def test_window_growth_does_not_recompile_the_full_model():
    hp = dataclasses.replace(PRESETS["speedrun"], num_kv_heads=6, train_seq_len=8192, val_seq_len=8192)
    model = torch.compile(GPT(hp, flex, torch.bfloat16).cuda(), dynamic=False, fullgraph=True)
    tokens = tokens_with_documents(8192, 700)
    for window in (128, 256, 1024, 1792):
        model(tokens, tokens.long(), torch.tensor(window, device="cuda", dtype=torch.int32)).backward()
        torch.compiler.set_stance("fail_on_recompile")
