# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.9.1", "numpy"]
# ///
"""A record of 2026 in one file: train a GPT to a validation loss of 3.28 on 396M tokens of FineWeb.

    torchrun --standalone --local_addr=127.0.0.1 --nproc_per_node=8 train_gpt.py   # the speedrun
    python train_gpt.py --preset=demo                      # a small version, on a CPU or one GPU
    python train_gpt.py --resume=records/<run>/step<n>.pt  # continue from a checkpoint
    python train_gpt.py --help                             # every setting is a flag

This is the method of the world record of 2026-04-04 in plain PyTorch. That record took 85 s on
eight H100 GPUs, in 3,169 lines with seven custom kernels. The speed of this script is not measured.
To try an idea, change a copy of this file. Every run writes a log to the records folder: settings,
machine, this source, and a line per step. Read sections 1 to 9 in order, each of them only up to
its line `# ---- Support`.

The model has 539 million parameters, 464 million of them in the output head and the embeddings of
tokens, token pairs and values. A run has 1,490 steps, which train on 131,072 to 393,216 tokens
each. Losses are in nats per token. Validation starts near ln 50304 = 10.83, because the head starts
near zero. The training loss starts near 19, because it counts three targets.

A date such as (2024-11-24) names the record that introduced a part. All records are listed at
https://github.com/KellerJordan/modded-nanogpt#world-record-history. This folder's README.md says
what each part gained, and what differs from the record.

One step of `speedrun`'s last stage, with the shapes of one of its eight packs of documents:

    tokens [49152] ----> 3 block masks, 5 value embeddings [49152, 768]
       |
       v
    x0 and pair embedding [49152, 768], which each layer with attention adds to x [49152, 768]
       |
       v
    layers 0-3 --+--> 4, 5 --> 6, 7 --+--> 8-10 --> minus --> norm, lm_head, softcap
                 |             ^      |      ^        ^                 |
                 +-- skip, ----+      +------+--------+                 v
                     gated           queries, keys, values     loss <-- logits [49152, 50304]

    loss.backward(); after the last pack, optimizers take a step

Many names end in the tensor's shape: x_TD is [T, D]. T is the number of tokens, D the model width,
H the number of attention heads, K the head width, V the padded vocabulary, N the number of
128-token blocks. There is no batch dimension: the model takes one long pack of many documents at a
time. Steps start at 0.
"""

import argparse
import gc
import glob
import io
import math
import os
import platform
import re
import signal
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timedelta, timezone
from fractions import Fraction
from functools import lru_cache
from hashlib import sha256
from importlib.util import find_spec
from itertools import islice, pairwise
from pathlib import Path
from typing import Iterator, NamedTuple

if __name__ == "__main__" and not (find_spec("torch") and find_spec("numpy")):
    print("error: this Python lacks torch or numpy: install them", file=sys.stderr)
    sys.exit(2)

# Read before torch, whose import takes seconds: the file could change meanwhile.
SOURCE = Path(__file__).read_text(encoding="utf-8") if __name__ == "__main__" else None

import numpy as np
import torch
import torch._functorch.config
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils._pytree import tree_map

class UserError(Exception):
    """An error that the user can fix. Its message is one line."""

def require(condition, message: str):
    if not condition:
        raise UserError(message)

# ---- 1. Settings and schedules ------------------------------------------------------------------

BLOCK = 128  # tokens; attention masks and windows consist of whole blocks
NUMBER = r"\d{1,9}(\.\d{1,9}|/[1-9]\d{0,8})?"  # such as 2 or 1.52 or 1/3
ROW = rf" *{NUMBER}( +\d{{1,9}}){{3}} +{NUMBER}( +{NUMBER}(:{NUMBER})?){{2}} *"  # of `stages`

def flag(default, text: str, low=0, high=10**9, unit=1, pattern=".+"):
    """A setting. Numbers lie in [low, high], integers are multiples of unit, and strings match the
    pattern."""
    return field(default=default, metadata=dict(help=text, limits=(low, high, unit, pattern)))

@dataclass(frozen=True)
class Hyperparameters:
    """Every field is a flag of the same name. The defaults are the preset `speedrun`."""
    # The run
    name: str = flag("speedrun", "up to 100 letters, digits and ._-", pattern=r"[\w.-]{1,100}")
    records: str = flag("records", "folder for the log and the checkpoints")
    seed: int = flag(-1, "seed of the initial weights; -1 draws one", low=-1, high=2**63 - 1)
    dtype: str = flag("auto", "bfloat16, float32 or auto", pattern="auto|bfloat16|float32")
    save_every: int = flag(500, "steps between checkpoints; 0 never saves, not even at the end")
    val_loss_every: int = flag(250, "steps between validations (also at saves and the end)")
    # Data. In one step all ranks together train on `micro_batches` packs of documents.
    train_files: str = flag("data/fineweb10B/fineweb_train_*.bin", "glob of the training shards")
    val_files: str = flag("data/fineweb10B/fineweb_val_*.bin", "glob of the validation shards")
    vocab_size: int = flag(50257, "token ids; the last one begins each document", low=2, high=65536)
    train_seq_len: int = flag(48 * 1024, "tokens in the longest packs", low=1, unit=BLOCK)
    val_seq_len: int = flag(256 * 1024, "tokens per validation sequence", low=1, unit=BLOCK)
    val_tokens: int = flag(10485760, "validation tokens; 0 uses all", high=10**12)
    micro_batches: int = flag(8, "packs per step, on all ranks together", low=1, high=10**5)
    epochs: int = flag(1, "at most this many passes over the training shards", low=1, high=10**5)
    # The stages of training. All stages except the last are equally long.
    stages: str = flag(
        # pack   document  short, long window  rate  2nd, 3rd target
        "1/3        896        128    384      1     0.5    0.25:0,"  # stage 0
        "2/3       2048        384    896      1.52  0.5:0  0,"
        "1         2048        640   1408      1.73  0      0,"
        "1         2048        768   1664      1     0      0",
        "a row of 7 numbers per stage, with commas between rows: tokens in a pack / train_seq_len; "
        "tokens that a document keeps; short and long window, in tokens; factor on all learning "
        "rates (in the last stage only lr_floor counts); weight of the token after the next one in "
        "the loss, and of the one after it (a:b goes from a to b)", pattern=rf"{ROW}(,{ROW})+")
    final_window: int = flag(2560, "long window of the last validation", low=BLOCK, unit=BLOCK)
    extension_frac: float = flag(0.0268, "the last stage, as a share of all steps", high=1)
    untie_stage: int = flag(2, "stage, from 0, in which lm_head is untied, after one more update")
    # The layers. Each of these strings has one character per layer. A new kind of layer also
    # changes its pattern, block_masks, rotations_of and CausalSelfAttention.
    layers: str = flag("PSPLSP.SSPL", "attention with P: paired heads and the short window, S: the "
                       "short window, L: the long window; .: no attention", pattern="[PSL.]+")
    value_embeds: str = flag(".01.....234", "digit: value embedding, .: none", pattern="[0-9.]+")
    skip_from: int = flag(3, "layer whose output is added again in the layer without attention")
    back_from: int = flag(7, "layer whose output is backed out, and read by later attention")
    # The model
    model_dim: int = flag(768, "width of the residual stream", low=16, high=2**16, unit=16)
    num_heads: int = flag(6, "attention heads, independent of model_dim", low=2, high=2**10, unit=2)
    head_dim: int = flag(128, "width of an attention head", low=16, high=2**10, unit=16)
    attention_scale: float = flag(0.1, "factor on q @ k in the first stage", low=0.001)
    rope_base: float = flag(1024.0, "base of the rotary frequencies", low=1)
    bigram_rows: int = flag(5 * 50304, "rows of the embedding of token pairs", low=64, unit=64)
    use_fp8: bool = flag(True, "train lm_head in FP8, if the GPU and dtype allow it")
    # Optimization
    num_iterations: int = flag(1490, "training steps", high=10**7)
    cooldown_frac: float = flag(0.6, "share of the steps before the last stage in which learning "
                                "rates fall", high=1)
    lr_floor: float = flag(0.15, "factor on all learning rates at the end", high=1)
    muon_lr: float = flag(0.023, "learning rate of the layers' matrices (NorMuon)")
    muon_momentum_start: float = flag(0.85, "momentum at first and at the end", high=1)
    muon_momentum_end: float = flag(0.95, "momentum in between", high=1)
    muon_momentum_steps: int = flag(300, "steps in which the momentum rises")
    muon_cooldown_steps: int = flag(50, "final steps in which the momentum falls again", low=1)
    muon_beta2: float = flag(0.9, "decay of NorMuon's mean squares", high=1 - 1e-9)
    muon_decay: float = flag(1.2, "weight decay of the layers' matrices")
    adam_lr: float = flag(0.008, "learning rate of Adam; PARAMETERS has factors on it")
    adam_decay: float = flag(0.005, "weight decay of Adam; PARAMETERS has factors on it")
    adam_eps: float = flag(1e-10, "Adam's epsilon: below it, gradients hardly count", low=1e-18)

    @property
    def tokens_per_step(self) -> int:
        """Tokens in the largest steps."""
        return self.micro_batches * self.train_seq_len

PRESETS = {
    "speedrun": Hyperparameters(),
    # The speedrun's model and steps, on one shard of FineWeb
    "short": Hyperparameters(
        name="short", num_iterations=250, muon_momentum_steps=50, muon_cooldown_steps=8,
        save_every=0, val_loss_every=125,
        train_files="data/fineweb10B/fineweb_train_000001.bin"),
    # A small model with all parts. Its settings are not tuned.
    "demo": Hyperparameters(
        name="demo", save_every=120, val_loss_every=120, train_files="data/demo/demo_train_*.bin",
        val_files="data/demo/demo_val_*.bin", vocab_size=1025, train_seq_len=1024,
        val_seq_len=16384, val_tokens=131072, micro_batches=4,
        stages="1/3 896 128 128 1 0.5 0.25:0, 2/3 2048 128 256 1.52 0.5:0 0, "
               "1 2048 128 256 1.73 0 0, 1 2048 128 256 1 0 0",
        final_window=384, layers="PL.S", value_embeds="01.2", skip_from=1, back_from=2,
        model_dim=128, num_heads=6, head_dim=32, attention_scale=0.2, bigram_rows=4096,
        num_iterations=720, muon_momentum_steps=140, muon_cooldown_steps=24, adam_eps=1e-7)}

class Stage(NamedTuple):
    """A row of --stages. Lengths and windows are in tokens."""
    number: int  # from 0
    start: int
    end: int  # the step after its last one
    pack_len: int
    doc_len: int
    short_window: int
    long_window: int
    lr: float  # factor on all learning rates
    second_target: list[float]  # weight in the loss, at the start and at the end
    third_target: list[float]

@lru_cache
def stages_of(hp: Hyperparameters) -> list[Stage]:
    """The stages begin at steps 0, 483, 967 and 1450. Packs grow, because at first even small
    batches give a clear gradient (2025-11-29). Documents are cut, so that a batch has more of them
    (2025-09-03), and are shorter while windows are short (2026-02-10)."""
    rows = [row.split() for row in hp.stages.split(",")]
    last_start = hp.num_iterations - round(hp.num_iterations * hp.extension_frac)
    starts = [round(last_start * i / (len(rows) - 1)) for i in range(len(rows))]
    stages = []
    for i, (start, end) in enumerate(pairwise([*starts, hp.num_iterations])):
        pack, document, short, long, lr, *targets = rows[i]
        blocks = math.ceil(Fraction(pack) * hp.train_seq_len / BLOCK)
        second, third = ([float(Fraction(x)) for x in weight.split(":")] for weight in targets)
        stages.append(Stage(i, start, end, blocks * BLOCK, int(document), int(short), int(long),
                            float(Fraction(lr)), second, third))
    return stages

def stage_at(step: int, hp: Hyperparameters) -> Stage:
    """The last stage that has begun."""
    return [stage for stage in stages_of(hp) if stage.start <= step][-1]

def window_sizes(step: int, hp: Hyperparameters) -> tuple[int, int]:
    """The short and the long window in tokens. They grow during the run, since short distances are
    learned first and cost less (2024-11-24). The last validation looks farther still, without
    training for it, and without other rotary frequencies (2025-09-15, 2025-09-21)."""
    stage = stage_at(step, hp)
    return stage.short_window, stage.long_window if step < hp.num_iterations else hp.final_window

