"""Newton-Schulz, Muon and Adam: against oracles, in one process and (with gloo, by torchrun) in
several."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, TINY, launch, log_path, losses
from test_model import ALONE, WINDOW, sequence, tiny_model
from torch import nn

import train_gpt
from train_gpt import (PRESETS, Adam, CastedLinear, MatrixOptimizer, Muon, Optimizer, UserError,
                       World, build_optimizers, gather_training_state, load_training_state,
                       newton_schulz, train_step)

HP = dataclasses.replace(PRESETS["demo"], dtype="float32", cooldown_frac=0.0)


def take_step(optimizer, step=0):
    """One step of one optimizer, on the gradients that its parameters have."""
    with torch.no_grad():
        optimizer.begin()
        optimizer.update(step)
        optimizer.finish(step)


def with_momentum(momentum, **changes):
    return dataclasses.replace(HP, muon_momentum_start=momentum, muon_momentum_end=momentum,
                               **changes)


def plain(x, steps=5):
    """In place of newton_schulz: changes nothing."""
    return x


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
    before = torch.linalg.svdvals(x[2])
    assert float(before.max() / before.min()) > 5  # what went in was far from flat


def test_zero_matrices_stay_zero():
    """Those that fill up a stack, among others."""
    assert not newton_schulz(torch.zeros(2, 8, 8)).any()


def test_each_matrix_of_a_stack_is_orthogonalized_as_if_it_were_alone():
    x = torch.randn(12, 32, 16)
    together = newton_schulz(x)
    for i in range(12):
        alone = newton_schulz(x[i:i + 1])[0]
        torch.testing.assert_close(together[i], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parts, cols", [(1, 32), (3, 32), (3, 16), (2, 64)])
def test_the_parts_of_a_stacked_matrix_are_orthogonalized_one_by_one(parts, cols):
    torch.manual_seed(0)
    layer = CastedLinear(cols, 96, zero=True, parts=parts)
    muon = Muon({"p": layer.weight}, 1.0, with_momentum(0.0), ALONE)
    layer.weight.grad = torch.randn(96, cols)
    take_step(muon)
    chunks = layer.weight.detach().chunk(parts), layer.weight.grad.chunk(parts)
    for part, gradient in zip(*chunks, strict=True):
        scale = max(1, len(part) / cols) ** 0.5
        want = -scale * newton_schulz(gradient[None])[0]
        torch.testing.assert_close(part, want, rtol=1e-4, atol=1e-5)


class SwiGLU(nn.Module):
    """A gated MLP whose two input matrices are one stacked weight, as a user would write it."""

    def __init__(self, dim):
        super().__init__()
        self.fc = CastedLinear(dim, 8 * dim, parts=2)
        self.proj = CastedLinear(4 * dim, dim, zero=True)

    def forward(self, x_TD):
        gate, x = self.fc(x_TD).chunk(2, dim=-1)
        return self.proj(nn.functional.silu(gate) * x)


def test_parts_that_a_layer_declares_reach_muon_through_the_models_table(monkeypatch):
    """The table needs no change for a stacked SwiGLU matrix: its halves are orthogonalized one by
    one, each of them tall, where Q, K and V are three."""
    monkeypatch.setattr(train_gpt, "MLP", SwiGLU)
    model, hp = tiny_model()
    seen = []

    def watch(x, steps=5):
        seen.append(tuple(x.shape))
        return newton_schulz(x, steps)

    monkeypatch.setattr(train_gpt, "newton_schulz", watch)
    optimizers = build_optimizers(model, hp, ALONE)
    before = model.blocks[0].mlp.fc.weight.detach().clone()
    model(*sequence(), WINDOW).backward()
    gradient = model.blocks[0].mlp.fc.weight.grad.clone()
    hp_at_start = dataclasses.replace(hp, muon_momentum_start=0.0, muon_momentum_end=0.0)
    for optimizer in optimizers:
        optimizer.hp = hp_at_start
        take_step(optimizer)
    # Of 3 layers Q, K, V [64, 32] each and projections [32, 64]; of 4 layers both halves of fc.
    assert sorted(seen) == sorted([(9, 64, 32), (3, 32, 64), (8, 128, 32), (4, 32, 128)])
    update = (model.blocks[0].mlp.fc.weight.detach() - before) / -hp.muon_lr
    for part, want in zip(update.chunk(2), gradient.chunk(2)):
        torch.testing.assert_close(part, 2 * newton_schulz(want[None])[0], rtol=1e-3, atol=1e-4)


def test_a_class_of_matrices_that_differ_in_parts_is_refused():
    params = {"stacked": CastedLinear(8, 6, parts=2).weight, "single": CastedLinear(8, 6).weight}
    with pytest.raises(UserError, match="one height, one width"):
        Muon(params, 0.1, HP, ALONE)


def test_agrees_with_the_muon_of_torch():
    """On the same gradients for several steps; torch's own takes one matrix at a time and works in
    bfloat16."""
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(s)) for s in ((32, 16), (16, 32), (32, 16), (16, 16))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    oracle = torch.optim.Muon(theirs, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.0,
                              ns_coefficients=(3.4445, -4.775, 2.0315), ns_steps=5, eps=1e-7)
    hp = with_momentum(0.9, dtype="bfloat16")
    table = [Muon({str(i): ours[i] for i in same_shape}, 0.05, hp, ALONE)
             for same_shape in ((0, 2), (1,), (3,))]
    for _ in range(6):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        before = [p.detach().clone() for p in ours]
        for muon in table:
            take_step(muon)
        oracle.step()
    for p, q, old in zip(ours, theirs, before):
        assert not torch.equal(p, old)
        # 6 updates of size 0.05, each rounded to bfloat16
        torch.testing.assert_close(p, q, rtol=0, atol=0.01)


def test_nesterov_momentum_by_hand(monkeypatch):
    monkeypatch.setattr(train_gpt, "newton_schulz", plain)
    p = torch.nn.Parameter(torch.zeros(2, 2))
    hp = dataclasses.replace(HP, muon_momentum_start=0.85, muon_momentum_end=0.95,
                             muon_momentum_steps=2)
    muon = Muon({"p": p}, 0.1, hp, ALONE)
    average, want = 0.0, 0.0
    for step, g in enumerate([1.0, -2.0, 3.0]):
        momentum = 0.85 + 0.05 * step
        p.grad = torch.full((2, 2), g)
        take_step(muon, step)
        average = momentum * average + (1 - momentum) * g
        want -= 0.1 * (momentum * average + (1 - momentum) * g)
    torch.testing.assert_close(p.detach(), torch.full((2, 2), want))


@pytest.mark.parametrize("shapes", [((4, 8), (8, 4)), ((4,), (4,)), ((2, 4, 8),)],
                         ids=["two shapes", "vectors", "a stack"])
def test_muon_refuses_what_is_not_matrices_of_one_shape(shapes):
    params = {f"p{i}": torch.nn.Parameter(torch.zeros(shape)) for i, shape in enumerate(shapes)}
    with pytest.raises(UserError, match="one height, one width") as caught:
        Muon(params, 0.1, HP, ALONE)
    assert all(name in str(caught.value) for name in params) and "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adam_is_torchs(dtype, monkeypatch):
    torch.manual_seed(0)
    scales = [1.0, 1.0, 0.5, 0.25]
    monkeypatch.setattr(train_gpt, "lr_scale", lambda step, hp: scales[step])
    values = [torch.randn(shape, dtype=dtype) for shape in ((30, 8), (5,), (2, 2))]
    ours = [torch.nn.Parameter(value.clone()) for value in values]
    theirs = [torch.nn.Parameter(value.clone()) for value in values]
    hp = dataclasses.replace(HP, dtype=str(dtype).removeprefix("torch."), adam_beta1=0.8,
                             adam_beta2=0.95, adam_eps=1e-7)
    table = [Adam({"0": ours[0], "1": ours[1]}, 0.1, hp, ALONE),
             Adam({"2": ours[2]}, 0.02, hp, ALONE)]
    groups = [dict(params=theirs[:2], lr=0.1), dict(params=theirs[2:], lr=0.02)]
    reference = torch.optim.Adam(groups, fused=True, betas=(0.8, 0.95), eps=1e-7)
    for step, scale in enumerate(scales):
        for group, peak in zip(reference.param_groups, (0.1, 0.02)):
            group["lr"] = peak * scale
        for p, q in zip(ours, theirs):
            p.grad = torch.randn(p.shape).to(dtype)
            q.grad = p.grad.clone()
        for adam in table:
            take_step(adam, step)
        reference.step()
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs))
    state = gather_training_state(torch.nn.Module(), table)["optimizers"]
    for ours_is, theirs_is in (("mean", "exp_avg"), ("mean_square", "exp_avg_sq")):
        for i, q in enumerate(theirs):
            assert torch.equal(state[ours_is][str(i)], reference.state[q][theirs_is]), ours_is


class Descent(Optimizer):
    """Plain gradient descent on whole parameters, without state."""

    def begin(self):
        self.gradients = [self.world.all_reduce(p.grad) for p in self.params.values()]

    def update(self, step):
        for p, gradient in zip(self.params.values(), self.gradients):
            p.sub_(self.lr * gradient.result())

    def finish(self, step):
        pass


def test_a_step_follows_the_mean_gradient_of_its_micro_batches():
    """... and leaves no gradient to the next one."""
    model, hp = tiny_model(micro_batches=3, window_start=256)
    batches = [sequence(seed=seed) for seed in range(3)]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    mean = torch.stack([model(*batch, WINDOW) for batch in batches]).mean()
    gradients = dict(zip(before, torch.autograd.grad(mean, list(model.parameters()))))
    loss = train_step(model, batches, [Descent(dict(model.named_parameters()), 0.5, hp, ALONE)], 0,
                      hp, ALONE)
    assert float(loss) == pytest.approx(float(mean.detach()), abs=1e-6)
    for name, p in model.named_parameters():
        want = before[name] - 0.5 * gradients[name]
        torch.testing.assert_close(p.detach(), want, rtol=1e-5, atol=1e-6)
        assert p.grad is None and not torch.equal(p, before[name]), name


def test_the_models_table_has_a_stack_for_each_shape_of_matrices():
    model, hp = tiny_model()
    table = build_optimizers(model, hp, ALONE)
    muons = [row for row in table if isinstance(row, Muon)]
    assert [(len(row.params), row.parts) for row in muons] == [(3, 3), (3, 1), (4, 1), (4, 1)]
    assert {row.lr for row in muons} == {hp.muon_lr}
    adams = {frozenset(row.params): row.lr for row in table if isinstance(row, Adam)}
    mixes = {f"blocks.{layer}.residual_mix" for layer in range(4)}
    mixes |= {f"blocks.{layer}.attn.value_mix" for layer in (0, 1, 3)}
    assert adams == {
        frozenset({"lm_head.weight"}): hp.head_lr,
        frozenset({"embed.weight", "pair_embed.weight", "value_embeds.0.weight"}): hp.embed_lr,
        frozenset({"smear", "skip_weights"} | mixes): hp.scalar_lr}


def test_training_goes_on_to_the_same_bits_from_a_state_that_is_loaded():
    """From one model and its optimizers to others, which have been trained elsewhere."""
    (ours, hp), (theirs, _) = tiny_model(seed=1), tiny_model(seed=2)
    a, b = build_optimizers(ours, hp, ALONE), build_optimizers(theirs, hp, ALONE)
    for step in range(2):
        train_step(ours, [sequence(seed=step)], a, step, hp, ALONE)
        train_step(theirs, [sequence(seed=9)], b, step, hp, ALONE)
    state = gather_training_state(ours, a)
    means, momenta = set(state["optimizers"]["mean"]), set(state["optimizers"]["momentum"])
    assert means | momenta == set(state["model"]) and not means & momenta
    load_training_state(state, theirs, b, ALONE)
    for step in range(2, 4):
        for model, table in ((ours, a), (theirs, b)):
            train_step(model, [sequence(seed=step)], table, step, hp, ALONE)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters()):
        assert torch.equal(p, q), name


def test_a_row_of_the_table_that_no_parameter_fits_is_refused():
    """It may have a mistake in its pattern; what it was meant for would train at another rate."""
    hp = dataclasses.replace(PRESETS["demo"], attention="....", value_embeds="....",
                             dtype="float32", num_kv_heads=4)
    model = train_gpt.GPT(hp, train_gpt.block_sparse, torch.float32)
    with pytest.raises(UserError, match=r"no parameter fits the row blocks.*attn.*qkv") as caught:
        build_optimizers(model, hp, ALONE)
    assert "\n" not in str(caught.value)


def test_a_state_that_lacks_a_tensor_is_refused_by_its_name():
    model, hp = tiny_model()
    table = build_optimizers(model, hp, ALONE)
    for kind, name, found in (("momentum", "blocks.0.mlp.fc.weight", None),
                              ("mean", "lm_head.weight", torch.zeros(3, 2))):
        state = gather_training_state(model, table)
        if found is None:
            del state["optimizers"][kind][name]
        else:
            state["optimizers"][kind][name] = found
        with pytest.raises(UserError, match=f"{kind} of {name}") as caught:
            load_training_state(state, model, table, ALONE)
        assert "\n" not in str(caught.value)


class Named(MatrixOptimizer):
    """Its state has the names that a checkpoint uses for other things."""

    def __init__(self, params, lr, hp, world):
        super().__init__(params, lr, hp, world)
        for name in ("step", "model", "optimizers", "facts"):
            self.state[name] = torch.zeros(self.shape, device=world.device)

    def direction(self, gradients, step):
        for name in self.state:
            self.world.rows(self.state[name]).add_(gradients)
        return self.world.rows(self.state["step"])


def test_a_state_may_have_any_name():
    model = nn.ParameterDict({"p": torch.ones(4, 4)})
    optimizer = Named(dict(model.named_parameters()), 0.1, HP, ALONE)
    model.p.grad = torch.ones(4, 4)
    take_step(optimizer)
    saved = {name: {key: tensor.clone() for key, tensor in tensors.items()}
             for name, tensors in gather_training_state(model, [optimizer])["optimizers"].items()}
    saved = dict(model={"p": torch.full((4, 4), 5.0)}, optimizers=saved)
    assert set(saved["optimizers"]) == {"step", "model", "optimizers", "facts"}
    model.p.grad = torch.full((4, 4), 7.0)
    take_step(optimizer)
    load_training_state(saved, model, [optimizer], ALONE)
    assert torch.equal(model.p, torch.full((4, 4), 5.0))
    assert all(torch.equal(stack[0], torch.ones(4, 4)) for stack in optimizer.state.values())


class Traced:
    """A collective's handle that notes when it is waited for."""

    def __init__(self, events, name):
        self.events = events
        self.name = name

    def wait(self):
        self.events.append(f"wait {self.name}")


