"""Run by torchrun, with a dtype as argument: some steps of a table of optimizers on this rank's
share of the gradients, with a save and a restore in the middle, against one process with all
gradients."""

import dataclasses
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from train_gpt import (  # noqa: E402
    PRESETS, Adam, Muon, Optimizer, Ranks, connect, load_training_state, lr_scale, start_ranks,
    train_step, training_state)

MICRO_BATCHES = 24
HP = dataclasses.replace(
    PRESETS["demo"], dtype=sys.argv[1], num_iterations=8, cooldown_frac=1.0, lr_floor=0.1,
    micro_batches=MICRO_BATCHES, muon_beta2=0.8, muon_momentum_start=0.9, muon_momentum_end=0.9,
    adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-10)
SHAPES = [(24, 8)] * 5 + [(8, 24)] * 2 + [(16, 8), (50, 8), (24,), (48, 2), (5,)]


class Momentum(Optimizer):
    """An optimizer that the script knows nothing of: plain momentum. All that it says is what
    it keeps and how it updates a rank's share."""

    def __init__(self, params, lr, hp, ranks):
        super().__init__(params, lr, hp, ranks)
        self.state["velocity"] = [torch.zeros_like(p) for p in self.mine]

    def update(self, grads, step):
        for p, grad, velocity in zip(self.mine, grads, self.state["velocity"]):
            velocity.mul_(0.9).add_(grad)
            p.sub_(self.lr * lr_scale(step, self.hp) * velocity)


def build(ranks, seed):
    """(a module with the parameters, the table of their optimizers)"""
    torch.manual_seed(seed)
    model = torch.nn.ParameterDict({f"p{i}": torch.randn(shape) for i, shape in enumerate(SHAPES)})
    params = dict(model.named_parameters())

    def named(*numbers):
        return {f"p{i}": params[f"p{i}"] for i in numbers}

    return model, [
        Muon(named(0, 1, 2, 3, 4), 0.05, HP, ranks, 3),
        Muon(named(5, 6), 0.03, HP, ranks),
        Muon(named(7), 0.04, HP, ranks),
        Adam(named(8, 9), 0.01, HP, ranks),
        Momentum(named(10, 11), 0.02, HP, ranks),
    ]


def take_steps(model, optimizers, steps, mine):
    """Steps on the gradients of the micro-batches that are mine."""
    for step in steps:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for micro_batch in range(MICRO_BATCHES):
            generator = torch.Generator().manual_seed(100 * step + micro_batch)
            for p in model.parameters():
                gradient = torch.randn(p.shape, generator=generator)
                if micro_batch in mine:
                    p.grad += gradient / MICRO_BATCHES
        # What train_step does after its micro-batches, of which it is given none.
        train_step(model, [], optimizers, step, HP, optimizers[0].ranks)


def assert_same(got, want, how):
    assert list(got) == list(want)
    for kind, tensors in want.items():
        assert set(got[kind]) == set(tensors), kind
        for name, tensor in tensors.items():
            how(got[kind][name], tensor)


def assert_equal(a, b):
    assert torch.equal(a, b)


def assert_close(a, b):
    if HP.dtype == "float32":
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    else:  # each rank rounds its gradients
        torch.testing.assert_close(a, b, rtol=0.01, atol=0.01)


def copied(state):
    return {kind: {name: tensor.clone() for name, tensor in tensors.items()}
            for kind, tensors in state.items()}


ranks = start_ranks()
if ranks.world_size > 1:
    connect(ranks)
share = MICRO_BATCHES // ranks.world_size
mine = range(ranks.rank * share, (ranks.rank + 1) * share)

# Four steps at a stretch, by all ranks and by one process.
model, optimizers = build(ranks, seed=0)
take_steps(model, optimizers, range(2), mine)
saved = copied(training_state(model, optimizers))
take_steps(model, optimizers, range(2, 4), mine)
got = training_state(model, optimizers)
alone, alone_optimizers = build(Ranks(0, 1, torch.device("cpu")), seed=0)
take_steps(alone, alone_optimizers, range(4), range(MICRO_BATCHES))
want = training_state(alone, alone_optimizers)
assert_same(got, want, assert_close)
matrices = {f"p{i}" for i in range(8)}
assert set(got["model"]) == {f"p{i}" for i in range(len(SHAPES))}
assert set(got["momentum"]) == set(got["row_squares"]) == matrices
assert set(got["exp_avg"]) == set(got["exp_avg_sq"]) == {"p8", "p9"}
assert set(got["velocity"]) == {"p10", "p11"}

# Every rank has the very same bits.
for kind, tensors in got.items():
    for name, tensor in tensors.items():
        first = tensor.clone()
        if ranks.world_size > 1:
            dist.broadcast(first, src=0)
        assert torch.equal(first, tensor), (kind, name)

# From what was saved in the middle, others go on to the same bits: rank 0 alone has it.
model, optimizers = build(ranks, seed=1 + ranks.rank)
take_steps(model, optimizers, range(1), mine)  # leaves a state of its own to be overwritten
load_training_state(saved if ranks.rank == 0 else {}, model, optimizers, ranks)
assert_same(training_state(model, optimizers), saved, assert_equal)
take_steps(model, optimizers, range(2, 4), mine)
assert_same(training_state(model, optimizers), got, assert_equal)

# And so does one process with what many ranks have saved.
alone, alone_optimizers = build(Ranks(0, 1, torch.device("cpu")), seed=9)
load_training_state(saved, alone, alone_optimizers, Ranks(0, 1, torch.device("cpu")))
take_steps(alone, alone_optimizers, range(2, 4), range(MICRO_BATCHES))
assert_same(training_state(alone, alone_optimizers), want, assert_close)

print(f"rank {ranks.rank}: equal", flush=True)
dist.barrier()
os._exit(0)