def target_weights(step: int, hp: Hyperparameters) -> list[float]:
    """The weights of the next three tokens in the loss. At first the model also learns from the two
    tokens after the next one (multi-token prediction, arXiv:2404.19737, 2025-12-22)."""
    stage = stage_at(step, hp)
    progress = (step - stage.start) / max(1, stage.end - stage.start)
    further = [weights[0] + (weights[-1] - weights[0]) * progress
               for weights in (stage.second_target, stage.third_target)]
    return [1.0, *further]

def lr_factor(step: int, hp: Hyperparameters) -> float:
    """The factor on every learning rate. It rises with the size of the batches (1, 1.52, 1.73).
    From step 580 to 1450, lr_floor replaces it linearly (2025-11-29, 2026-02-10)."""
    end = stages_of(hp)[-1].start
    start = int(end * (1 - hp.cooldown_frac))
    fallen = 1.0 if step >= end else max(0, step - start) / max(1, end - start)
    return stage_at(step, hp).lr * (1 - fallen) + hp.lr_floor * fallen

def muon_momentum(step: int, hp: Hyperparameters) -> float:
    """NorMuon's momentum. It rises at first, because early gradients are soon out of date
    (2024-11-06), and falls in the last steps (2025-09-30)."""
    start, end = hp.muon_momentum_start, hp.muon_momentum_end
    if step < hp.muon_momentum_steps:
        return start + step / hp.muon_momentum_steps * (end - start)
    late = step - (hp.num_iterations - hp.muon_cooldown_steps)
    fallen = min(1, max(0, late) / hp.muon_cooldown_steps)
    return end - fallen * (end - start)

def rotary_state(stage: int, hp: Hyperparameters) -> tuple[Tensor, float]:
    """The rotary frequencies [K/4], in radians per token, and the scale of attention in a stage.

    When the long window grows, slow rotations would reach angles that the model has not seen. As in
    YaRN (arXiv:2309.00071, 2025-09-10), each frequency is multiplied by a number between old window
    / new window and 1. A channel that turns at most once within the old window gets the former, one
    that turns 32 times keeps its frequency. The scale grows a little: 0.1, 0.117, 0.128, 0.132."""
    windows = [each.long_window for each in stages_of(hp)]  # final_window does not count
    exponents = torch.linspace(0, 1, hp.head_dim // 4, dtype=torch.float64)
    frequencies = hp.rope_base ** -exponents
    scale = hp.attention_scale
    for old, new in pairwise(windows[:stage + 1]):
        turns = old * frequencies / (2 * math.pi)
        kept = ((turns - 1) / 31).clamp(0, 1)
        frequencies = frequencies * (old / new + kept * (1 - old / new))
        scale *= 1 + 0.2 * math.log(new / old)
    return frequencies, scale

@lru_cache(maxsize=1)
def rotary_tables(stage: int, hp: Hyperparameters, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, K/4]. Paired heads have two positions per token. In float32 the
    angle of position 524287 would be off by up to 0.03."""
    frequencies, _ = rotary_state(stage, hp)
    positions = torch.arange(2 * max(hp.train_seq_len, hp.val_seq_len), device=device)
    angles = torch.outer(positions.double(), frequencies.to(device))
    return angles.cos().float(), angles.sin().float()

class Schedule(NamedTuple):
    """The parts of the schedule that the model sees. They are tensors, because torch.compile would
    recompile for each new value of a Python number."""
    windows: Tensor  # [2], short and long, in tokens
    cos: Tensor  # [positions, K/4]
    sin: Tensor
    scale: Tensor  # of attention
    target_weights: Tensor  # [3]

def schedule_tensors(step: int, hp: Hyperparameters, device: torch.device) -> Schedule:
    stage = stage_at(step, hp).number
    _, scale = rotary_state(stage, hp)
    return Schedule(on_device(window_sizes(step, hp), device, dtype=torch.int32),
                    *rotary_tables(stage, hp, device), on_device([scale], device)[0],
                    on_device(target_weights(step, hp), device))

# ---- Support

def on_device(numbers, device: torch.device, **options) -> Tensor:
    """A tensor of these numbers. torch.tensor would wait for the GPU."""
    return torch.stack([torch.full((), x, device=device, **options) for x in numbers])

def tokens_seen(done: int, hp: Hyperparameters) -> int:
    """The tokens of the first `done` steps."""
    stages = stages_of(hp)
    ends = [*(stage.start for stage in stages[1:]), done]
    steps = [max(0, min(done, end) - stage.start) for stage, end in zip(stages, ends)]
    return hp.micro_batches * sum(n * stage.pack_len for n, stage in zip(steps, stages))

def window_tokens(step: int, hp: Hyperparameters) -> int:
    return window_sizes(step, hp)[1]

window_tensor = schedule_tensors  # records/tools calls it by this name, as in ../../train_gpt.py

# ---- 2. The model -------------------------------------------------------------------------------

GATE_INPUTS = 12  # Gates look at this many channels (2025-08-23).

class GPT(nn.Module):
    """model(tokens_T, targets_T, schedule) returns the sum of the losses of one pack, in nats. With
    flex=True the model uses FlexAttention and must be compiled, because uncompiled FlexAttention
    ignores the block lists.

    The residual stream x_TD, the embeddings, the head and the gates are in `dtype`. All other
    parameters are float32. Scalars multiply the stream without a cast. Vectors and matrices need
    type_as."""

    # The head works on this many tokens at a time: logits [24576, 50304] in float32 take 4.6 GiB.
    LOGITS_TOKENS = 24576

    def __init__(self, hp: Hyperparameters, dtype: torch.dtype, flex: bool):
        super().__init__()
        self.hp = hp
        self.flex = flex
        self.end_of_text = hp.vocab_size - 1
        # FP8 needs a multiple of 16 rows. A multiple of 64 can be divided by 2, 4, 8, ... 64 ranks.
        vocab = math.ceil(hp.vocab_size / 64) * 64
        self.embed = Embedding(vocab, hp.model_dim, dtype)
        self.bigram_embed = Embedding(hp.bigram_rows, hp.model_dim, dtype)
        # Layers with the same digit share a value embedding; here each has its own (2026-01-26).
        digits = sorted(set(hp.value_embeds) - {"."})
        width = hp.num_heads * hp.head_dim
        self.value_tables = nn.ModuleDict({d: Embedding(vocab, width, dtype) for d in digits})
        self.layers = nn.ModuleList(Layer(hp, i, dtype) for i in range(len(hp.layers)))
        self.smear_gate = parameter(1, GATE_INPUTS, dtype=dtype)
        self.skip_gate = parameter(1, GATE_INPUTS, dtype=dtype)
        self.smear_scale = nn.Parameter(torch.tensor(0.0))
        self.skip_scale = nn.Parameter(torch.tensor(-1.5))
        self.back_scale = nn.Parameter(torch.tensor(0.5))
        # One number per layer. attn_keep and mlp_keep multiply the stream by 1.1 at first, so what
        # earlier layers have added grows (2025-11-18).
        each = torch.ones(len(hp.layers))
        self.attn_keep = nn.Parameter(each * 1.1**0.5)
        self.mlp_keep = nn.Parameter(each * 1.1**0.5)
        self.attn_add = nn.Parameter(each * 1.0)
        self.mlp_add = nn.Parameter(each * 1.0)
        self.x0_add = nn.Parameter(each * 0.0)
        self.bigram_add = nn.Parameter(each * 0.05)
        gradient_scale = TOKEN_GRADIENT_SCALE * hp.micro_batches if hp.use_fp8 else None
        self.lm_head = Head(hp.model_dim, vocab, dtype, gradient_scale)

    def forward(self, tokens_T: Tensor, targets_T: Tensor, schedule: Schedule) -> Tensor:
        """In training a token has three targets: the next token and the two after it. Targets may
        lie in the next piece of the pack. At its end they are missing, which is -1."""
        x_TD = self.features(tokens_T, schedule)
        shifted = [F.pad(targets_T[k:], (0, k), value=-1) for k in range(3)]
        targets_T3 = torch.stack(shifted, dim=-1)
        loss = 0
        for x, targets in zip(x_TD.split(self.LOGITS_TOKENS), targets_T3.split(self.LOGITS_TOKENS)):
            if self.training:
                loss += CrossEntropy.apply(self.logits(x), targets, schedule.target_weights)
            else:
                loss += F.cross_entropy(self.logits(x), targets[:, 0], ignore_index=-1,
                                        reduction="sum")
        return loss

    def features(self, tokens_T: Tensor, schedule: Schedule) -> Tensor:
        """Returns the normed residual stream [T, D] after the last layer. Only this function knows
        how layers are connected. x0 and pair are embeddings of the token and the token pair:

            start    x = x0 + bigram_add pair
            layer    x = attn_keep x + attn_add attn(norm(seen)) + x0_add x0 + bigram_add pair
                     x = mlp_keep x + mlp_add mlp(norm(x))
            layer 0  does not add pair again
            layer 6  x = x + skip_gate skip, in place of attention
            end      norm(x - back_scale back)

        Up to layer 7, whose output is back, seen = x. Later layers have seen = back (2026-03-06).
        They need back more than the head does, so half of it is removed (2025-10-04). Each layer
        gets x0 and pair anew (2024-11-06, 2026-01-19). skip is the output of layer 3, which has
        the long window (2024-12-17, 2025-11-18, 2025-12-29)."""
        masks = self.block_masks(tokens_T, schedule.windows)
        rotations = rotations_of(schedule, len(tokens_T), self.hp.head_dim)
        e_TD = self.embed(tokens_T)
        # Smear: each token adds some of the embedding of the token before it (2025-09-18).
        gate_T1 = torch.sigmoid(F.linear(e_TD[1:, :GATE_INPUTS], self.smear_gate))
        smeared = e_TD[1:] + self.smear_scale * gate_T1 * e_TD[:-1]
        x0_TD = norm(torch.cat((e_TD[:1], smeared)))
        pair_TD = self.bigram_embed(bigram_rows(tokens_T, self.hp.bigram_rows))
        gate_T1 = 2 * torch.sigmoid(F.linear(x0_TD[:, :GATE_INPUTS], self.skip_gate))
        skip_gate_T1 = torch.sigmoid(self.skip_scale) * gate_T1

        attn_keep, mlp_keep, attn_add, mlp_add, x0_add, bigram_add = (
            numbers.type_as(x0_TD).unbind() for numbers in
            (self.attn_keep, self.mlp_keep, self.attn_add, self.mlp_add, self.x0_add,
             self.bigram_add))
        x_TD = x0_TD + bigram_add[0] * pair_TD
        skip_TD = back_TD = None
        for i, layer in enumerate(self.layers):
            if layer.attn is None:
                x_TD = x_TD + skip_gate_T1 * skip_TD
            else:
                added_TD = x0_add[i] * x0_TD
                if i > 0:
                    added_TD = added_TD + bigram_add[i] * pair_TD
                seen_TD = norm(x_TD if back_TD is None else back_TD)
                digit = self.hp.value_embeds[i]
                value_embed = self.value_tables[digit](tokens_T) if digit != "." else None
                kind = self.hp.layers[i]
                y_TD = layer.attn(seen_TD, value_embed, rotations[kind], masks[kind])
                x_TD = attn_keep[i] * x_TD + attn_add[i] * y_TD + added_TD
            x_TD = mlp_keep[i] * x_TD + mlp_add[i] * layer.mlp(norm(x_TD))
            if i == self.hp.skip_from:
                skip_TD = x_TD
            if i == self.hp.back_from:
                back_TD = x_TD
            assert x_TD.dtype == x0_TD.dtype, f"layer {i} lacks a cast (type_as)"
        return norm(x_TD - self.back_scale * back_TD)

    def block_masks(self, tokens_T: Tensor, windows: Tensor) -> dict:
        short, long = build_block_masks(tokens_T, self.end_of_text, windows, self.flex)
        # Paired heads see two rows for each token. Only the first one can begin a document.
        rows = F.pad(tokens_T[:, None], (0, 1), value=-1).flatten()
        (paired,) = build_block_masks(rows, self.end_of_text, windows[:1], self.flex)
        return {"S": short, "L": long, "P": paired}

    def logits(self, x_TD: Tensor) -> Tensor:
        """Caps logits smoothly between 0 and 23, so that no confident error costs too much
        (2024-11-06). A logit of 0 becomes 15.2, which leaves more room below it than above, since
        most tokens are improbable (2025-12-26)."""
        return 23 * torch.sigmoid((self.lm_head(x_TD).float() + 5) / 7.5)

def bigram_rows(tokens_T: Tensor, rows: int) -> Tensor:
    """The row of the pair of each token and the one before it, by a hash, so some pairs share a row
    (2026-01-19). The first token of a pack has the last row. As in the record, the second token's
    hash uses the number of that row, and 27191 times it overflows int32."""
    last = rows - 1
    seen_T = torch.cat((torch.full_like(tokens_T[:1], last), tokens_T[1:]))
    hashed_T = ((36313 * seen_T[1:]) ^ (27191 * seen_T[:-1])) % last
    return torch.cat((seen_T[:1], hashed_T))

class Layer(nn.Module):
    """Attention, except where the table of layers says ".", and an MLP."""

    def __init__(self, hp: Hyperparameters, index: int, dtype: torch.dtype):
        super().__init__()
        self.attn = CausalSelfAttention(hp, index, dtype) if hp.layers[index] != "." else None
        self.mlp = MLP(hp.model_dim)

class CausalSelfAttention(nn.Module):
    """Attention with normed queries and keys, which bounds the scores (arXiv:2010.04245). Its four
    matrices are separate parameters, because NorMuon orthogonalizes each by itself.

    - Value embedding: a second embedding of the token is added to the values, because layers lose
      track of the token (arXiv:2410.17897, 2024-12-04). A gate per head decides how much of it
      (2025-12-29). In paired layers the gate sees 12 channels of x. In the others it sees 6 of x
      and 6 of the embedding (2026-02-03).
    - Key offset: in layers with the long window, the unrotated half of each key is that of the
      token before. So one layer suffices to find what followed an earlier occurrence of a token
      (2025-12-14).
    - Paired heads: six heads on T tokens become three heads on 2T rows (`rotate` has a table). A
      head sees both rows of an earlier token, so it chooses among twice as many keys. The window
      counts rows, so it reaches half as far (2026-01-07).
    - Gate: each head's output is multiplied by a number between 0 and 1, which depends on the
      token, so that a head can abstain (2025-08-23)."""

    def __init__(self, hp: Hyperparameters, index: int, dtype: torch.dtype):
        super().__init__()
        self.kind = hp.layers[index]
        self.heads = hp.num_heads
        width = hp.num_heads * hp.head_dim
        self.q, self.k, self.v = (parameter(width, hp.model_dim) for _ in range(3))
        self.proj = parameter(hp.model_dim, width)
        self.scales = nn.Parameter(torch.tensor([0.5, 1.0]))  # of q, k, v and of proj (2025-12-10)
        self.gate = parameter(hp.num_heads, GATE_INPUTS, dtype=dtype)
        if hp.value_embeds[index] != ".":
            self.value_gate = parameter(hp.num_heads, GATE_INPUTS, dtype=dtype)

    def forward(self, x_TD: Tensor, value_embed: Tensor | None, rotation, mask) -> Tensor:
        T = len(x_TD)
        weight = self.scales[0] * torch.cat((self.q, self.k, self.v))
        qkv = F.linear(x_TD, weight.type_as(x_TD)).view(T, 3, self.heads, -1)
        q, k, v = qkv.unbind(1)  # each [T, H, K]
        cos, sin, scale = rotation
        q = (scale * rotate(norm(q), cos, sin)).type_as(x_TD)
        k = rotate(norm(k), cos, sin).type_as(x_TD)
        if self.kind == "L":
            rotated, other = k.chunk(2, dim=-1)
            k = torch.cat((rotated, torch.cat((other[:1], other[:-1]))), dim=-1)
        if value_embed is not None:
            seen = x_TD[:, :GATE_INPUTS]
            if self.kind != "P":
                half = GATE_INPUTS // 2
                seen = torch.cat((x_TD[:, :half], value_embed[:, :half]), dim=-1)
            gate_TH1 = 2 * torch.sigmoid(F.linear(seen, self.value_gate))[:, :, None]
            v = v + gate_TH1 * value_embed.view_as(v)
        if self.kind == "P":
            q, k, v = (x.reshape(2 * T, self.heads // 2, -1) for x in (q, k, v))
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, rows, K]
        y = attend(q, k, v, mask).squeeze(0).transpose(0, 1)
        gate_TH1 = torch.sigmoid(F.linear(x_TD[:, :GATE_INPUTS], self.gate))[:, :, None]
        y_THK = y.reshape(T, self.heads, -1) * gate_TH1
        return F.linear(y_THK.flatten(1), (self.scales[1] * self.proj).type_as(x_TD))

def rotations_of(schedule: Schedule, T: int, head_dim: int) -> dict:
    """Cosines, sines and the scale of attention for each kind of layer. Cosines are [T, 1, 1, K],
    and for paired heads [T, 1, 2, K], for even and odd heads."""
    rotations = {}
    for kinds, heads in (("SL", 1), ("P", 2)):
        c, s = (x[:heads * T].view(T, 1, heads, -1) for x in (schedule.cos, schedule.sin))
        unrotated = head_dim - 2 * c.size(-1)  # channels with cosine 1, sine 0
        cos = F.pad(torch.stack((c, c), dim=-1).flatten(-2), (0, unrotated), value=1.0)
        sin = F.pad(torch.stack((s, -s), dim=-1).flatten(-2), (0, unrotated))
        rotations |= dict.fromkeys(kinds, (cos, sin, schedule.scale))
    return rotations

def rotate(x_THK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (arXiv:2104.09864). Channels 2i and 2i + 1, for i < K/4, are rotated as a
    pair: a, b becomes a cos + b sin, b cos - a sin. The second half of a head is not rotated, so it
    matches content at any distance (2024-12-17). The result is float32. Token t has position t. If
    six heads are paired, then as in the record even heads have 2t, odd ones 2t + 1:

        row in attention   heads of token t   positions
        2t                 0, 1, 2            2t, 2t + 1, 2t
        2t + 1             3, 4, 5            2t + 1, 2t, 2t + 1
    """
    x = x_THK.float().unflatten(1, (-1, cos.size(2)))  # [T, H, 1, K] or [T, H/2, 2, K]
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return (x * cos + swapped * sin).flatten(1, 2)

class MLP(nn.Module):
    """ReLU^2 (arXiv:2109.08668). Both matrices are [4D, D], so a row belongs to a hidden unit in
    both, and NorMuon normalizes the rows of both (2025-07-18)."""

    def __init__(self, dim: int):
        super().__init__()
        self.fc = parameter(4 * dim, dim)
        self.proj = parameter(4 * dim, dim)

    def forward(self, x_TD: Tensor) -> Tensor:
        return F.relu(F.linear(x_TD, self.fc.type_as(x_TD))).square() @ self.proj.type_as(x_TD)

class Embedding(nn.Module):
    """An embedding, stored in `dtype`: 251,520 rows in float32 would take 0.8 GB."""

    def __init__(self, num_embeddings: int, width: int, dtype: torch.dtype):
        super().__init__()
        self.weight = parameter(num_embeddings, width, dtype=dtype)

    def forward(self, tokens_T: Tensor) -> Tensor:
        return F.embedding(tokens_T, self.weight)

class Head(nn.Module):
    """The output head, a linear layer without bias in `dtype`. If gradient_scale is given, training
    multiplies in FP8. Validation never does."""

    def __init__(self, in_features: int, out_features: int, dtype, gradient_scale: float | None):
        super().__init__()
        self.weight = parameter(out_features, in_features, dtype=dtype)
        self.gradient_scale = gradient_scale

    def forward(self, x: Tensor) -> Tensor:
        if self.gradient_scale and self.training:
            return FP8Linear.apply(x, self.weight, self.gradient_scale)
        return F.linear(x, self.weight)

def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))