def test_what_one_optimizer_sends_travels_while_another_computes(monkeypatch):
    """All gradients are on their way before the first update. What an optimizer has updated is on
    its way before the next one computes, and is waited for after the last one has."""
    events = []

    def traced(kind):
        def launch(*args, **kwargs):
            number = sum(event.startswith(f"launch {kind}") for event in events)
            events.append(f"launch {kind} {number}")
            return Traced(events, f"{kind} {number}")
        return launch

    monkeypatch.setattr(train_gpt.dist, "all_gather_single", traced("gather"))
    monkeypatch.setattr(train_gpt.dist, "reduce_scatter_single", traced("scatter"))
    monkeypatch.setattr(train_gpt.dist, "all_reduce", traced("reduce"))
    model, hp = tiny_model()
    world = World(1, 4, torch.device("cpu"))
    optimizers = build_optimizers(model, hp, world)
    for i, optimizer in enumerate(optimizers):
        def traced_update(step, i=i, update=optimizer.update):
            events.append(f"begin {i}")
            update(step)
            events.append(f"end {i}")
        monkeypatch.setattr(optimizer, "update", traced_update)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    train_step(model, [], optimizers, 0, hp, world)  # what follows the micro-batches
    assert len(set(events)) == len(events), "something is launched or waited for twice"
    launches = [event for event in events if event.startswith("launch")]
    assert {f"wait{event[6:]}" for event in launches} <= set(events)
    first = events.index("begin 0")
    last = events.index(f"end {len(optimizers) - 1}")
    divided = {name for row in optimizers if isinstance(row, Adam)
               for name, p in row.params.items() if p.ndim > 1 and len(p) % 4 == 0}
    assert "lm_head.weight" in divided and "skip_weights" not in divided
    muons = sum(isinstance(row, Muon) for row in optimizers)
    for kind in ("scatter", "gather"):
        assert sum(f"launch {kind}" in event for event in events) == muons + len(divided)
    for i, event in enumerate(events[:-2]):  # the last two are the loss, once all is launched
        if event.startswith(("launch scatter", "launch reduce", "wait gather")):
            assert i < first if "launch" in event else i > last
        elif event.startswith(("wait scatter", "wait reduce", "launch gather")):
            assert first < i < last
    assert events[-1].startswith("wait reduce")


