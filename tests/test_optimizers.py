"""Newton-Schulz, Muon and Adam: against oracles, in one process and (with gloo, by torchrun) in several."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from test_model import tiny_model

import train_gpt
from train_gpt import Adam, Muon, flat_gradients, newton_schulz, optimizer_groups, orthogonalize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, cols", [(64, 64), (256, 64), (64, 256)])
def test_singular_values_of_an_update_lie_in_the_band(rows, cols, dtype):
    x = torch.randn(3, rows, cols, generator=torch.Generator().manual_seed(0))
    x[1] *= 1e-4  # the scale of a gradient does not matter
    x[2] *= torch.logspace(0, -1.5, cols)  # neither does an uneven one, much
    u = newton_schulz(x.to(dtype))
    assert u.shape == x.shape and u.dtype == dtype
    values = torch.linalg.svdvals(u.float())
    assert float(values.max()) < 1.3 and float(values[:2].median()) > 0.6
    assert float((values[:2] > 0.5).float().mean()) > 0.95
    assert float(torch.linalg.svdvals(x[2]).max() / torch.linalg.svdvals(x[2]).min()) > 5  # what went in was far from flat


def test_zero_matrices_stay_zero():
    assert not newton_schulz(torch.zeros(2, 8, 8)).any()


def test_a_batch_is_its_matrices_one_by_one():
    x = torch.randn(4, 3, 32, 16)
    together = newton_schulz(x)
    for i in range(4):
        for j in range(3):
            torch.testing.assert_close(together[i, j], newton_schulz(x[i, j][None])[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("row_split", [(32, 32, 32), (64, 16, 16)])
def test_parts_of_a_merged_matrix_are_orthogonalized_by_themselves(row_split):
    x = torch.randn(2, 96, 32)
    got = orthogonalize(x, row_split)
    for part, want in zip(got.split(row_split, dim=1), x.split(row_split, dim=1)):
        scale = max(1, part.size(1) / 32) ** 0.5
        torch.testing.assert_close(part, newton_schulz(want) * scale, rtol=1e-4, atol=1e-5)


def test_agrees_with_the_muon_of_torch():
    """Same gradients for several steps; torch's own takes one 2-D tensor at a time and works in bfloat16."""
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(s)) for s in ((32, 16), (16, 32), (32, 16), (16, 16))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    oracle = torch.optim.Muon(theirs, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.0,
                              ns_coefficients=(3.4445, -4.775, 2.0315), ns_steps=5, eps=1e-7)
    muon = Muon(ours, 0, 1, torch.bfloat16)
    for _ in range(6):
        for p, q in zip(ours, theirs):
            grad = torch.randn_like(p)
            p.grad.copy_(grad)
            q.grad = grad.clone()
        before = [p.detach().clone() for p in ours]
        muon.reduce_gradients()
        muon.step(lr=0.05, momentum=0.9)
        oracle.step()
    for p, q, old in zip(ours, theirs, before):
        assert not torch.equal(p, old)
        torch.testing.assert_close(p, q, rtol=0, atol=0.01)  # 6 updates of size 0.05, each rounded to bfloat16


def test_nesterov_momentum_by_hand(monkeypatch):
    monkeypatch.setattr(train_gpt, "orthogonalize", lambda x, split: x)
    p = torch.nn.Parameter(torch.zeros(2, 2))
    muon = Muon([p], 0, 1, torch.float32)
    average, want = 0.0, 0.0
    for step, g in enumerate([1.0, -2.0, 3.0]):
        momentum = 0.85 + 0.05 * step
        p.grad.fill_(g)
        muon.reduce_gradients()
        muon.step(lr=0.1, momentum=momentum)
        average = momentum * average + (1 - momentum) * g
        want -= 0.1 * (momentum * average + (1 - momentum) * g)
    torch.testing.assert_close(p.detach(), torch.full((2, 2), want))
    assert not p.grad.any()