# ---- 3. Block masks and attention ---------------------------------------------------------------

def build_block_masks(tokens_T: Tensor, end_of_text: int, window: Tensor, flex: bool) -> list:
    """Returns a mask for each window, for FlexAttention (arXiv:2412.05496) if flex is True. A token
    sees itself and the earlier tokens of its document, as far back as the window reaches. With a
    window of W, as in FlashAttention (2025-09-03), it sees W earlier tokens.

    For each query block, FlexAttention needs a list of the full key blocks and a list of the
    partial ones. In a full block all pairs of tokens are visible. In a partial block it asks `sees`
    about each pair. All other blocks are skipped, which saves time. Here a second document begins
    within block 1, and W is 256 (p: partial, f: full, w: beyond the window):

        query block   key block 0 1 2 3 4
                  0             p . . . .     the diagonal is partial: no token sees the future
                  1             p p . . .     only tokens of the first document see block 0
                  2             . p p . .     block 0 is in the first document only
                  3             . p f p .     of block 1, only some tokens are within reach
                  4             . w p f p     all tokens of block 1 are more than 256 tokens away
    """
    document_T = (tokens_T == end_of_text).cumsum(0, dtype=torch.int32)
    block_N = torch.arange(len(tokens_T) // BLOCK, dtype=torch.int32, device=tokens_T.device)
    distance_NN = block_N[:, None] - block_N  # [query block, key block]
    first_N = document_T[::BLOCK]  # the document of each block's first token
    last_N = document_T[BLOCK - 1::BLOCK]
    # Without the window: document numbers never decrease. So some query and key share a document if
    # the key block is not later, and ends in the query block's first document or after it. All do
    # if the query block is later, and ends in the document in which the key block begins.
    some_document_NN = (distance_NN >= 0) & (last_N >= first_N[:, None])
    same_document_NN = (distance_NN > 0) & (first_N == last_N[:, None])

    def make_mask(window: Tensor):
        # If you change this rule, change visible_NN and full_NN to match, because FlexAttention
        # calls it in partial blocks only. `./run.sh honest` compares them with `sees`.
        def sees(batch, head, query, key):
            near = (key <= query) & (query - key <= window)
            return near & (document_T[query] == document_T[key])

        # Between blocks at distance d, tokens are 128 d - 127 to 128 d + 127 apart.
        visible_NN = some_document_NN & (BLOCK * distance_NN - (BLOCK - 1) <= window)
        full_NN = same_document_NN & (BLOCK * distance_NN + (BLOCK - 1) <= window)
        if not flex:
            return plain_mask(visible_NN, sees)
        partial_NN = visible_NN & ~full_NN
        # The backward pass needs the query blocks of each key block.
        keys, full_keys = ordered(partial_NN), ordered(full_NN)
        queries, full_queries = ordered(partial_NN.T), ordered(full_NN.T)
        return BlockMask((len(tokens_T), len(tokens_T)), *keys, *full_keys, *queries,
                         *full_queries, (BLOCK, BLOCK), sees)

    return [make_mask(each) for each in window.flatten().unbind()]

def attend(q: Tensor, k: Tensor, v: Tensor, mask) -> Tensor:
    """Attention for q, k and v [1, heads, rows, K]. FlexAttention has no backward pass on CPUs."""
    if isinstance(mask, BlockMask):
        return flex_attention(q, k, v, block_mask=mask, scale=1.0)
    outputs = []
    for q_block, (key_range, bias) in zip(q.split(BLOCK, dim=2), mask):
        scores = q_block @ k[:, :, key_range].mT + bias.to(q.dtype)
        outputs.append(scores.softmax(-1) @ v[:, :, key_range])
    return torch.cat(outputs, dim=2)

# ---- Support

def ordered(chosen_NN: Tensor) -> tuple[Tensor, Tensor]:
    """For each row: the number of chosen columns, and a list of all columns, the chosen ones first.
    For the row [0, 1, 0, 1], that is 2 and [1, 3, 0, 2]."""
    column_N = torch.arange(len(chosen_NN), dtype=torch.int32, device=chosen_NN.device)
    # place_NN is each column's place in the list. A sort would take minutes to compile.
    count_NN = chosen_NN.cumsum(1)
    place_NN = torch.where(chosen_NN, count_NN - 1, count_NN[:, -1:] + column_N - count_NN)
    order_NN = torch.zeros(chosen_NN.shape, dtype=torch.int32, device=chosen_NN.device)
    order_NN.scatter_(1, place_NN, column_N.expand_as(place_NN))
    return count_NN[:, -1].int()[None, None], order_NN[None, None]  # [batch, head, ...]

def plain_mask(visible_NN: Tensor, sees) -> list[tuple[slice, Tensor]]:
    """For each query block a slice of keys and a bias [128, keys]: 0 where visible, else -inf."""
    position_T = torch.arange(len(visible_NN) * BLOCK, device=visible_NN.device)
    mask = []
    for query, visible_N in zip(position_T.split(BLOCK), visible_NN):
        key_range = slice(int(visible_N.nonzero()[0]) * BLOCK, int(query[-1]) + 1)
        key = position_T[key_range]
        visible = visible_N[key // BLOCK] & sees(None, None, query[:, None], key)
        mask.append((key_range, torch.where(visible, 0.0, -torch.inf)))
    return mask

# ---- 4. The head: FP8 and the loss --------------------------------------------------------------

# The head takes a large part of all arithmetic, and FP8 halves its time (2025-01-13). But FP8 has a
# small range, so each tensor is multiplied by a scale before the cast (2025-12-19):
#
#     tensor     format   largest value                      times scale    maximum of the format
#     input      e4m3     27.7 = sqrt(768) after the norm    124              448
#     weight     e4m3     1.6, to which it is clamped        448              448
#     gradient   e5m2     1.75 * 23 / 30 = 1.34              801            57344
#
# (e4m3 has 4 exponent bits and 3 mantissa bits, e5m2 has 5 and 2.) The gradient is that of a
# pack's summed loss. train_step divides it by 8, so FP8Linear multiplies by 8 * 597 (448 / 0.75).
INPUT_SCALE, WEIGHT_SCALE, TOKEN_GRADIENT_SCALE = 448 / 100, 448 / 1.6, 448 / 0.75

def to_e4m3(x: Tensor, scale: float) -> Tensor:
    return (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)

def fp8_matmul(a: Tensor, b: Tensor, scale: float, dtype: torch.dtype, fast: bool) -> Tensor:
    """Computes a @ b.T / scale. FP8 units sum along the rows of a and b, which must be
    contiguous. fast=True sums less precisely, which only the forward pass tolerates."""
    one, inverse = (torch.full((), x, device=a.device) for x in (1.0, 1 / scale))
    return torch._scaled_mm(a, b.T, one, inverse, out_dtype=dtype, use_fast_accum=fast)

class FP8Linear(torch.autograd.Function):
    """Computes x_TD @ w_VD.T with FP8 matmuls, forward and backward."""

    @staticmethod
    def forward(ctx, x_TD: Tensor, w_VD: Tensor, gradient_scale: float) -> Tensor:
        x8_TD = to_e4m3(x_TD, INPUT_SCALE)
        w8_VD = to_e4m3(w_VD, WEIGHT_SCALE)
        ctx.scale = gradient_scale
        ctx.save_for_backward(x8_TD, w8_VD)
        return fp8_matmul(x8_TD, w8_VD, INPUT_SCALE * WEIGHT_SCALE, x_TD.dtype, fast=True)

    @staticmethod
    def backward(ctx, grad_TV: Tensor):
        x8_TD, w8_VD = ctx.saved_tensors
        g8_TV = (grad_TV.float() * ctx.scale).to(torch.float8_e5m2).contiguous()
        g8_VT, x8_DT, w8_DV = (x.T.contiguous() for x in (g8_TV, x8_TD, w8_VD))
        grad_x_TD = fp8_matmul(g8_TV, w8_DV, ctx.scale * WEIGHT_SCALE, grad_TV.dtype, fast=False)
        grad_w_VD = fp8_matmul(g8_VT, x8_DT, ctx.scale * INPUT_SCALE, grad_TV.dtype, fast=False)
        return grad_x_TD, grad_w_VD, None

class CrossEntropy(torch.autograd.Function):
    """The sum over all tokens and their three targets of weight * -log softmax(logits_TV)[target].
    A target of -1 does not count (2025-12-22). Logits are below 23, so no maximum is subtracted
    before exp.

    The gradient is coded by hand for two reasons. As in the record, it is wrong where targets are
    missing: the softmax always counts with all three weights. And the compiler would fuse the
    backward pass of F.cross_entropy, which sums over the vocabulary, with FP8Linear's cast and
    transposed copy into one slow kernel."""

    @staticmethod
    def forward(ctx, logits_TV: Tensor, targets_T3: Tensor, weights_3: Tensor) -> Tensor:
        exp_TV = (logits_TV * math.log2(math.e)).exp2_()
        sum_T1 = exp_TV.sum(-1, keepdim=True)
        places_T3 = targets_T3.clamp(min=0)
        weights_T3 = torch.where(targets_T3 < 0, 0.0, weights_3)
        ctx.save_for_backward(exp_TV, sum_T1, places_T3, weights_T3, weights_3)
        return (weights_T3 * (sum_T1.log() - logits_TV.gather(-1, places_T3))).sum()

    @staticmethod
    def backward(ctx, grad: Tensor):
        exp_TV, sum_T1, places_T3, weights_T3, weights_3 = ctx.saved_tensors
        grad_TV = torch.zeros_like(exp_TV).scatter_add_(-1, places_T3, -weights_T3)
        grad_TV.addcmul_(exp_TV, weights_3.sum() / sum_T1)  # softmax - target, weighted
        return grad_TV.mul_(grad), None, None

# ---- 5. Parameters ------------------------------------------------------------------------------
# The modules above create parameters. A table says how each is initialized and trained.

def parameter(*shape: int, dtype=torch.float32) -> nn.Parameter:
    """A parameter filled with NaN, so that one missed by draw_weights is noticed."""
    return nn.Parameter(torch.full(shape, torch.nan, dtype=dtype))

def zero(x: Tensor, generator):
    x.zero_()

def normal(deviation: float):
    return lambda x, generator: x.normal_(0, deviation, generator=generator)

def uniform(x: Tensor, generator):  # the standard deviation is 0.5 / sqrt(number of inputs)
    bound = 0.5 * math.sqrt(3 / x.size(-1))
    x.uniform_(-bound, bound, generator=generator)

# Each parameter follows the first rule whose pattern matches its full name. A rule names a function
# for the initial values, the optimizer (section 6) and its options. `rate` multiplies the learning
# rate and so weight decay, in Adam by its square. `decay` multiplies Adam's weight decay. `every=4`
# updates at every fourth step, by the sum of the gradients; the default is 2 in Adam, 1 in NorMuon.
# Initial `None` keeps the values that the module set (only for vectors and scalars). Who updates
# what, with eight ranks:
#
#     head, embeddings       each rank an eighth of the rows
#     NorMuon's matrices     each rank some of the matrices
#     gates, scalars         every rank all of them
PARAMETERS = [
    # names, initial values, one of the shapes; optimizer and its options
    (r"(lm_head|embed)\.weight", normal(0.005),  # [50304, 768]
     "TiedAdam", dict(rate=1, betas=(0.5, 0.95), decay=150)),
    (r"value_tables\.\d\.weight", normal(0.01),  # [50304, 768]
     "Adam", dict(rate=75, betas=(0.75, 0.95), decay=5)),
    (r"bigram_embed\.weight", zero,  # [251520, 768]
     "Adam", dict(rate=75, betas=(0.75, 0.95), decay=5)),
    (r"layers\..*\.attn\.(gate|value_gate)", zero,  # [6, 12]
     "Adam", dict(rate=1, betas=(0.9, 0.99), decay=1)),
    (r"smear_gate", zero,  # [1, 12]
     "Adam", dict(rate=0.01, betas=(0.9, 0.99))),
    (r"skip_gate", zero,  # [1, 12]
     "Adam", dict(rate=0.05, betas=(0.9, 0.99))),
    (r"(smear|skip|back)_scale|layers\..*\.attn\.scales", None,  # [], [2]
     "Adam", dict(rate=5, betas=(0.9, 0.99))),
    (r"(attn|mlp)_keep", None,  # [11]
     "Adam", dict(rate=5, betas=(0.9, 0.95))),
    (r"(attn|mlp|x0|bigram)_add", None,  # [11]
     "Adam", dict(rate=1, betas=(0.9, 0.95))),
    (r"layers\..*\.attn\.(q|k|v|proj)", uniform,  # [768, 768]
     "NorMuon", dict(rate=1)),
    (r"layers\..*\.mlp\.fc", uniform,  # [3072, 768]
     "NorMuon", dict(rate=1)),
    (r"layers\..*\.mlp\.proj", zero,  # [3072, 768]
     "NorMuon", dict(rate=2)),
]

# As long as they are tied, they have the same weights.
START_OF = {"embed.weight": "lm_head.weight"}

# ---- Support

def find_rules(model: nn.Module) -> dict[str, int]:
    """{name of a parameter: index of its rule in PARAMETERS}"""
    rules = {}
    for name, p in model.named_parameters():
        fitting = [i for i, (pattern, *_) in enumerate(PARAMETERS) if re.fullmatch(pattern, name)]
        require(fitting, f"PARAMETERS has no rule for {name} {tuple(p.shape)}")
        rules[name] = fitting[0]
    for i, (pattern, *_) in enumerate(PARAMETERS):
        require(i in rules.values(), f"PARAMETERS: no parameter follows the rule {pattern}")
    return rules

@torch.no_grad()
def draw_weights(model: nn.Module, seed: int):
    """Initializes the parameters by their rules. The random numbers depend only on seed and name.
    So scripts with the same seed start from equal weights where names and shapes agree, which
    lowers the noise of paired comparisons."""
    for name, rule in find_rules(model).items():
        p = model.get_parameter(name)
        _, initial, _, _ = PARAMETERS[rule]
        if initial is None:
            require(p.ndim < 2 and not p.isnan().any(), f"PARAMETERS: {name} needs initial values")
            continue
        require(p.isnan().all(), f"{name} has values, which its rule in PARAMETERS would replace: "
                "create it with parameter(...), and let the rule say how it starts")
        values = torch.empty(p.shape)  # on the CPU; devices draw different numbers
        drawn_as = START_OF.get(name, name)
        number = int(sha256(f"{seed} {drawn_as}".encode()).hexdigest()[:15], 16)
        initial(values, torch.Generator().manual_seed(number))
        p.copy_(values)

# ---- 6. Ranks and optimizers --------------------------------------------------------------------
# torchrun starts one process, called a rank, for each GPU. Every rank holds all weights and
# computes gradients on its own part of the batch.

if not hasattr(dist, "all_gather_single"):  # torch 2.13 renamed these two functions
    dist.all_gather_single = dist.all_gather_into_tensor
    dist.reduce_scatter_single = dist.reduce_scatter_tensor

class Pending(NamedTuple):
    """A tensor that ranks may still be exchanging. wait() returns it. On a GPU, Python does not
    wait; only the GPU's later work does."""
    tensor: Tensor
    work: "dist.Work | None" = None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.tensor

@dataclass(frozen=True)
class World:
    """The ranks that train together, as seen from one of them. A tensor of two or more dimensions
    is sharded along the first if the ranks can divide it equally: with two ranks, each updates
    25,152 rows of [50304, 768]. For all other tensors every rank does the whole update."""
    rank: int  # the number of this process, from 0
    size: int
    device: torch.device

    def is_sharded(self, whole: Tensor) -> bool:
        return self.size > 1 and whole.ndim > 1 and len(whole) % self.size == 0

    def shard(self, whole: Tensor) -> Tensor:
        """A view of the rows that this rank updates."""
        return whole.chunk(self.size)[self.rank] if self.is_sharded(whole) else whole

    def reduce_scatter(self, whole: Tensor) -> Pending:
        """Sums a tensor over the ranks. If it is sharded, each rank receives only its rows."""
        if not self.is_sharded(whole):
            return self.all_reduce(whole)
        local = torch.empty_like(self.shard(whole))
        return Pending(local, dist.reduce_scatter_single(local, whole, async_op=True))

    def all_gather(self, whole: Tensor) -> Pending:
        """Fetches the rows of the other ranks, in place."""
        if not self.is_sharded(whole):
            return Pending(whole)
        return Pending(whole, dist.all_gather_single(whole, self.shard(whole), async_op=True))

    def all_reduce(self, whole: Tensor) -> Pending:
        """Sums a tensor over the ranks, in place."""
        return Pending(whole, dist.all_reduce(whole, async_op=True) if self.size > 1 else None)

    def all_reduce_together(self, tensors: list[Tensor]) -> list[Pending]:
        """Sums small tensors over the ranks in one exchange, because every exchange takes some 20
        microseconds, however small it is."""
        flat, work = self.all_reduce(torch.cat([x.flatten() for x in tensors]))
        parts = flat.split([x.numel() for x in tensors])
        return [Pending(part.view_as(x), work) for part, x in zip(parts, tensors)]

class Optimizer:
    """Trains some of the parameters. The ranks share the arithmetic, as in ZeRO (arXiv:1910.02054),
    but each keeps tensors of full size. An update has three phases. Each runs for all optimizers
    before the next one starts, so that one computes while another's tensors travel. On two ranks:

                      rank 0                         rank 1
        begin(step)   sends its gradients   <---->   sends its gradients; both get sums
        update(step)  computes the first half        computes the second half
                      sends it              <---->   sends it
        finish(step)  has everything                 has everything

    Adam changes the weights in update(). NorMuon computes changes there, and applies them in
    finish(). Only update() sees sums over all ranks, and for a sharded tensor just this rank's
    rows.

    `state` is what an optimizer remembers: each name has a list of tensors, one per parameter and
    with as many rows, or in NorMuon one padded stack. It is saved, loaded on resume, and restored
    after the warm-up. A rank uses only its own rows, world.shard(tensor)."""

    def __init__(self, params: dict, hp: Hyperparameters, world: World, lr: float, every: int):
        self.params = params
        self.hp = hp
        self.world = world
        self.peak_lr = lr
        self.every = every  # in steps; gradients add up in between
        self.state = {}

    def lr(self, step: int) -> float:
        return self.peak_lr * lr_factor(step, self.hp)

    # The rest is support.

    def numbers(self, *values: float) -> list[Tensor]:
        """Numbers that change between steps, for a compiled function."""
        return [torch.full((), x, device=self.world.device) for x in values]

    def compiled(self, function):
        """The function, on a GPU compiled into few kernels."""
        if self.world.device.type != "cuda":
            return function
        torch._dynamo.config.recompile_limit = 64  # one program for each optimizer
        return torch.compile(function, dynamic=False, fullgraph=True)

    def gather_state(self):
        for tensors in self.state.values():
            for x, p in zip(tensors, self.params.values(), strict=True):
                assert (x.ndim, x.shape[:1]) == (p.ndim, p.shape[:1]), f"{x.shape} for {p.shape}"
                self.world.all_gather(x).wait()

    def gather_gradients(self) -> dict[str, Tensor]:
        """Gradients that wait for the next update. Rank 0 gets the sum over all, the others 0."""
        for p in self.params.values():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            self.world.all_reduce(p.grad).wait()
            if self.world.rank > 0:
                p.grad.zero_()
        return {name: p.grad for name, p in self.params.items()}

class Adam(Optimizer):
    """Adam (arXiv:1412.6980). By default it updates at odd steps, by the summed gradients of two
    steps, because these parameters tolerate larger batches (2025-09-30). Its state is float32
    (2025-12-31). For one parameter:

        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        change = lr * correction * mean / (sqrt(square) + eps)
        weight -= change, and also lr**2 * 0.005 * decay * weight, where change has the same sign

    This is cautious weight decay (arXiv:2510.12402, 2025-12-18): a weight decays only where the
    change makes it smaller as well. In bfloat16, in which gradients add up too, a change of less
    than 1/512 of a weight is lost."""

    def __init__(self, params, hp, world, rate, betas, decay=0.0, every=2):
        super().__init__(params, hp, world, hp.adam_lr * rate, every)
        self.betas = betas
        self.decay = decay
        for name in ("mean", "mean_square"):
            self.state[name] = [torch.zeros(p.shape, device=p.device) for p in params.values()]
        self.apply = self.compiled(adam_update)

    def begin(self, step: int):
        self.pending_sums = self.sum_gradients([p.grad for p in self.params.values()], step)

    def sum_gradients(self, gradients: list[Tensor], step: int) -> list[Pending]:
        if any(map(self.world.is_sharded, gradients)):
            return [self.world.reduce_scatter(x) for x in gradients]
        return self.world.all_reduce_together(gradients)

    def update(self, step: int):
        # A tied head shares its sum with the embedding, so do not change it in place. detach makes
        # two tensor objects, or torch.compile would recompile when they are untied.
        gradients = [pending.wait().detach() for pending in self.pending_sums]
        self.pending_sums = []
        local = [self.world.shard(p.detach()) for p in self.params.values()]
        means, squares = ([self.world.shard(x) for x in self.state[name]]
                          for name in ("mean", "mean_square"))
        lr, (beta1, beta2) = self.lr(step), self.betas
        count = (step + 1) // self.every  # of updates since step 0, with this one
        size = lr * ((1 - beta2**count)**0.5 / (1 - beta1**count))
        decay = lr * lr * self.hp.adam_decay * self.decay
        self.apply(local, gradients, means, squares, *self.numbers(size, decay), self.betas,
                   self.hp.adam_eps)
        self.pending_params = [self.world.all_gather(p.detach()) for p in self.params.values()]

    def finish(self, step: int):
        for pending in self.pending_params:
            pending.wait()

def adam_update(params, gradients, means, squares, size: Tensor, decay: Tensor, betas, eps):
    """Updates lists of tensors in place."""
    for p, gradient, mean, square in zip(params, gradients, means, squares, strict=True):
        gradient, weight = gradient.float(), p.float()
        mean.lerp_(gradient, 1 - betas[0])
        square.lerp_(gradient.square(), 1 - betas[1])
        change = size * mean / (square.sqrt() + eps)
        p.copy_(weight - change - torch.where(change * weight > 0, decay * weight, 0.0))

class TiedAdam(Adam):
    """Trains the embedding and the output head, which are one matrix at first (2025-12-19) and two
    in the last third of the run (2025-12-22). As long as they are tied, both get the sum of their
    gradients. They also start equal, so they and their Adam state stay equal."""

    def is_tied(self, step: int) -> bool:
        """The first update in untie_stage, at step 967, is still tied, as in the record."""
        return step - self.every < untie_start(self.hp)

    def sum_gradients(self, gradients, step):
        if not self.is_tied(step):
            return super().sum_gradients(gradients, step)
        embedding, head = gradients
        return [self.world.reduce_scatter(embedding + head)] * 2

def untie_start(hp: Hyperparameters) -> int:
    return stages_of(hp)[hp.untie_stage].start

class NorMuon(Optimizer):
    """Muon (https://kellerjordan.github.io/posts/muon/) with normalized rows (arXiv:2510.05491,
    2025-10-24) and cautious weight decay (2025-11-10). For one matrix:

        momentum = beta * momentum + (1 - beta) * gradient
        ahead = beta * momentum + (1 - beta) * gradient  # as in Nesterov momentum
        x = polar_express(ahead), and each row is divided by its usual size
        weight -= lr * x, and also 1.2 * muon_lr * lr_factor * lr * weight, where signs agree

    A few directions of a gradient are usually much larger than all the others. Muon makes all
    directions of the update about equally large, so that small ones are learned too. Some rows
    (hidden units) still get larger updates than others, which the second normalization mends.

    The rate of a tall matrix is multiplied by the square root of rows / columns: 2 for both
    matrices of the MLP. Ranks exchange updates, in `dtype`, not the float32 weights.

    The parameters have one shape. Gradients, updates and momentum lie in stacks, padded with zeros
    so that the ranks can divide them. With eight ranks:

        11 matrices [3072, 768] --> stack [16, 3072, 768] --> two matrices for each rank
    """

    def __init__(self, params, hp, world, rate, every=1):
        ((rows, columns),) = {p.shape for p in params.values()}
        lr = hp.muon_lr * rate * max(1, rows / columns) ** 0.5
        super().__init__(params, hp, world, lr, every)
        assert all(p.element_size() >= 4 for p in params.values()), "16 bits lose small updates"
        length = math.ceil(len(params) / world.size) * world.size
        device = world.device
        # Gradients are summed over the ranks in the dtype of the activations.
        self.gradients = torch.zeros(length, rows, columns, dtype=getattr(torch, hp.dtype),
                                     device=device)
        self.updates = torch.zeros_like(self.gradients)
        self.state["momentum"] = torch.zeros(length, rows, columns, device=device)
        # The columns of a wide matrix play the part of rows.
        lines = (rows, 1) if rows >= columns else (1, columns)
        self.state["mean_square"] = torch.zeros(length, *lines, device=device)
        self.compute = self.compiled(normuon_update)
        self.apply = self.compiled(apply_updates)

    def begin(self, step: int):
        for gradient, p in zip(self.gradients, self.params.values()):
            gradient.copy_(p.grad)
        self.pending_sum = self.world.reduce_scatter(self.gradients)

    def update(self, step: int):
        gradients = self.pending_sum.wait()
        momentum, square = (self.world.shard(self.state[x]) for x in ("momentum", "mean_square"))
        (beta,) = self.numbers(muon_momentum(step, self.hp))
        updates = self.compute(gradients, momentum, square, beta, self.hp.muon_beta2)
        self.world.shard(self.updates).copy_(updates)
        self.pending_updates = self.world.all_gather(self.updates)

    def finish(self, step: int):
        params = list(self.params.values())
        updates = self.pending_updates.wait()[:len(params)].unbind()
        lr = self.lr(step)
        decay = self.hp.muon_decay * self.hp.muon_lr * lr_factor(step, self.hp) * lr
        self.apply([p.detach() for p in params], updates, *self.numbers(lr, decay))

    def gather_state(self):
        for stack in self.state.values():
            assert len(stack) == len(self.updates) and stack.ndim > 1, "not a padded stack"
            self.world.all_gather(stack).wait()

def normuon_update(gradients: Tensor, momentum: Tensor, square: Tensor, beta: Tensor, beta2: float):
    """Returns the updates of a stack of matrices [n, rows, columns]. Changes momentum and square
    in place. Dividing each row by the root of its mean square changes the size of the whole update,
    which is then restored."""
    dtype = gradients.dtype
    gradients = gradients.float()
    momentum.lerp_(gradients, 1 - beta)
    x = polar_express(gradients.lerp(momentum, beta).to(dtype))
    dim = -1 if x.size(-2) >= x.size(-1) else -2
    row_square = x.float().square().mean(dim, keepdim=True)
    square.lerp_(row_square, 1 - beta2)
    inverse = square.clamp(min=1e-10).rsqrt()
    size = row_square.sum((-2, -1), keepdim=True).sqrt()
    new_size = (row_square * inverse.square()).sum((-2, -1), keepdim=True).sqrt()
    return x * (inverse * size / new_size.clamp(min=1e-10)).to(dtype)

def apply_updates(params: list, updates, lr: Tensor, decay: Tensor):
    for p, update in zip(params, updates):
        x = update.float()
        p.sub_(torch.where(x * p >= 0, decay * p, 0.0)).sub_(lr * x)

POLAR_EXPRESS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]

def polar_express(x: Tensor) -> Tensor:
    """Replaces each matrix U S V^T of x [n, rows, columns] with approximately U V^T, so that all
    its singular values are near 1 (arXiv:2505.16932, 2025-09-29). A step multiplies the matrix by a
    polynomial in x x^T, which leaves U and V as they are and maps each singular value s to
    a s + b s^3 + c s^5. Muon's own Newton-Schulz iteration uses the same polynomial in every step.
    Here each polynomial fits the singular values that the last one leaves. The slopes at zero
    multiply to 990, so values from about 0.001 on come near 1 in five steps."""
    tall = x.size(1) > x.size(2)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) * 1.02 + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b gram + c gram @ gram
        x = torch.baddbmm(x, polynomial, x, beta=a)  # a x + polynomial @ x
    return x.mT if tall else x