@pytest.mark.parametrize("ranks, dtype", [(3, "float32"), (8, "float32"), (2, "bfloat16")])
def test_distributed_optimizers_equal_a_single_process(ranks, dtype):
    """With 5, 2 and 1 parameters of a shape: on 3 processes the stack is filled up, on 8 most
    processes have none of the matrices. The state is saved in the middle and restored; two
    optimizers are a user's own."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
         str(ROOT / "tests" / "optimizer_worker.py"), dtype], capture_output=True, text=True,
        timeout=200)
    assert done.returncode == 0 and done.stdout.count("equal") == ranks, done.stdout + done.stderr


SOAP = """class Soap(MatrixOptimizer):
    def __init__(self, params, lr, hp, world):
        super().__init__(params, lr, hp, world)
        n, rows, cols = self.shape
        self.state["weight"] = torch.zeros(n, rows, rows, device=world.device)
        self.state["step"] = torch.zeros(self.shape, device=world.device)

    def direction(self, gradients, step):
        left = self.world.rows(self.state["weight"])
        squares = self.world.rows(self.state["step"])
        left.lerp_(gradients @ gradients.mT, 0.1)
        basis = torch.linalg.eigh(left).eigenvectors
        rotated = basis.mT @ gradients
        squares.lerp_(rotated.square(), 0.1)
        return basis @ (rotated / (squares.sqrt() + 1e-6))