def test_normuon_evens_out_rows_and_keeps_norms():
    x = torch.randn(2, 6, 40, generator=torch.Generator().manual_seed(0)) * torch.tensor([1, 2, 4, 0.1, 1, 0])[:, None]
    squares = torch.zeros(2, 6, 1)
    even = train_gpt.even_rows(x, squares, 0.9)
    rows = even.norm(dim=2)
    torch.testing.assert_close(rows[:, :5], rows[:, :1].expand(2, 5))
    assert not rows[:, 5].any()  # no gradient, no update
    torch.testing.assert_close(even.norm(dim=(1, 2)), x.norm(dim=(1, 2)))
    torch.testing.assert_close(F.normalize(even[:, :5], dim=2), F.normalize(x[:, :5], dim=2))
    assert not train_gpt.even_rows(torch.zeros(2, 6, 40), torch.zeros(2, 6, 1), 0.9).any()


def test_normuon_takes_q_k_and_v_as_one():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(48, 16))
    p.row_split = (16, 16, 16)
    muon = Muon([p], 0, 1, torch.float32)
    p.grad.copy_(torch.randn(48, 16))
    p.grad[16:32, 2:] = 0  # a K whose update has two directions only
    plain = orthogonalize(p.grad[None].clone(), p.row_split)[0]
    muon.step(lr=1.0, momentum=0.0, beta2=0.9)
    torch.testing.assert_close(p.detach().norm(), plain.norm())
    torch.testing.assert_close(p.detach().norm(dim=1), (plain.norm() / 48**0.5).expand(48))


def test_normuon_by_the_papers_formulas(monkeypatch):
    """Algorithm 1 of arXiv:2510.05491 for one matrix, with the norm of the orthogonalized update in place of 0.2 sqrt(rows x cols)."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(16, 8))
    muon, plain = Muon([p], 0, 1, torch.float32), []
    monkeypatch.setattr(train_gpt, "orthogonalize", lambda x, split: plain.append(orthogonalize(x, split)) or plain[-1])
    v, want = torch.zeros(16), torch.zeros(16, 8)
    for _ in range(5):
        p.grad.copy_(torch.randn(16, 8) * torch.arange(1, 17)[:, None])
        muon.reduce_gradients()
        muon.step(lr=0.1, momentum=0.9, beta2=0.8)
        o = plain[-1][0]
        v = 0.8 * v + 0.2 * o.square().mean(1)
        even = o / v.sqrt()[:, None]
        want -= 0.1 * o.norm() * even / even.norm()
    torch.testing.assert_close(p.detach(), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adam_is_torchs(dtype):
    torch.manual_seed(0)
    ours, theirs = ([torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((30, 8), (5,), (2, 2))] for _ in range(2))
    for p, q in zip(ours, theirs):
        q.data.copy_(p.data)
    settings = dict(betas=(0.8, 0.95), eps=1e-7)
    adam = Adam([dict(params=ours[:2], peak_lr=0.1, **settings), dict(params=ours[2:], peak_lr=0.02, **settings)], 1)
    reference = torch.optim.Adam([dict(params=theirs[:2], lr=0.1), dict(params=theirs[2:], lr=0.02)], fused=True, **settings)
    for scale in (1.0, 1.0, 0.5, 0.25):
        for group, peak in zip(reference.param_groups, (0.1, 0.02)):
            group["lr"] = peak * scale
        for p, q in zip(ours, theirs):
            p.grad.copy_(torch.randn(p.shape))
            q.grad = p.grad.clone()
        adam.reduce_gradients()
        adam.step(scale)
        reference.step()
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs)) and not any(p.grad.any() for p in ours)
    for kind in Adam.STATE:
        assert all(torch.equal(adam.gathered(kind)[p], reference.state[q][kind]) for p, q in zip(ours, theirs))


def test_gradients_accumulate_inside_their_flat_buffer():
    model, hp = tiny_model()
    from test_model import WINDOW, sequence
    matrices, groups = optimizer_groups(model, hp)
    muon, adam = Muon(matrices, 0, 1, torch.float32), Adam(groups, 1)
    buffers = [group["grads"] for group in muon.groups + adam.groups]
    places = {name: p.grad.data_ptr() for name, p in model.named_parameters()}
    for _ in range(3):
        model(*sequence(), WINDOW).backward()
    spans = [(b.data_ptr(), b.data_ptr() + b.numel() * b.element_size()) for b in buffers]
    for name, p in model.named_parameters():
        assert p.grad.data_ptr() == places[name], f"{name}: the gradient left its buffer"
        assert any(a <= p.grad.data_ptr() < b for a, b in spans), name
        assert p.grad.any()
    total = sum(float(b.double().abs().sum()) for b in buffers)
    assert total == pytest.approx(sum(float(p.grad.double().abs().sum()) for p in model.parameters()))
    assert len(muon.groups) == 4  # QKV, attention output, MLP in, MLP out: one batch each


def test_buffers_cover_parameters_of_any_shape_once():
    params = [torch.nn.Parameter(torch.zeros(s)) for s in ((2, 3), (4,), (1, 2, 2))]
    flat = flat_gradients(params, 16)
    flat.copy_(torch.arange(16.0))
    assert [p.grad.flatten().tolist() for p in params] == [[*range(6)], [*range(6, 10)], [*range(10, 14)]]


class Traced:
    """A collective's handle that writes down when it is awaited."""

    def __init__(self, events, name):
        self.events, self.name = events, name

    def wait(self):
        self.events.append(f"await {self.name}")