# ---- Support

def build_optimizers(model: nn.Module, hp: Hyperparameters, world: World) -> list[Optimizer]:
    """Parameters with the same rule and dtype (for NorMuon also the same shape) share an
    optimizer."""
    groups = {}
    for name, rule in find_rules(model).items():
        p = model.get_parameter(name)
        _, _, optimizer, _ = PARAMETERS[rule]
        shape = p.shape if optimizer == "NorMuon" else None
        groups.setdefault((rule, p.dtype, shape), {})[name] = p
    optimizers = []
    for (rule, *_), params in groups.items():
        _, _, optimizer, options = PARAMETERS[rule]
        optimizers.append(globals()[optimizer](params, hp, world, **options))
    return optimizers

# ---- 7. Data ------------------------------------------------------------------------------------
# A shard is a file: a header of 256 int32 values (magic number, version, number of tokens, zeros),
# then the tokens as uint16. Each document begins with the end-of-text token, vocab_size - 1.

SHARD_MAGIC = 20240520
SHARD_HEADER_BYTES = 4 * 256

class Shard(NamedTuple):
    path: str
    tokens: int
    fingerprint: str  # a hash of samples from some 65 places in the file, to detect changed data

def next_pack(rest: Iterator[tuple[int, int]], length: int, longest: int) -> list | None:
    """A pack of `length` tokens: pieces (begin, end) of the next documents, each cut after its
    first `longest` tokens, and the last one where the pack is full. What is cut off is never
    used, so that every piece begins where a document begins (2025-07-13). Returns None if the
    shard ends before. With longest=4 and length=10:

        documents of 5, 9, 3, 8 tokens --> pieces of 4, 4, 2; the next pack begins with the 8

    After a cut, too, the target is the next piece's first token, end-of-text."""
    pack = []
    while length > 0:
        begin, end = next(rest, (None, None))
        if begin is None:
            return None
        end = min(end, begin + longest, begin + length)
        pack.append((begin, end))
        length -= end - begin
    return pack