class Muon(MatrixOptimizer):
"""


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_users_optimizer_trains_saves_and_resumes(tmp_path, shards, ranks):
    """A class with one method and its own state, and one row of the table: in a copy of the script,
    on one process and on two. Its states have names that also mean something in a checkpoint."""
    text = (ROOT / "train_gpt.py").read_text()
    row = '(r"blocks\\.\\d+\\.mlp\\.fc\\.weight",      Muon, hp.muon_lr)'
    assert text.count(row) == text.count("class Muon(MatrixOptimizer):\n") == 1
    text = text.replace(row, row.replace("Muon, hp.muon_lr", "Soap, 0.003"))
    script = tmp_path / "soap.py"
    script.write_text(text.replace("class Muon(MatrixOptimizer):\n", SOAP))
    launch(*TINY, *shards, "--save_every=3", f"--records={tmp_path}/records", script=script,
           ranks=ranks)
    log = log_path(tmp_path / "records")
    whole = log.read_text()
    curve = losses(whole, "train_loss")
    assert len(curve) == 6 and curve[-1] < curve[0] - 0.1
    last, middle = train_gpt.checkpoints_of(log)
    saved = torch.load(middle, weights_only=True)
    trained_by_soap = {f"blocks.{layer}.mlp.fc.weight" for layer in range(4)}
    assert set(saved["optimizers"]["weight"]) == set(saved["optimizers"]["step"]) == trained_by_soap
    assert saved["optimizers"]["weight"]["blocks.0.mlp.fc.weight"].any()
    end = torch.load(last, weights_only=True)
    last.unlink()
    launch(f"--resume={log}", script=script, ranks=ranks)
    again = torch.load(last, weights_only=True)
    for name, p in end["model"].items():
        assert torch.equal(p, again["model"][name]), name
    for kind, tensors in end["optimizers"].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, again["optimizers"][kind][name]), (kind, name)


@pytest.mark.parametrize("state", [lambda n: torch.zeros(2 * n, 3), lambda n: [torch.zeros(3)],
                                   lambda n: torch.zeros(n)])
def test_a_state_that_would_not_be_saved_whole_is_refused(state):
    """If the number of entries is not that of the parameters, zip() would leave out the rest. A
    vector is not divided among the processes, so that the entries of the others would be lost."""
    world = World(0, 1, torch.device("cpu"))
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in "ab"})
    optimizer = train_gpt.Adam(dict(model.named_parameters()), 0.1, HP, world)
    train_gpt.gather_training_state(model, [optimizer])
    optimizer.state["more"] = state(len(optimizer.params))
    with pytest.raises(AssertionError, match="more"):
        train_gpt.gather_training_state(model, [optimizer])