def test_gathers_overlap_the_next_batch(monkeypatch):
    """Gather k is launched before batch k + 1's Newton-Schulz and awaited after it; the embeddings come last."""
    events, count = [], {"gather": 0, "batch": 0, "scatter": 0, "reduce": 0}

    def traced(kind):
        def launch(*args, **kwargs):
            events.append(f"launch {kind} {count[kind]}")
            count[kind] += 1
            return Traced(events, f"{kind} {count[kind] - 1}")
        return launch

    def orthogonalize_traced(x, split):
        events.append(f"batch {count['batch']}")
        count["batch"] += 1
        return x

    monkeypatch.setattr(train_gpt, "all_gather", traced("gather"))
    monkeypatch.setattr(train_gpt, "reduce_scatter", traced("scatter"))
    monkeypatch.setattr(train_gpt.dist, "all_reduce", traced("reduce"))
    monkeypatch.setattr(train_gpt.dist, "new_group", lambda: None)
    monkeypatch.setattr(train_gpt, "orthogonalize", orthogonalize_traced)
    model, hp = tiny_model()
    matrices, groups = optimizer_groups(model, hp)
    muon, adam = Muon(matrices, 1, 3, torch.float32), Adam(groups, 3)
    muon.reduce_gradients()
    adam.reduce_gradients()
    muon.step(0.05, 0.9)
    adam.step(1.0)
    at = {event: i for i, event in enumerate(events)}
    n = len(muon.groups)
    assert count == {"gather": n, "batch": n, "scatter": n, "reduce": 3} and n == 4
    for k in range(n):
        assert at[f"await scatter {k}"] < at[f"batch {k}"] < at[f"launch gather {k}"]
        if k + 1 < n:
            assert at[f"launch gather {k}"] < at[f"batch {k + 1}"] < at[f"await gather {k}"]
    assert max(at[f"launch scatter {k}"] for k in range(n)) < at["launch reduce 0"] < at["launch reduce 2"] < at["batch 0"]
    assert at["await gather 3"] < at["await reduce 0"] < at["await reduce 2"]


@pytest.mark.parametrize("ranks", [3, 8])
def test_distributed_optimizers_equal_a_single_process(ranks):
    """5, 2 and 1 parameters of a shape: on 3 ranks a share is not full, on 8 most ranks own nothing of a shape."""
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
                           str(ROOT / "tests" / "optimizer_worker.py")], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stdout.count("equal") == ranks, done.stdout + done.stderr