def next_packs(rest: Iterator[tuple[int, int]], step: int, hp: Hyperparameters) -> list:
    """The packs of a step, or [] if the shard ends before."""
    stage = stage_at(step, hp)
    packs = []
    for _ in range(hp.micro_batches):
        pack = next_pack(rest, stage.pack_len + 1, stage.doc_len)
        if pack is None:
            return []
        packs.append(pack)
    return packs

def step_starts(shards: list[Shard], hp: Hyperparameters) -> Iterator[tuple[Shard, list]]:
    """Yields (shard, packs) for each step, the same on every rank and after a resume. Each pack has
    one token more than inputs, since its last token is only a target. All packs of a step come from
    one shard: if a shard ends within a step, the step begins again in the next shard, as on the
    eight ranks of the record."""
    step = 0
    for _ in range(hp.epochs):
        first = step
        for shard in shards:
            rest = documents(shard, hp)
            while packs := next_packs(rest, step, hp):
                yield shard, packs
                step += 1
        if step == first:
            return  # no shard has enough tokens for a step

def train_batches(shards: list[Shard], hp: Hyperparameters, world: World, first_step: int):
    """Yields the micro-batches of this rank for each step: a list of (inputs_T int32, targets_T
    int64). What the first steps have read is passed over at once, before the clock starts."""
    steps = step_starts(shards, hp)
    for _ in islice(steps, first_step):
        pass
    return (read_packs(shard, packs, hp, world) for shard, packs in steps)

def read_packs(shard: Shard, packs: list, hp: Hyperparameters, world: World) -> list:
    """Python does not wait for the copy of the tokens to the GPU."""
    count = hp.micro_batches // world.size
    mine = packs[world.rank * count:(world.rank + 1) * count]
    first, last = mine[0][0][0], mine[-1][-1][1]
    text = read_tokens(shard.path, first, last - first, hp.vocab_size).numpy()
    length = sum(end - begin for begin, end in mine[0])
    tokens = torch.empty(count, length, dtype=torch.uint16, pin_memory=torch.cuda.is_available())
    for pack, row in zip(mine, tokens.numpy()):
        np.concatenate([text[begin - first:end - first] for begin, end in pack], out=row)
    # torch cannot compute with uint16, so the bits are read as int16. & 0xFFFF undoes the sign.
    tokens = tokens.view(torch.int16).to(world.device, non_blocking=True).to(torch.int32) & 0xFFFF
    return list(zip(tokens[:, :-1].contiguous(), tokens[:, 1:].to(torch.int64)))

# ---- Support

UNREAD = 0.02  # the share of training tokens that shards too small for a step may hold

def find_shards(pattern: str) -> list[Shard]:
    """The shards that a glob matches, sorted by path."""
    shards = []
    folder, name = os.path.split(os.path.expanduser(pattern))
    folder = glob.escape(folder) if os.path.isdir(folder) else folder  # it may contain brackets
    for path in sorted(glob.glob(os.path.join(folder, name), recursive=True)):
        problem = f"{path} is not a complete shard: in the repository, ./run.sh inspect says why"
        require(os.path.isfile(path) and os.path.getsize(path) > SHARD_HEADER_BYTES, problem)
        data = np.memmap(path, dtype=np.uint8, mode="r")
        magic, version, tokens = data[:12].view("<i4").tolist()
        expected = (SHARD_MAGIC, 1, SHARD_HEADER_BYTES + 2 * tokens)
        require((magic, version, len(data)) == expected, problem)
        places = [*range(0, len(data), max(4096, len(data) // 64)), max(0, len(data) - 4096)]
        sample = b"".join(data[at:at + 4096].tobytes() for at in places)
        shards.append(Shard(path, tokens, sha256(sample).hexdigest()[:16]))
    require(shards, f"no file matches {pattern}: in a clone of the repository, make shards with "
            "./run.sh demo --check, ./run.sh fineweb or ./run.sh tokenize, and run this there")
    return shards

def read_tokens(path: str, start: int, count: int, vocab_size: int) -> Tensor:
    """Reads `count` tokens as uint16. With a GPU they are in pinned memory, so that copies to the
    GPU are asynchronous."""
    tokens = torch.empty(count, dtype=torch.uint16, pin_memory=torch.cuda.is_available())
    with open(path, "rb") as f:
        f.seek(SHARD_HEADER_BYTES + 2 * start)
        require(f.readinto(tokens.numpy()) == tokens.nbytes, f"{path} was truncated")
    largest = tokens.numpy().max(initial=0)  # torch would start threads, which slow training down
    require(largest < vocab_size, f"{path} holds the token {largest}, which is not below "
            f"--vocab_size={vocab_size}; in the repository, ./run.sh inspect says where")
    return tokens

def documents(shard: Shard, hp: Hyperparameters) -> Iterator[tuple[int, int]]:
    """Yields (begin, end) for each document of a shard, reading a megabyte of it at a time."""
    tokens = np.memmap(shard.path, dtype="<u2", mode="r", offset=SHARD_HEADER_BYTES)
    begin = None
    for start in range(0, shard.tokens, 2**19):
        piece = tokens[start:min(start + 2**19, shard.tokens)]
        for found in (start + np.flatnonzero(piece == hp.vocab_size - 1)).tolist():
            if begin is not None:
                yield begin, found
            begin = found
    if begin is not None:
        yield begin, shard.tokens

def load_validation(shards: list[Shard], hp: Hyperparameters, world: World) -> list:
    """The validation sequences of this rank. Together the ranks predict val_tokens tokens, from
    the second one on. The last sequence is padded with targets of -1, which the loss ignores."""
    stream = torch.empty(0, dtype=torch.int32)
    for shard in shards:
        count = min(shard.tokens, hp.val_tokens + 1 - len(stream))
        stream = torch.cat((stream, read_tokens(shard.path, 0, count, hp.vocab_size).int()))
    require((stream == hp.vocab_size - 1).any(), f"no document in --val_files begins with token "
            f"{hp.vocab_size - 1}, the last of the vocabulary: lower --vocab_size={hp.vocab_size}")
    padding = -hp.val_tokens % hp.val_seq_len
    inputs = F.pad(stream[:-1], (0, padding), value=hp.vocab_size - 1)
    targets = F.pad(stream[1:].long(), (0, padding), value=-1)
    sequences = list(zip(inputs.split(hp.val_seq_len), targets.split(hp.val_seq_len)))
    return [(x.to(world.device), y.to(world.device)) for x, y in sequences[world.rank::world.size]]

# ---- 8. Steps -----------------------------------------------------------------------------------

def train_step(model, batches, optimizers, step: int, hp: Hyperparameters, world: World) -> Tensor:
    """Takes one training step on this rank's micro-batches. Returns the mean loss over all ranks,
    as a tensor, so that Python need not wait for the GPU. It counts the further targets too.

    As in the record, losses are summed over the tokens of a pack, and averaged over the packs of a
    step. So larger packs have larger gradients. Adam and NorMuon ignore their scale, but FP8
    and adam_eps depend on it."""
    schedule = schedule_tensors(step, hp, world.device)
    total_loss = torch.zeros((), dtype=torch.float64, device=world.device)
    for inputs_T, targets_T in batches:
        loss = model(inputs_T, targets_T, schedule)
        (loss / hp.micro_batches).backward()
        total_loss += loss.detach()
    due = [optimizer for optimizer in optimizers if (step + 1) % optimizer.every == 0]
    with torch.no_grad():  # each p.grad is a sum over the micro-batches of this rank only
        for optimizer in due:
            optimizer.begin(step)
        for optimizer in due:
            optimizer.update(step)
        for optimizer in due:
            optimizer.finish(step)
            for p in optimizer.params.values():
                p.grad = None
    tokens = hp.micro_batches * stage_at(step, hp).pack_len
    return world.all_reduce(total_loss).wait() / tokens

@torch.no_grad()
def evaluate(model, sequences: list, step: int, hp: Hyperparameters, world: World) -> float:
    """The mean loss per target over the sequences of all ranks."""
    model.eval()
    schedule = schedule_tensors(step, hp, world.device)
    total = torch.zeros(2, dtype=torch.float64, device=world.device)  # losses, targets
    for inputs_T, targets_T in sequences:
        total[0] += model(inputs_T, targets_T, schedule)
        total[1] += (targets_T >= 0).sum()
    model.train()
    loss, targets = world.all_reduce(total).wait().tolist()
    return loss / targets

# ---- Support: what is saved, and the warm-up. Keep what your method remembers in a module or in an
# optimizer's `state`. The warm-up must run all its code, and give each parameter a gradient.

def gather_training_state(model: nn.Module, optimizers: list[Optimizer]) -> dict:
    """All tensors on which further training depends: {"model": {name: tensor}, "gradient": ...,
    "NorMuon momentum": ...}. These are the live tensors, whole and (except gradients) equal on
    every rank."""
    state = {"model": dict(model.state_dict()), "gradient": {}}
    for optimizer in optimizers:
        optimizer.gather_state()
        if optimizer.every > 1:
            state["gradient"] |= optimizer.gather_gradients()
        for name, entries in optimizer.state.items():
            kind = f"{type(optimizer).__name__} {name}"
            state.setdefault(kind, {}).update(zip(optimizer.params, entries))  # without padding
    return state

@torch.no_grad()
def load_training_state(saved: dict | None, model: nn.Module, optimizers: list, world: World):
    """Copies the state that rank 0 has in `saved` to the model and the optimizers of every rank."""
    state = gather_training_state(model, optimizers)
    if world.rank == 0:
        ours = {(kind, name, *x.shape) for kind in state for name, x in state[kind].items()}
        theirs = {(kind, name, *x.shape) for kind in saved for name, x in saved[kind].items()}
        require(ours == theirs, "the checkpoint does not match the script: only the script has "
                f"{sorted(ours - theirs)[:1]}; only the checkpoint has {sorted(theirs - ours)[:1]}")
    for kind, tensors in state.items():
        for name, tensor in tensors.items():
            if world.rank == 0:
                tensor.copy_(saved[kind][name])
            if world.size > 1:
                dist.broadcast(tensor, src=0)
            if kind == "gradient" and world.rank > 0:
                tensor.zero_()  # as in gather_gradients

def warm_up(model, optimizers, shards: list[Shard], hp: Hyperparameters, world: World):
    """Runs a validation, and a training step with the packs of each stage, on random tokens before
    the clock starts, and undoes them. This compiles all code and allocates the memory. On a GPU,
    compiling anything afterwards raises an error, because it would count as training time.

    Undoing the steps also makes the weights of all ranks equal to those of rank 0."""
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    state = gather_training_state(model, optimizers)
    before = tree_map(lambda x: x.to("cpu", copy=True), state) if world.rank == 0 else None
    tokens = torch.randint(hp.vocab_size, (hp.val_seq_len + 1,), device=world.device)
    evaluate(model, [(tokens[:-1].int(), tokens[1:].clone())], 0, hp, world)
    all_update = math.lcm(*(each.every for each in optimizers)) - 1  # a step at which all do
    for start in sorted({each.start for each in stages_of(hp) if each.start < hp.num_iterations}):
        # The batch is read as in training, which allocates its memory. Its tokens are replaced.
        read = next(train_batches(shards, hp, world, start))
        batches = tree_map(lambda x: x.random_(hp.vocab_size), read[:1])
        model.zero_grad(set_to_none=True)
        loss = model(*batches[0], schedule_tensors(start, hp, world.device))
        (loss / hp.micro_batches).backward()  # so that train_step accumulates too
        unused = [name for name, p in model.named_parameters() if p.grad is None]
        require(not unused, f"no gradient reaches {', '.join(unused)}: use or remove it")
        train_step(model, batches, optimizers, all_update, hp, world).to("cpu", non_blocking=True)
    load_training_state(before, model, optimizers, world)
    if world.device.type == "cuda":
        torch.compiler.set_stance("fail_on_recompile")
        torch.cuda.reset_peak_memory_stats()
        gc.collect()
        gc.freeze()  # so that garbage collection skips what compiling left behind

# ---- 9. The run ---------------------------------------------------------------------------------

def main(argv: list[str]):
    # The plan. Rank 0 plans for all ranks; with --check, each plans for itself.
    require(torch.__version__ >= (2, 9, 1), f"torch {torch.__version__}: install 2.9.1 or newer")
    script = SOURCE or Path(__file__).read_text(encoding="utf-8")
    hp, command = parse_flags(argv)
    world = world_of_this_process()
    saved = plan = None
    if world.rank == 0 or command.check:
        saved = read_checkpoint(command.resume) if command.resume else None
        plan = make_plan(hp, command, script, world, saved)
    if command.check:
        world = World(0, 1, world.device)
    elif world.size > 1:
        plan = connect(plan, script, world)
    hp = plan.hp
    cuda = world.device.type == "cuda"

    # The model. TORCH_COMPILE_DISABLE=1 helps with debugging on a GPU.
    torch.manual_seed(hp.seed)
    switches = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
    compiles = cuda and "1" not in map(os.environ.get, switches)
    model = GPT(hp, getattr(torch, hp.dtype), flex=compiles)
    draw_weights(model, hp.seed)
    model.to(world.device)
    optimizers = build_optimizers(model, hp, world)
    if plan.checkpoint:
        load_training_state(saved["state"] if saved else None, model, optimizers, world)
    val_sequences = load_validation(plan.val_shards, hp, world)
    if command.check:
        print("checks passed")
        return

    log = RunLog(plan, world)
    try:
        log.write(f"log: {log.path}")
        log.write(f"to resume: {sys.argv[0]} --resume=FILE, with FILE from a `checkpoint:` line")
        for line in notices(plan, saved, world):
            log.write(line)
        log.write(f"model: {sum(p.numel() for p in model.parameters())} parameters; up to "
                  f"{hp.micro_batches} x {hp.train_seq_len} tokens a step, {world.size} rank(s)")
        log.write("\n".join(f"{type(each).__name__}, lr {each.peak_lr}: {', '.join(each.params)}"
                            for each in optimizers), console=False)

        # The warm-up. model.compile, unlike torch.compile, keeps the parameters' names.
        if compiles:
            model.compile(dynamic=False, fullgraph=True)
        batches_of_steps = train_batches(plan.train_shards, hp, world, plan.first_step)
        began = time.perf_counter()
        warm_up(model, optimizers, plan.train_shards, hp, world)
        log.write(f"warmup: {time.perf_counter() - began:.1f} s, untimed")
        if world.size > 1:
            log.write(time_all_gather(world), console=False)

        # Training. The clock stops while the model is validated or saved.
        clock = StepClock(world.device, plan.seconds)
        save_worked = True
        clock.start()
        for step in range(plan.first_step, hp.num_iterations + 1):
            last = step == hp.num_iterations
            save_due = step > 0 and hp.save_every > 0 and (last or step % hp.save_every == 0)
            val_due = hp.val_loss_every > 0 and step % hp.val_loss_every == 0
            if last or save_due or val_due:
                clock.stop()
                for done, value, seconds in clock.read_losses(keep=0):
                    log.write_loss("train_loss", done, hp, value, seconds)
                val_loss = evaluate(model, val_sequences, step, hp, world)
                log.write_loss("val_loss", step, hp, val_loss, clock.seconds)
                if save_due and step > plan.first_step:
                    save_worked = save_checkpoint(step, clock.seconds, model, optimizers, plan, log,
                                                  warn=save_worked or last)
                clock.start()
            if last:
                break
            loss = train_step(model, next(batches_of_steps), optimizers, step, hp, world)
            clock.add_loss(step + 1, loss)
            for done, value, seconds in clock.read_losses(keep=clock.lag):
                log.write_loss("train_loss", done, hp, value, seconds)

        if cuda:
            log.write(f"peak_memory: {torch.cuda.max_memory_allocated() >> 20} MiB on rank 0")
        log.write(f"final_val_loss: {val_loss:.4f} nats per token, on {hp.val_tokens} tokens")
        log.write(f"log: {log.path}")
    except Exception as e:  # rank 0's log says why the run ended; other ranks have no log
        prefix = "" if isinstance(e, UserError) else f"{type(e).__name__}: "
        log.write(f"error: {prefix}{e}", console=False)
        raise
    if world.size > 1:
        dist.destroy_process_group()

# ---- 10. What a run needs besides the method: skip it if you only want the algorithm ------------

def world_of_this_process() -> World:
    """Reads what torchrun has set in the environment. Without torchrun there is one rank."""
    rank, local_rank, size = (int(os.environ.get(name, default)) for name, default in
                              (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
    require("WORLD_SIZE" in os.environ or os.environ.get("SLURM_STEP_NUM_TASKS", "1") == "1",
            "these processes do not know about each other: have srun start torchrun, once per node")
    if not torch.cuda.is_available():
        # One thread, which is torchrun's own default for several ranks
        torch.set_num_threads(torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else 1)
        return World(rank, size, torch.device("cpu"))
    require(local_rank < torch.cuda.device_count(), "start at most one process per GPU")
    # The compiler's processes take up to a gigabyte each, so they are limited to one per core and
    # 32 per rank.
    share = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, min(32, share))))
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF",  # torch 2.9 knows only this name
                          os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True"))
    torch.cuda.set_device(local_rank)
    return World(rank, size, torch.device("cuda", local_rank))

TIMEOUT = timedelta(minutes=10)  # how long a rank waits for another, including while rank 0 saves

def connect(plan: "Plan | None", script: str, world: World) -> "Plan":
    """Connects the ranks and gives all of them rank 0's plan, if they have the same script and
    data."""
    gpu = world.device if world.device.type == "cuda" else None
    try:
        dist.init_process_group("nccl" if gpu else "gloo", timeout=TIMEOUT, device_id=gpu)
        plans = [plan]
        dist.broadcast_object_list(plans, src=0)
    except (RuntimeError, ValueError) as e:
        reason = " ".join(str(e).split())  # NCCL's own reason is on its last lines
        advice = ("enlarge /dev/shm (in Docker with --shm-size=1g)" if "/dev/shm" in reason else
                  "start them with torchrun, or set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME")
        raise UserError(f"the ranks cannot reach each other ({reason}); {advice}") from None
    here = (script, find_shards(plans[0].hp.train_files), find_shards(plans[0].hp.val_files))
    everywhere = [None] * world.size
    dist.all_gather_object(everywhere, here)
    require(everywhere.count(here) == world.size, "script or data differ between the machines")
    return plans[0]

def cpu_info() -> dict[str, str]:
    info = Path("/proc/cpuinfo")  # lines "key\t: value", with an empty line after each processor
    text = info.read_text(errors="replace") if info.exists() else ""
    return dict(re.findall(r"(?m)^([^\t]+)\t+: (.*)$", text.partition("\n\n")[0]))

# ---- Flags and checks

def true_or_false(text: str) -> bool:
    return bool(["false", "true"].index(text.lower()))  # any other word raises ValueError

def parse_flags(argv: list[str]) -> tuple[Hyperparameters, argparse.Namespace]:
    """Returns the settings that a command line asks for, and argparse's result, whose .named holds
    the settings that were given. Raises UserError."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0],
                                     allow_abbrev=False)
    parser.error = lambda message: require(False, f"{message}; --help lists the flags")
    parser.usage = "%(prog)s [--preset=NAME | --resume=CHECKPOINT] [--check] [--setting=value ...]"
    parser.epilog = "On a CPU each rank uses one thread, unless OMP_NUM_THREADS is set."
    parser.add_argument("--check", action="store_true", help="check settings and data, then exit")
    either = parser.add_mutually_exclusive_group()
    preset = "speedrun" if torch.cuda.is_available() else "demo"
    either.add_argument("--preset", choices=PRESETS, metavar="NAME", default=preset,
                        help=f"{', '.join(PRESETS)}; on this machine the default is {preset}")
    either.add_argument("--resume", metavar="CHECKPOINT", type=lambda text: Path(text).expanduser(),
                        help="continue from a checkpoint; other flags replace its settings")
    for f in fields(Hyperparameters):
        kind = true_or_false if f.type is bool else f.type
        values = ", ".join(f"{name}: {getattr(hp, f.name)}" for name, hp in PRESETS.items())
        text = f"{f.metadata['help']} ({values})".replace("%", "%%")
        parser.add_argument(f"--{f.name}", type=kind, help=text, default=argparse.SUPPRESS)
    command = parser.parse_args(argv)
    hp = PRESETS[command.preset]
    command.named = {name: value for name, value in vars(command).items() if name in asdict(hp)}
    return replace(hp, **command.named), command

def check_settings(hp: Hyperparameters, world_size: int):
    for f, value in zip(fields(hp), asdict(hp).values()):
        low, high, unit, pattern = f.metadata["limits"]
        if isinstance(value, str):
            require(re.fullmatch(pattern, value), f"--{f.name}={value}: use {f.metadata['help']}")
        else:
            require(low <= value <= high, f"--{f.name}={value} is not between {low} and {high}")
            require(unit == 1 or value % unit == 0, f"--{f.name}={value}: use a multiple of {unit}")
    check_stages(hp)
    require(len(hp.value_embeds) == len(hp.layers), "--value_embeds and --layers differ in length")
    unused = [v for v, kind in zip(hp.value_embeds, hp.layers) if v != "." and kind == "."]
    require(not unused, f"--value_embeds={hp.value_embeds} marks a layer that has no attention")
    require(hp.layers.count(".") == 1 and hp.skip_from < hp.layers.index("."), f"--layers="
            f"{hp.layers}: give one layer no attention (.), after layer --skip_from={hp.skip_from}")
    require(hp.back_from < len(hp.layers), "--back_from is no layer; the first is layer 0")
    require("P" not in hp.layers or hp.num_heads % 4 == 2, f"--num_heads={hp.num_heads}: for paired"
            " heads, half of it must be odd, or both rows of a token have the same positions")
    require(hp.micro_batches % world_size == 0, f"{world_size} ranks cannot share "
            f"{hp.micro_batches} micro-batches equally: use a number of ranks that divides them")

def check_stages(hp: Hyperparameters):
    for stage in stages_of(hp):
        name = f"--stages: stage {stage.number}"
        require(0 < stage.pack_len <= hp.train_seq_len, f"{name} needs a share of train_seq_len "
                "above 0, at most 1")
        require(stage.doc_len > 0, f"{name} keeps no token of a document")
        require(stage.lr <= 100, f"{name} has a factor on learning rates above 100")
        short, long = stage.short_window, stage.long_window
        require(0 < short <= long and short % BLOCK == long % BLOCK == 0, f"{name} has windows of "
                f"{short} and {long}: use multiples of {BLOCK}, the short window first")
    require(hp.final_window >= long, f"--final_window is shorter than the last window, {long}")
    require(hp.untie_stage <= stage.number, f"--untie_stage={hp.untie_stage}: the first stage is 0")

def resolve(hp: Hyperparameters, device: torch.device) -> Hyperparameters:
    """Decides what `auto` and a seed of -1 stand for, and whether FP8 is possible. A resumed run
    keeps these decisions, but turns FP8 off where the GPU lacks it."""
    cuda = device.type == "cuda"
    has_fp8 = cuda and torch.cuda.get_device_capability(device) >= (8, 9)
    fast_bf16 = (torch.cuda.is_bf16_supported(including_emulation=False) if cuda else
                 bool(re.search("amx_bf16|avx512_bf16", cpu_info().get("flags", ""))))
    if hp.dtype == "auto":
        hp = replace(hp, dtype="bfloat16" if fast_bf16 else "float32")
    if hp.seed < 0:
        hp = replace(hp, seed=int(np.random.default_rng().integers(2**31)))
    return replace(hp, use_fp8=hp.use_fp8 and has_fp8 and hp.dtype == "bfloat16")

@dataclass
class Plan:
    """What a run will do, as checked by rank 0."""
    hp: Hyperparameters
    script: str  # the text of this file
    train_shards: list[Shard]
    val_shards: list[Shard]
    checkpoint: Path | None  # to resume from
    first_step: int = 0  # a checkpoint covers the steps before this one
    seconds: float = 0.0  # the training time of those steps

    def data_read(self, done: int) -> str:
        """A hash of the data that the first `done` steps have read."""
        steps = islice(step_starts(self.train_shards, self.hp), done)
        starts = [(shard.fingerprint, start) for shard, start in steps]
        return sha256(f"{starts} {tokens_seen(done, self.hp)}".encode()).hexdigest()

def make_plan(hp: Hyperparameters, command, script: str, world: World, saved: dict | None) -> Plan:
    """Checks the settings, the checkpoint's settings and the data. A resumed run has the settings
    of its checkpoint, except those that the command line names. Raises UserError."""
    if saved:
        # A setting in neither the checkpoint nor the flags would silently get its default.
        own = {f.name for f in fields(Hyperparameters)}
        given = saved["settings"].keys() | command.named.keys()
        require(own == given, "--resume: script and checkpoint differ in the settings "
                f"{sorted(own ^ given)}: pass new ones as flags, or use the script from the log")
        hp = Hyperparameters(**(saved["settings"] | command.named))
    check_settings(hp, world.size)
    hp = resolve(hp, world.device)

    train_shards, val_shards = find_shards(hp.train_files), find_shards(hp.val_files)
    by_fingerprint = {}
    for shard in train_shards + val_shards:
        first = by_fingerprint.setdefault(shard.fingerprint, shard)
        require(shard is first, f"{shard.path} has the same tokens as {first.path}: keep only one")
    available = sum(shard.tokens for shard in val_shards) - 1  # the first token is not predicted
    hp = replace(hp, val_tokens=hp.val_tokens or available)
    require(0 < hp.val_tokens <= available, f"--val_files={hp.val_files} has {available} tokens to "
            f"predict, not {hp.val_tokens}: add shards, or lower --val_tokens (0 uses all)")
    steps = sum(1 for _ in islice(step_starts(train_shards, hp), hp.num_iterations))
    require(steps == hp.num_iterations, f"--train_files={hp.train_files} suffices for {steps} "
            f"steps, not {hp.num_iterations}: add shards, raise --epochs or lower --num_iterations")
    small = [s.tokens for s in train_shards if s.tokens <= hp.tokens_per_step]
    require(sum(small) <= UNREAD * sum(s.tokens for s in train_shards), f"{len(small)} training "
            f"shards are no longer than a step ({hp.tokens_per_step} tokens): merge them")

    plan = Plan(hp, script, train_shards, val_shards, command.resume)
    if saved:
        plan = replace(plan, first_step=(done := saved["step"]), seconds=saved["seconds"])
        require(done <= hp.num_iterations, f"the run has already done {done} steps")
        require(plan.data_read(done) == saved["data_read"], "--resume: do not change "
                "micro_batches, train_seq_len, num_iterations, extension_frac, packs and documents "
                "in stages, the shards already read, or how they are read")
        before = Hyperparameters(**saved["settings"])
        require((done > untie_start(hp)) == (done > untie_start(before)), "--resume: do not move "
                f"--untie_stage to the other side of step {done}")
    return plan

def notices(plan: Plan, saved: dict | None, world: World) -> Iterator[str]:
    """Log lines: whether a GPU trains without FP8, and what a resumed run has changed."""
    if world.device.type == "cuda" and not plan.hp.use_fp8:
        yield ("fp8: off, so the head takes about twice as long; FP8 needs a GPU with compute "
               "capability 8.9 or higher, dtype bfloat16 and use_fp8")
    for name, value in asdict(plan.hp).items() if saved else ():
        if value != (old := saved["settings"].get(name)):
            yield f"changed: {name} = {value!r}, was {old!r}"
            if name == "num_iterations":
                yield "changed: rates and window depend on step / num_iterations, so both jump"
    if saved and saved["script"] != sha256(plan.script.encode()).hexdigest():
        yield "changed: the script is not the one that saved the checkpoint"

# ---- Log and clock

def print_line(text: str):
    """Prints text, unless the console is gone."""
    try:
        print(text, flush=True)
    except (OSError, ValueError):  # it is closed, full, or cannot show a character
        sys.stdout = open(os.devnull, "w")

class RunLog:
    """The log of rank 0: settings, environment and source, with a line of 100 `=` after each, then
    a line per step."""

    def __init__(self, plan: Plan, world: World):
        self.path = self.file = None
        self.failed = False  # whether the last write failed
        if world.rank > 0:
            return
        folder = Path(plan.hp.records).expanduser()
        now = datetime.now(timezone.utc)
        try:
            os.makedirs(folder, exist_ok=True)
            while self.file is None:
                self.path = folder / f"{now:%Y-%m-%dT%H-%M-%SZ}_{plan.hp.name}.log"
                with suppress(FileExistsError):  # another run started in the same second
                    self.file = open(self.path, "xb", buffering=0)
                now += timedelta(seconds=1)
        except OSError as e:
            raise UserError(f"--records={plan.hp.records} cannot hold logs: {e.strerror}") from None
        settings = [f"{name} = {value!r}" for name, value in asdict(plan.hp).items()]
        script = plan.script.removesuffix("\n")
        for part in (settings, environment(plan, world), [script]):
            self.write("\n".join([*part, "=" * 100]), console=False)

    def write(self, text: str, console: bool = True):
        """Writes to the log and the console. If the disk is full, training goes on, and a line that
        was cut short ends with "..."."""
        if self.file is None:
            return
        if console:
            print_line(text)
        line = ("...\n" * self.failed + text + "\n").encode(errors="backslashreplace")
        complete = False
        with suppress(OSError):
            complete = self.file.write(line) == len(line)
        if not complete and not self.failed:
            print_line(f"warning: {self.path} cannot be written (disk full?); training goes on")
        self.failed = not complete

    def write_loss(self, kind: str, done: int, hp: Hyperparameters, loss: float, seconds: float):
        """Writes a loss. If it is not finite, the run ends."""
        step = done - 1 if kind == "train_loss" else done  # whose lr and window were used
        average = f"{1000 * seconds / done:.2f}" if done else "nan"
        self.write(f"step:{done}/{hp.num_iterations} {kind}:{loss:.4f} "
                   f"train_time:{1000 * seconds:.0f}ms step_avg:{average}ms "
                   f"tokens:{tokens_seen(done, hp)} lr:{lr_factor(step, hp):.3f} "
                   f"window:{window_tokens(step, hp)}")
        require(math.isfinite(loss), f"step {done}: {kind} is {loss}; try lower learning rates")

def environment(plan: Plan, world: World) -> list[str]:
    """Machine, software and data as `key: value` lines."""
    cpu = cpu_info()
    units = re.findall(r"\b(?:avx2|avx512f|avx512_bf16|amx_bf16)\b", cpu.get("flags", ""))
    model = cpu.get("model name", platform.processor())
    lines = [f"command: {' '.join(sys.argv)}",
             f"host: {platform.node()}, {platform.platform()}",
             f"cpu: {', '.join([f'{os.cpu_count()} x {model}', *units])}",
             f"torch: {torch.__version__}, Python {platform.python_version()}",
             f"ranks: {world.size}",
             f"threads: {torch.get_num_threads()} a rank",
             f"git: {subprocess.getoutput('git describe --always --dirty --abbrev=40')}"]
    for key, shards in (("data", plan.train_shards), ("val_data", plan.val_shards)):
        lines += [f"{key}: {s.path} {s.tokens} tokens {s.fingerprint}" for s in shards]
    once = step_starts(plan.train_shards, replace(plan.hp, epochs=1))
    read = sum(end - begin for _, packs in once for pack in packs for begin, end in pack)
    whole = sum(shard.tokens for shard in plan.train_shards)
    lines.append(f"unread: {whole - read} of {whole} training tokens per pass")
    if world.device.type == "cuda":
        lines.append(f"gpus: {torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
        query = "driver_version,clocks.sm,clocks.max.sm,power.limit,temperature.gpu"
        table = subprocess.getoutput(f"nvidia-smi --query-gpu={query} --format=csv").splitlines()
        lines += [f"gpu: {line}" for line in table]
    if plan.checkpoint:
        lines.append(f"resumed: {plan.checkpoint.absolute()} at step {plan.first_step}")
    count = plan.script.count("\n")
    lines.append(f"script: sha256 {sha256(plan.script.encode()).hexdigest()} {count} lines")
    return [" ".join(line.split()) for line in lines]  # a file's name may contain a line break

class StepClock:
    """Measures training time in seconds. On a GPU it marks times with events in the GPU's queue, so
    that the GPU never waits for Python."""

    def __init__(self, device: torch.device, seconds: float):
        self.cuda = device.type == "cuda"
        self.seconds = seconds  # at the last stop
        self.pending = []  # (steps done, loss, mark at the step's end), oldest first
        self.lag = 3 if self.cuda else 0  # steps by which Python may lead the GPU

    def mark(self):
        """The current time on a CPU, or an event in a GPU's queue."""
        if self.cuda:
            return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
        return time.perf_counter()

    def seconds_at(self, mark) -> float:
        """The training time at a mark. Waits until the GPU has reached it."""
        if self.cuda:
            mark.synchronize()
            return self.before + self.started.elapsed_time(mark) / 1000
        return self.before + mark - self.started

    def start(self):
        self.before = self.seconds
        self.started = self.mark()

    def stop(self):
        self.seconds = self.seconds_at(self.mark())

    def add_loss(self, done: int, loss: Tensor):
        self.pending.append((done, loss.to("cpu", non_blocking=True), self.mark()))

    def read_losses(self, keep: int) -> Iterator[tuple[int, float, float]]:
        """Yields (steps done, loss, seconds) for all pending losses except the `keep` newest."""
        while len(self.pending) > keep:
            done, loss, mark = self.pending.pop(0)
            seconds = self.seconds_at(mark)
            yield done, float(loss), seconds

def time_all_gather(world: World) -> str:
    """A log line: how fast ranks fetch each other's rows. If this is slow, every step is."""
    whole = torch.zeros(world.size, 2**26 // world.size, dtype=torch.int8, device=world.device)
    for _ in range(2):  # the first time, ranks may wait for one that is still warming up
        began = time.perf_counter()
        world.all_gather(whole).wait()[-1, -1].item()  # .item() waits for the GPU
        seconds = time.perf_counter() - began
    return f"all_gather: {1000 * seconds:.2f} ms for {whole.nbytes / 1e6:.0f} MB"

# ---- Checkpoints

def read_checkpoint(path: Path) -> dict:
    """Opens a checkpoint. Its tensors stay on disk until they are used. Raises UserError."""
    try:
        require(zipfile.ZipFile(path).testzip() is None, "a checksum is wrong")
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        require("data_read" in saved, "it was not saved by this script")
        return saved
    except Exception as e:  # a damaged archive raises many kinds of exception
        reason = str(e).partition("\n")[0]
        raise UserError(f"--resume={path} cannot be used ({reason}): give a checkpoint, "
                        "step<n>.pt; if it is damaged, use the previous one") from None

def save_checkpoint(done: int, seconds: float, model, optimizers, plan: Plan, log, warn) -> bool:
    """Saves what a run needs to continue, even with fewer or more ranks, and keeps the two newest
    files. A file gets its name once it is complete. Returns whether the save worked."""
    state = gather_training_state(model, optimizers)
    if log.file is None:  # only rank 0 saves
        return True
    path = log.path.with_suffix("") / f"step{done:08}.pt"
    unfinished = path.with_name("unfinished")
    saved = dict(step=done, seconds=seconds, settings=asdict(plan.hp), state=state,
                 script=sha256(plan.script.encode()).hexdigest(), log=str(log.path),
                 data_read=plan.data_read(done))
    file = io.BytesIO()  # so that any OSError below comes from the disk
    torch.save(saved, file)
    try:
        path.parent.mkdir(exist_ok=True)
        unfinished.write_bytes(file.getbuffer())
        os.replace(unfinished, path)
    except OSError as e:
        with suppress(OSError):
            unfinished.unlink()  # it may be what fills the disk
        if warn:
            log.write(f"warning: {path} not saved ({e.strerror}); training goes on")
        return False
    log.write(f"checkpoint: {path}")
    for old in sorted(path.parent.glob("step????????.pt"))[:-2]:
        with suppress(OSError):
            old.unlink()
    return True

if __name__ == "__main__":
    # Ctrl+C ends this process at once, even while it waits for a GPU. In a container it may be
    # process 1, which ignores signals that it does not handle.
    end = signal.SIG_DFL if os.getpid() > 1 else lambda number, frame: os._exit(128 + number)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    try:
        main(sys.argv[1:])
    except Exception as e:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(3)  # rank 0 reports the same error first, and then torchrun ends this rank
        if not isinstance(e, UserError):
            sys.excepthook(*sys.exc_info())
            os._exit(1)  # an orderly exit could wait for ranks that wait for this rank
        with suppress(OSError):
            print(f"error: {e}", file=sys.stderr, flush=True)
        os._exit(2)
