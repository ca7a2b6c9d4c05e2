"""Train a GPT as fast as the hardware allows: the NanoGPT speedrun in one file.

The task is a validation loss of 3.28 nats per token on FineWeb, in the least training time on eight
H100 GPUs. The preset `speedrun` has the method of the record of 2025-01-26 (2.93 minutes); `demo`
is the same code with a small model, which a laptop trains in minutes. The number of GPUs changes
how long training takes but, except for rounding, not what is trained.

    torchrun --nproc_per_node=8 train_gpt.py            # the speedrun
    python train_gpt.py --preset=demo                   # the demo, on a CPU or one GPU
    python train_gpt.py --help                          # every setting is a flag
    python train_gpt.py --resume=records/<run>.log      # continue an interrupted run

Each run writes records/<UTC time>_<name>.log, with the settings, the environment, this source and a
line per step; its two newest checkpoints lie in the folder of the same name. To try an idea, copy
this file and change the copy. Sections 1 to 9 are the method, in reading order; section 10 is
attention where there is no GPU. Sections 11 to 14 keep a run safe and report what happened.
Section 9 calls a few of their functions: `due` says whether a step validates and saves. The lines
of a resumed run wait for its first loss; log.release() is for a run without one (see RunLog).

Suffixes give the shapes of most tensors: x_TD is [T, D]. T tokens, D model width, H heads, K head
width, V vocabulary, N blocks of 128 tokens; 1 is a dimension of length 1.

"Record" and a date or number mean an entry of the speedrun's list of world records, which explains
each one: https://github.com/KellerJordan/modded-nanogpt. Needs torch 2.13 or newer.
"""

import argparse
import copy
import glob
import hashlib
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import zipfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timedelta, timezone
from itertools import islice
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

import numpy as np
import torch
import torch._functorch.config
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

class UserError(Exception):
    """An error that the user can fix. Its message is one line: what is wrong, and what to do."""

def require(condition, message: str):
    if not condition:
        raise UserError(message)

def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

def open_file(path: str, mode: str, buffering: int = -1):
    """open(), where a failure is an error that the user can fix."""
    try:
        return open(path, mode, buffering)
    except OSError as e:
        raise UserError(f"{path} cannot be opened: {e.strerror}") from None

BLOCK = 128  # tokens in a block of attention

# ---- 1. Settings --------------------------------------------------------------------------------

def flag(default, help: str, min=0, max=10**9, unit=1, marks=None):
    """A setting with its help text, its range (inclusive) and the unit that it is a multiple of.
    With `marks`, the setting is a string with one of these characters for each layer."""
    return field(default=default, metadata=dict(help=help, allowed=(min, max, unit, marks)))

@dataclass(frozen=True)
class Hyperparameters:
    """Every field is a flag of the same name. These defaults are the preset `speedrun`; a machine
    without a GPU starts from the preset `demo` (see PRESETS)."""
    # The run
    name: str = flag("speedrun", "name of the run, which its log's name contains")
    records: str = flag("records", "folder for the log and the checkpoints")
    seed: int = flag(-1, "seed of the initial weights; -1 draws one", min=-1, max=2**63 - 1)
    dtype: str = flag("auto", "bfloat16, float32, or auto: bfloat16 where the device is fast at it")
    save_every: int = flag(500, "steps between checkpoints; 0 saves none, not even at the end")
    val_loss_every: int = flag(125, "steps between validations; 0 validates only at the end")
    # Data
    train_files: str = flag("data/fineweb10B/fineweb_train_*.bin", "glob of the training shards")
    val_files: str = flag("data/fineweb10B/fineweb_val_*.bin", "glob of the validation shards")
    vocab_size: int = flag(50257, "vocabulary size; the last token begins a text", min=2, max=65536)
    train_seq_len: int = flag(48 * 1024, "tokens per training sequence", min=1, unit=BLOCK)
    val_seq_len: int = flag(256 * 1024, "tokens per validation sequence", min=1, unit=BLOCK)
    val_tokens: int = flag(10485760, "number of validation tokens; 0 takes all")
    micro_batches: int = flag(8, "sequences per step, on all processes together", min=1, max=10**5)
    epochs: int = flag(1, "at most this many passes over the training shards", min=1, max=10**5)
    # The layers: strings with one character per layer
    windows: str = flag("LSSSLSSLSSSL", "L: long window, S: half of its blocks", marks="LS")
    attention: str = flag("xxxxxxx.xxxx", "x: with attention, .: without", marks="x.")
    value_embeds: str = flag("012......012", "which value embedding, .: none", marks="0123456789.")
    # The model
    model_dim: int = flag(768, "width of the residual stream", min=16, max=2**16, unit=16)
    num_heads: int = flag(6, "number of query heads", min=1, max=2**10)
    num_kv_heads: int = flag(0, "number of key and value heads; 0: as many as num_heads")
    head_dim: int = flag(128, "width of a head", min=16, max=2**10, unit=16)
    attention_scale: float = flag(0.12, "factor on the attention scores", min=-10**9)
    rope_base: float = flag(1024.0, "base of the rotary frequencies", min=1)
    lm_head_softcap: float = flag(15.0, "c: logits z become c + c tanh(z / c)", min=0.1, max=35)
    use_fp8: bool = flag(True, "train the output head in FP8 where the hardware can")
    window_start: int = flag(128, "long window at the start, in tokens", min=1)
    window_end: int = flag(1792, "long window at the end, in tokens", min=1)
    smear: bool = flag(False, "add to each embedding the previous token's, times a learned vector")
    key_offset: bool = flag(False, "take half of each key from the token before")
    pair_rows: int = flag(0, "rows of the embedding of pairs of tokens; 0: there is none")
    # Optimization
    num_iterations: int = flag(1770, "training steps", max=10**7)
    cooldown_frac: float = flag(0.4, "fraction of the run, at its end, with falling rates", max=1)
    lr_floor: float = flag(0.1, "what the learning rates fall to, as a share of their peak", max=1)
    muon_lr: float = flag(0.05, "learning rate of the blocks' matrices (Muon)")
    muon_momentum_start: float = flag(0.85, "Muon's momentum at the first step", max=1)
    muon_momentum_end: float = flag(0.95, "Muon's momentum after its warmup", max=1)
    muon_momentum_steps: int = flag(300, "length of Muon's momentum warmup, in steps")
    head_lr: float = flag(0.008, "learning rate of the output head (Adam)")
    embed_lr: float = flag(0.6, "learning rate of all embeddings (Adam)")
    scalar_lr: float = flag(0.04, "learning rate of vectors and scalars (Adam)")
    adam_beta1: float = flag(0.8, "decay of Adam's mean gradient", max=1 - 1e-9)
    adam_beta2: float = flag(0.95, "decay of Adam's mean square", max=1 - 1e-9)
    adam_eps: float = flag(1e-10, "Adam's epsilon, for gradients of the mean loss", min=1e-30)

PRESETS = {
    "speedrun": Hyperparameters(),
    # Small enough for a laptop, with three later finds: smear, key offset and the embedding of
    # pairs. The speedrun does without them, as the record of its day did.
    "demo": Hyperparameters(
        name="demo", save_every=100, val_loss_every=50, train_files="data/demo/demo_train_*.bin",
        val_files="data/demo/demo_val_*.bin", vocab_size=257, train_seq_len=1024, val_seq_len=16384,
        val_tokens=131072, micro_batches=4, windows="SSSL", attention="xx.x", value_embeds="0..0",
        model_dim=128, num_heads=2, head_dim=64, attention_scale=0.2, smear=True,
        key_offset=True, pair_rows=4096, window_start=256, window_end=256, num_iterations=450,
        muon_lr=0.045, muon_momentum_end=0.75, muon_momentum_steps=0, embed_lr=0.3, adam_beta1=0.3,
        adam_eps=1e-7,  # with 1e-10, gradients that are mere rounding errors make full-size steps
    ),
}

# A CPU with one of these is faster in bfloat16 than in float32.
BF16_UNITS = ("amx_bf16", "avx512_bf16")

# Settings that a resumed run refuses to change: the run's name and place, how it began, and what
# decides which tokens come next. (Loading refuses others that add a tensor or change its shape.
# Where one removes a tensor, what was saved of it is ignored.)
KEPT = ("name", "records", "seed", "train_seq_len", "micro_batches", "training_data")

def check_method(hp: Hyperparameters):
    """Refuses settings of the method that contradict each other. check_settings calls it when each
    setting's range and the length of the layers' strings are known to be right."""
    unused = [mark for mark, x in zip(hp.value_embeds, hp.attention) if mark != "." and x != "x"]
    require(not unused, f"--value_embeds={hp.value_embeds} marks a layer without --attention")
    require(hp.window_start <= hp.window_end,
            f"--window_start={hp.window_start} is above --window_end={hp.window_end}")
    require(hp.num_heads % (hp.num_kv_heads or 1) == 0,
            f"--num_kv_heads={hp.num_kv_heads} does not divide --num_heads={hp.num_heads}")

def resolve(hp: Hyperparameters, device: torch.device) -> Hyperparameters:
    """The settings with everything decided that depends on the machine or on chance: the dtype
    `auto`, a seed of -1, num_kv_heads of 0, and FP8, which is used only where the hardware has it.
    (val_tokens of 0 depends on the data; `prepare` decides it.)"""
    has_fp8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    fast_bf16 = (torch.cuda.is_bf16_supported(including_emulation=False) if device.type == "cuda"
                 else any(torch.cpu.get_capabilities().get(unit) for unit in BF16_UNITS))
    if hp.dtype == "auto":
        hp = replace(hp, dtype="bfloat16" if fast_bf16 else "float32")
    if hp.seed < 0:
        hp = replace(hp, seed=int(np.random.default_rng().integers(2**31)))
    return replace(hp, num_kv_heads=hp.num_kv_heads or hp.num_heads, use_fp8=hp.use_fp8 and has_fp8)

# ---- 2. Schedules: pure functions of the step ---------------------------------------------------

def batch_size(step: int, hp: Hyperparameters) -> int:
    """The number of sequences in a step, on all processes together. If you let it grow during the
    run, change tokens_seen and the factor of FP8's gradient (in GPT) as well, and keep each size
    divisible by the number of processes."""
    return hp.micro_batches

def tokens_seen(step: int, hp: Hyperparameters) -> int:
    """The number of training tokens in all steps before this one."""
    return step * hp.micro_batches * hp.train_seq_len

def window_tokens(step: int, hp: Hyperparameters) -> int:
    """The long window in tokens. It would grow linearly from zero, block by block, but is kept
    between window_start and window_end."""
    # As in the record, growth ends half a block below window_end: in `speedrun` at 1728 tokens.
    # Rounded up, that is window_end, 1792, from 96 % of the run on.
    grown = (hp.window_end - BLOCK / 2) * step / max(1, hp.num_iterations)
    return min(hp.window_end, max(hp.window_start, math.ceil(grown / BLOCK) * BLOCK))

def lr_scale(step: int, hp: Hyperparameters) -> float:
    """The factor on every learning rate: 1, then falling linearly to lr_floor at the run's end."""
    left = max(0, 1 - step / max(1, hp.num_iterations))
    if left >= hp.cooldown_frac:
        return 1.0
    return hp.lr_floor + (1 - hp.lr_floor) * left / hp.cooldown_frac

def muon_momentum(step: int, hp: Hyperparameters) -> float:
    """Muon's momentum, which rises linearly for muon_momentum_steps and then stays."""
    risen = min(1.0, step / hp.muon_momentum_steps) if hp.muon_momentum_steps else 1.0
    return hp.muon_momentum_start + risen * (hp.muon_momentum_end - hp.muon_momentum_start)

# ---- 3. Model -----------------------------------------------------------------------------------

def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))

def previous_token(x: Tensor, begins_T: Tensor) -> Tensor:
    """For each token of x [T, ...], the values of the token before it; zero where a document
    begins."""
    shifted = torch.cat((torch.zeros_like(x[:1]), x[:-1]))
    return shifted.masked_fill(begins_T.view(-1, *[1] * (x.ndim - 1)), 0)

class CastedLinear(nn.Linear):
    """A linear layer without bias. Its weight is kept in float32 and cast to the input's dtype when
    it is used.

    zero: the weight starts at zero, so that the layer adds nothing until it has learned something.
    parts: how many matrices of equal height the weight stacks, as 3 for Q, K and V. Muon makes
    each of them orthogonal by itself. A layer that stacks matrices and leaves parts at 1 trains
    worse, since Muon then takes the stack for one matrix.
    fp8_scales: factors of input, weight and gradient, with which the layer trains in FP8; section 5
    explains them."""

    def __init__(self, in_features, out_features, *, zero=False, parts=1, fp8_scales=None):
        self.zero = zero  # first, because nn.Linear's constructor calls reset_parameters
        super().__init__(in_features, out_features, bias=False)
        # The optimizer sees the parameter but not the layer. A parameter keeps such an attribute
        # when the model moves to another device.
        self.weight.parts = parts
        self.fp8_scales = fp8_scales

    def reset_parameters(self):
        # This layer's weights are set here and nowhere else: draw_weights calls this once more.
        std = 0.0 if self.zero else 0.5 * self.in_features**-0.5
        nn.init.uniform_(self.weight, -math.sqrt(3) * std, math.sqrt(3) * std)

    def forward(self, x: Tensor) -> Tensor:
        if self.fp8_scales and self.training:  # validation is not in FP8, as in the record
            return FP8Linear.apply(x, self.weight, self.fp8_scales)
        return F.linear(x, self.weight.type_as(x))

class Rotary(nn.Module):
    """Rotary positions (arXiv:2104.09864) in the first half of each head's channels. The second
    half is left alone, so that it can match content at any distance (record 2024-12-17)."""

    def __init__(self, head_dim: int, max_seq_len: int, base: float):
        super().__init__()
        frequencies = base ** -torch.linspace(0, 1, head_dim // 4, dtype=torch.float64)
        positions = torch.arange(max_seq_len, dtype=torch.float64)  # in float32, angles are inexact
        angles = torch.outer(positions, frequencies)[:, None]  # [T, 1, K / 4]
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x_THK: Tensor) -> Tensor:
        K = x_THK.size(-1)
        cos, sin = self.cos[:len(x_THK)], self.sin[:len(x_THK)]
        a, b, content = x_THK.float().split((K // 4, K // 4, K // 2), dim=-1)
        return torch.cat((a * cos + b * sin, b * cos - a * sin, content), dim=-1).type_as(x_THK)

class CausalSelfAttention(nn.Module):
    """Attention with normed queries and keys (arXiv:2010.04245). An embedding of the token is mixed
    into the values (record 2024-12-04, after arXiv:2410.17897). With fewer kv heads than heads,
    several query heads share one head of keys and values (arXiv:2305.13245)."""

    def __init__(self, hp: Hyperparameters, rotary: Rotary):
        super().__init__()
        self.hp = hp
        self.rotary = rotary
        self.head_counts = (hp.num_heads, hp.num_kv_heads, hp.num_kv_heads)  # of q, k, v
        # Muon's parts are Q, K and V. Parts must be equally high: with 6 heads and 2 kv heads, Q
        # makes three of them, so that there are five.
        self.qkv = CastedLinear(hp.model_dim, sum(self.head_counts) * hp.head_dim,
                                parts=hp.num_heads // hp.num_kv_heads + 2)
        self.proj = CastedLinear(hp.num_heads * hp.head_dim, hp.model_dim, zero=True)
        self.value_mix = nn.Parameter(torch.tensor([0.5, 0.5]))  # of the values and the embedding

    def forward(self, x_TD: Tensor, value_embed: Tensor | None, begins_T: Tensor,
                attend: Callable) -> Tensor:
        T = len(x_TD)
        qkv = self.qkv(x_TD).view(T, -1, self.hp.head_dim)
        # Queries and keys are normed and rotated alike; both together take fewer operations.
        qk, v = qkv.split((sum(self.head_counts[:2]), self.head_counts[2]), dim=1)
        q, k = self.rotary(norm(qk)).split(self.head_counts[:2], dim=1)
        if self.hp.key_offset:
            # Half of each key, the one without position, comes from the token before (record #49).
            # In "A B ... A", that half of B's key is A's, so the second A finds B.
            positional, content = k.chunk(2, dim=-1)
            k = torch.cat((positional, previous_token(content, begins_T)), dim=-1)
        v = self.value_mix[0] * v
        if value_embed is not None:
            v = v + self.value_mix[1] * value_embed.view_as(v)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, H, T, K]
        y_1HTK = attend(q, k, v)
        return self.proj(y_1HTK.squeeze(0).transpose(0, 1).reshape(T, -1))

class MLP(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.fc = CastedLinear(dim, 4 * dim)
        self.proj = CastedLinear(4 * dim, dim, zero=True)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.proj(F.relu(self.fc(x_TD)).square())  # ReLU^2 (arXiv:2109.08668)

class Block(nn.Module):
    def __init__(self, hp: Hyperparameters, layer: int, rotary: Rotary):
        super().__init__()
        self.attn = CausalSelfAttention(hp, rotary) if hp.attention[layer] == "x" else None
        self.mlp = MLP(hp.model_dim)
        self.residual_mix = nn.Parameter(torch.tensor([1.0, 0.0]))  # of the stream and of x0

    def forward(self, x_TD: Tensor, x0_TD: Tensor, value_embed: Tensor | None, begins_T: Tensor,
                attend: Callable) -> Tensor:
        x_TD = self.residual_mix[0] * x_TD + self.residual_mix[1] * x0_TD
        if self.attn is not None:
            x_TD = x_TD + self.attn(norm(x_TD), value_embed, begins_T, attend)
        return x_TD + self.mlp(norm(x_TD))

class GPT(nn.Module):
    """Call it with the tokens and targets of one sequence and the attention window; it returns the
    mean loss per token in nats. attend_under is flex (section 4) or, on a CPU, block_sparse
    (section 10): for a mask and a scale it returns the function attend(q, k, v) that layers call.

    Embeddings are kept in `dtype`, and the residual stream stays in it, as forward checks after
    each layer. All other parameters are float32. A bfloat16 stream times a float32 tensor without
    dimensions, such as residual_mix[0], stays bfloat16. Times a vector or a matrix it becomes
    float32: cast these with type_as."""

    LOGITS_TOKENS = 65536  # tokens whose logits exist at a time; validation has longer sequences

    def __init__(self, hp: Hyperparameters, attend_under: Callable, dtype: torch.dtype):
        super().__init__()
        self.hp = hp
        self.attend_under = attend_under
        self.end_of_text = hp.vocab_size - 1  # in the shards, each document begins with it
        padded_vocab = math.ceil(hp.vocab_size / 64) * 64  # a multiple suits the matrix units
        self.embed = nn.Embedding(padded_vocab, hp.model_dim, dtype=dtype)
        if hp.pair_rows:
            self.pair_embed = nn.Embedding(hp.pair_rows, hp.model_dim, dtype=dtype)
        if hp.smear:
            self.smear = nn.Parameter(torch.zeros(hp.model_dim))
        # Layers marked by the same digit share a value embedding (record 2024-12-08).
        self.value_embeds = nn.ModuleDict({
            mark: nn.Embedding(padded_vocab, hp.num_kv_heads * hp.head_dim, dtype=dtype)
            for mark in sorted(set(hp.value_embeds) - {"."})})
        rotary = Rotary(hp.head_dim, max(hp.train_seq_len, hp.val_seq_len), hp.rope_base)
        self.blocks = nn.ModuleList(Block(hp, layer, rotary) for layer in range(len(hp.windows)))
        self.skip_weights = nn.Parameter(torch.ones(len(self.blocks) // 2))
        # FP8_SCALES (section 5) is for the gradient of one sequence's mean loss. train_step divides
        # that by micro_batches, so the gradient's factor is multiplied by it. (A batch that grows
        # during the run would need a factor that grows as well.)
        scales = (*FP8_SCALES[:2], FP8_SCALES[2] * hp.micro_batches)
        self.lm_head = CastedLinear(hp.model_dim, padded_vocab, zero=True,
                                    fp8_scales=scales if hp.use_fp8 else None)

    def forward(self, tokens_T: Tensor, targets_T: Tensor, window: Tensor) -> Tensor:
        begins_T = tokens_T == self.end_of_text
        masks = zip("LS", build_block_masks(tokens_T, self.end_of_text, window))
        attend = {mark: self.attend_under(mask, self.hp.attention_scale) for mark, mask in masks
                  if mark in self.hp.windows}
        value_embeds = {mark: embed(tokens_T) for mark, embed in self.value_embeds.items()}

        # A U-Net (record 2024-11-10): the first half of the layers push their outputs on a stack,
        # and each layer of the second half pops one, that of its mirror image, and adds it. With an
        # odd number of layers, the one in the middle does neither.
        x_TD = x0_TD = self.embedded(tokens_T, begins_T)
        half = len(self.blocks) // 2
        skips = []
        for layer, block in enumerate(self.blocks):
            if layer >= len(self.blocks) - half:
                # Counted from the end, so the last layer has the last weight.
                x_TD = x_TD + self.skip_weights[layer - len(self.blocks)] * skips.pop()
            value_embed = value_embeds.get(self.hp.value_embeds[layer])  # None for "."
            x_TD = block(x_TD, x0_TD, value_embed, begins_T, attend[self.hp.windows[layer]])
            if layer < half:
                skips.append(x_TD)
            assert x_TD.dtype == self.embed.weight.dtype, f"layer {layer} lacks a cast (type_as)"
        return self.mean_loss(norm(x_TD), targets_T)

    def embedded(self, tokens_T: Tensor, begins_T: Tensor) -> Tensor:
        """The tokens' embeddings. pair_rows adds an embedding of each token together with the one
        before it, where pairs share rows by a hash (after record #62); smear adds a learned share
        of the embedding before (after record #34)."""
        x_TD = self.embed(tokens_T)
        if self.hp.pair_rows:
            before_T = F.pad(tokens_T[:-1], (1, 0), value=self.end_of_text)
            before_T = before_T.masked_fill(begins_T, self.end_of_text)
            # A linear hash is enough: pairs that share a row learn to live with each other.
            pairs_T = (before_T.long() * 2654435761 + tokens_T) % self.hp.pair_rows
            x_TD = x_TD + self.pair_embed(pairs_T)
        x_TD = norm(x_TD)
        if self.hp.smear:
            x_TD = x_TD + self.smear.type_as(x_TD) * previous_token(x_TD, begins_T)
        return x_TD

    def logits(self, x_TD: Tensor) -> Tensor:
        """A smooth cap keeps the logits between 0 and 2c. It is c tanh(z / c), shifted by c, which
        makes no difference to a softmax (to a z-loss it would). Tokens that only pad the vocabulary
        have logits as well, but are never targets."""
        c = self.hp.lm_head_softcap
        return 2 * c * torch.sigmoid(self.lm_head(x_TD).float() * (2 / c))

    def mean_loss(self, x_TD: Tensor, targets_T: Tensor) -> Tensor:
        """The cross-entropy in nats, which is log sum exp(logits) minus the target's logit, summed
        over the tokens and divided by T. Targets of -1 add nothing to the sum. Validation reports
        this loss as well: what only training shall minimize belongs under `if self.training`."""
        total = 0
        for x, targets in zip(x_TD.split(self.LOGITS_TOKENS), targets_T.split(self.LOGITS_TOKENS)):
            # F.cross_entropy would find each row's maximum first and, in the backward pass, sum
            # the rows of nll_loss's gradient. Neither is needed: exp() cannot overflow, because
            # logits are at most 2c <= 70. nll_loss picks the target's logit and changes its sign.
            logits_TV = self.logits(x)
            log_sum_T = logits_TV.exp().sum(-1).log()
            minus_target_T = F.nll_loss(logits_TV, targets, reduction="none", ignore_index=-1)
            total = total + (log_sum_T + minus_target_T).masked_fill(targets < 0, 0).sum()
        return total / len(x_TD)

def draw_weights(model: nn.Module, seed: int):
    """Calls every module's reset_parameters again, each with a seed of its own that depends on
    `seed` and on the module's name. Two scripts then start from equal weights in every layer that
    they share, and their runs can be compared in pairs. To initialize a layer in another way,
    override its reset_parameters: what a constructor does to the weights of an nn.Linear or an
    nn.Embedding is overwritten here. Parameters of modules without reset_parameters stay as they
    were constructed.

    Weights are drawn in float32 and then cast, because what torch draws in bfloat16 depends on its
    version."""
    for name, module in model.named_modules():
        if hasattr(module, "reset_parameters") and list(module.parameters()):
            torch.manual_seed(int(sha256(f"{seed} {name}".encode())[:15], 16))
            dtype = next(module.parameters()).dtype
            module.float().reset_parameters()
            module.to(dtype)

# ---- 4. Block masks and attention ---------------------------------------------------------------

def build_block_masks(tokens_T: Tensor, end_of_text: int, window: Tensor) -> list[BlockMask]:
    """The long and the short mask for FlexAttention (arXiv:2412.05496), in blocks of 128 tokens.

    A token sees itself and the tokens before it in the same document and within the window. The
    window counts whole blocks, the query's own included; the short window has half as many, and at
    least one. `window` is a tensor on the device (int32, in tokens), so that it can grow without a
    recompile.

    For each query block, FlexAttention takes two lists of key blocks: partial ones, in which it
    asks `sees` about every pair of tokens, and full ones, in which every pair is visible. Since the
    window counts whole blocks, it only selects them, and `sees` need not know of it. Here are four
    blocks where the second document begins inside block 1, in a window of three blocks (p: partial,
    f: full):

        query block   key blocks 0 1 2 3
                  0              p . . .     the diagonal is always partial, because it is causal
                  1              p p . .     block 0 is visible to the first document's tokens only
                  2              . p p .     block 1 holds the end of the first document as well
                  3              . p f p     block 2 lies in the same document as all of block 3
    """
    document_T = (tokens_T == end_of_text).cumsum(0, dtype=torch.int32)

    def sees(batch, head, query, key):
        return (key <= query) & (document_T[query] == document_T[key])

    # Maps of [query block, key block], without the window yet. They must agree with `sees`: change
    # them when you change it, because FlexAttention asks it about partial blocks only. Documents
    # are numbered upwards, so it is enough to compare those of a block's first and last tokens:
    #     some pair is visible   query block >= key block, first[query block] <= last[key block]
    #     all pairs are          query block > key block, last[query block] == first[key block]
    block_N = torch.arange(len(tokens_T) // BLOCK, dtype=torch.int32, device=tokens_T.device)
    distance_NN = block_N[:, None] - block_N
    first_N = document_T[::BLOCK]
    last_N = document_T[BLOCK - 1::BLOCK]
    some_visible_NN = (distance_NN >= 0) & (first_N[:, None] <= last_N)
    all_visible_NN = (distance_NN > 0) & (last_N[:, None] == first_N)

    def lists(name: str, chosen_NN: Tensor) -> dict[str, Tensor]:
        """How many blocks each row chooses, and a list that begins with these; FlexAttention reads
        no further. The names are those of BlockMask's arguments."""
        count_N = chosen_NN.sum(1, dtype=torch.int32)
        order_NN = chosen_NN.int().argsort(descending=True, stable=True).int().contiguous()
        return {f"{name}_num_blocks": count_N[None, None], f"{name}_indices": order_NN[None, None]}

    def mask(window_blocks: Tensor) -> BlockMask:
        seen_NN = some_visible_NN & (distance_NN < window_blocks)
        partial_NN, full_NN = seen_NN & ~all_visible_NN, seen_NN & all_visible_NN
        # "kv" lists the key blocks of each query block; "q", for the backward pass, the query
        # blocks of each key block. (BlockMask.from_kv_blocks would take a detour to derive these.)
        return BlockMask(seq_lengths=(len(tokens_T), len(tokens_T)), BLOCK_SIZE=(BLOCK, BLOCK),
                         mask_mod=sees, **lists("kv", partial_NN), **lists("full_kv", full_NN),
                         **lists("q", partial_NN.T), **lists("full_q", full_NN.T))

    long = (window + BLOCK - 1) // BLOCK
    return [mask(long), mask((long // 2).clamp(min=1))]

def flex(mask: BlockMask, scale: float) -> Callable:
    """Attention under a mask by FlexAttention, for GPUs, to be compiled."""
    return lambda q, k, v: flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)

# ---- 5. FP8 linear ------------------------------------------------------------------------------

# FP8 products take half the time of bf16 ones. A value has 8 bits: e4m3 (up to 448, 3 bits of
# mantissa) for inputs and weights, e5m2 (up to 57344, 2 bits) for gradients, which spread more.
# Each value is multiplied by a factor before its cast, and the product is divided by both factors.

# The factors of input, weight and gradient. The input is normed, so |x| <= sqrt(D) = 28 at D = 768,
# and a factor of 2 leaves room to 448. The weight starts at zero and learns slowly; with 2^9, up to
# 0.875 fits. The gradient of a mean over T tokens is at most 1 / T; 2^19 makes that 11 at 48K. That
# is far below the limit, but most gradients are much smaller: a smaller factor would round them to
# zero.
FP8_SCALES = (2.0, 2.0**9, 2.0**19)

def to_fp8(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max  # an overflowing cast may give NaN or inf, so clamp
    return (x.float() * scale).clamp(-limit, limit).to(dtype)

def fp8_matmul(a: Tensor, b: Tensor, scale: float, dtype: torch.dtype, fast: bool) -> Tensor:
    """a @ b.T / scale in dtype, for contiguous FP8 matrices. `fast` sums with less precision."""
    # _scaled_mm multiplies by a factor for each matrix. One of them can do the work of both.
    one = torch.full((), 1.0, device=a.device)
    inverse = torch.full((), 1 / scale, device=a.device)
    return torch._scaled_mm(a, b.T, one, inverse, out_dtype=dtype, use_fast_accum=fast)

class FP8Linear(torch.autograd.Function):
    """x_TD @ w_VD.T by products in FP8 (record 2025-01-13), with the factors of x, w and gradient.
    Both matrices of an FP8 product must be contiguous in the dimension that is summed over, hence
    the transposes."""

    @staticmethod
    def forward(ctx, x_TD: Tensor, w_VD: Tensor, scales: tuple[float, float, float]) -> Tensor:
        x8_TD = to_fp8(x_TD, scales[0], torch.float8_e4m3fn)
        w8_VD = to_fp8(w_VD, scales[1], torch.float8_e4m3fn)
        ctx.scales = scales
        ctx.save_for_backward(x8_TD, w8_VD)
        return fp8_matmul(x8_TD, w8_VD, scales[0] * scales[1], x_TD.dtype, fast=True)

    @staticmethod
    def backward(ctx, grad_TV: Tensor):
        x_scale, w_scale, grad_scale = ctx.scales
        x8_TD, w8_VD = ctx.saved_tensors
        g8_TV = to_fp8(grad_TV, grad_scale, torch.float8_e5m2).contiguous()
        g8_VT, x8_DT, w8_DV = (x.T.contiguous() for x in (g8_TV, x8_TD, w8_VD))
        grad_x_TD = fp8_matmul(g8_TV, w8_DV, grad_scale * w_scale, grad_TV.dtype, fast=False)
        grad_w_VD = fp8_matmul(g8_VT, x8_DT, grad_scale * x_scale, torch.float32, fast=False)
        return grad_x_TD, grad_w_VD, None

# ---- 6. Processes -------------------------------------------------------------------------------

class Exchange(NamedTuple):
    """A tensor that is on its way between processes, until `result` has waited for it. On GPUs only
    the GPU's stream waits, and the host goes on."""
    tensor: Tensor
    work: "dist.Work | None" = None  # None where there is nothing to wait for

    def result(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.tensor

@dataclass(frozen=True)
class World:
    """The processes that train together, and this one's place among them.

    A matrix, or a stack of matrices, is divided among them by its first dimension, in equal parts:
    of two processes, each updates 25,152 rows of a matrix [50304, 768]. Vectors and scalars, and
    what cannot be divided equally, are not divided: every process does the same work on all of it.
    (dist.reduce_scatter_single and all_gather_single are the new names of what was called
    reduce_scatter_tensor and all_gather_into_tensor.)"""
    rank: int
    size: int
    device: torch.device

    def divides(self, whole: Tensor) -> bool:
        return self.size > 1 and whole.ndim > 1 and len(whole) % self.size == 0

    def rows(self, whole: Tensor) -> Tensor:
        """This process's rows of a tensor, as a view."""
        return whole.chunk(self.size)[self.rank] if self.divides(whole) else whole

    def reduce_scatter(self, whole: Tensor) -> Exchange:
        """Starts to sum a tensor over the processes. The result is this process's rows of the sum,
        in a new tensor. A tensor that is not divided is summed in place, and is the result."""
        if not self.divides(whole):
            return self.all_reduce(whole)
        local = torch.empty_like(self.rows(whole))
        return Exchange(local, dist.reduce_scatter_single(local, whole, async_op=True))

    def all_gather(self, whole: Tensor) -> Exchange:
        """Starts to fill in the rows of a tensor that other processes have computed. It works in
        place: what this process sends are its own rows of the same tensor."""
        if not self.divides(whole):
            return Exchange(whole)
        return Exchange(whole, dist.all_gather_single(whole, self.rows(whole), async_op=True))

    def all_reduce(self, whole: Tensor) -> Exchange:
        """Starts to sum a tensor over the processes, in place."""
        if self.size == 1:
            return Exchange(whole)
        return Exchange(whole, dist.all_reduce(whole, async_op=True))

# ---- 7. Optimizers ------------------------------------------------------------------------------

def build_optimizers(model: nn.Module, hp: Hyperparameters, world: World) -> list["Optimizer"]:
    """Which optimizer trains which parameters, and how fast. A new matrix needs a row here. A new
    vector or scalar does not: those that fit no row are trained by Adam with scalar_lr. A parameter
    belongs to the first row whose pattern fits its whole name, and each row must get at least one.
    The log says what each optimizer trains. Muon stacks its matrices, so those of one row have one
    shape."""
    table = [
        # names of the parameters         optimizer  peak learning rate   shape in `speedrun`
        (r"lm_head\.weight",                   Adam, hp.head_lr),       # [50304, 768]
        (r"(pair_|value_)?embeds?\..*",        Adam, hp.embed_lr),      # [50304, 768]
        (r"blocks\.\d+\.attn\.qkv\.weight",    Muon, hp.muon_lr),       # [2304, 768]
        (r"blocks\.\d+\.attn\.proj\.weight",   Muon, hp.muon_lr),       # [768, 768]
        (r"blocks\.\d+\.mlp\.fc\.weight",      Muon, hp.muon_lr),       # [3072, 768]
        (r"blocks\.\d+\.mlp\.proj\.weight",    Muon, hp.muon_lr),       # [768, 3072]
    ]
    optimizers = []
    remaining = dict(model.named_parameters())
    for pattern, optimizer, lr in table:
        names = [name for name in remaining if re.fullmatch(pattern, name)]
        require(names, f"no parameter fits the row {pattern} of the table in build_optimizers")
        params = {name: remaining.pop(name) for name in names}
        optimizers.append(optimizer(params, lr, hp, world))
    matrices = [name for name, p in remaining.items() if p.ndim > 1]
    require(not matrices, f"no row of the table in build_optimizers takes {', '.join(matrices)}")
    if remaining:
        optimizers.append(Adam(remaining, hp.scalar_lr, hp, world))
    return optimizers

class Optimizer:
    """Trains some parameters. The work is divided among the processes, as in ZeRO
    (arXiv:1910.02054): each updates its part of the parameters.

    An optimizer defines three phases of a step. train_step runs each one for all optimizers before
    the next one, so that the exchange of one overlaps the arithmetic of another:
        begin()       starts to sum the gradients over the processes
        update(step)  computes the update of this process's rows, and starts to send the result
        finish(step)  waits for the results of the others; MatrixOptimizer then applies all of them
    Clipping by the norm of all gradients would be a phase between begin() and update().

    What a process has of a matrix, or of a stack of matrices, that is divided among several:
        p.grad           all rows, but summed over its own micro-batches only
        summed gradient  its own rows, in update()
        parameter        all rows; between Adam's update() and finish(), only its own are new
        state            tensors for all rows, of which only its own are up to date

    What it remembers from step to step belongs in `state`, under a name, with one entry per
    parameter, in the order of `params`: in a list, or stacked in one tensor. Adam has the list
    state["mean"], Muon the stack state["momentum"]. Checkpoints save it, and it is reset after the
    warmup. A process reads and writes its own rows, world.rows(tensor); gather_training_state
    fetches the others. (Storing its own rows alone would save 1.1 GB on each of eight GPUs, but
    need code to split and join tensors.)"""

    def __init__(self, params: dict, lr: float, hp: Hyperparameters, world: World):
        dtypes = {p.dtype for p in params.values()}
        require(dtypes in ({torch.float32}, {getattr(torch, hp.dtype)}), f"{list(params)} have "
                f"{dtypes}: keep all of one row in float32 or, as embeddings, in {hp.dtype}")
        self.params = params  # {name: parameter}
        self.lr = lr  # the peak; lr_scale lowers it during the run
        self.hp = hp
        self.world = world
        self.state = {}

class Adam(Optimizer):
    """Adam (arXiv:1412.6980) by PyTorch's fused kernel, which decays weights as AdamW does
    (arXiv:1711.05101); in the table, functools.partial(Adam, weight_decay=0.1) is an optimizer
    with decay. Each process updates its rows of every matrix, and all of every vector and scalar.
    """

    def __init__(self, params, lr, hp, world, weight_decay=0.0):
        super().__init__(params, lr, hp, world)
        self.weight_decay = weight_decay
        self.state["mean"] = [torch.zeros_like(p) for p in params.values()]
        self.state["mean_square"] = [torch.zeros_like(p) for p in params.values()]

    def begin(self):
        self.sums = [self.world.reduce_scatter(p.grad) for p in self.params.values()]

    def update(self, step: int):
        gradients = [self.sums.pop(0).result() for _ in self.params]  # self.sums keeps none
        local = [self.world.rows(p.detach()) for p in self.params.values()]
        means = [self.world.rows(mean) for mean in self.state["mean"]]
        mean_squares = [self.world.rows(square) for square in self.state["mean_square"]]
        # The kernel reads a counter of steps for each tensor, but does not advance it. The empty
        # list is for AMSGrad.
        steps = [torch.full((), step + 1.0, device=self.world.device)] * len(local)
        torch._fused_adamw_(local, gradients, means, mean_squares, [], steps,
                            lr=self.lr * lr_scale(step, self.hp), beta1=self.hp.adam_beta1,
                            beta2=self.hp.adam_beta2, eps=self.hp.adam_eps,
                            weight_decay=self.weight_decay, amsgrad=False, maximize=False)
        self.gathers = [self.world.all_gather(p.detach()) for p in self.params.values()]

    def finish(self, step: int):
        for exchange in self.gathers:
            exchange.result()

class MatrixOptimizer(Optimizer):
    """Trains matrices of one shape, which it stacks. Every process updates equally many whole
    matrices; the stack is filled up with zeros. With 11 matrices on two processes, a step goes so:

        begin   every process copies its gradients of the 11 matrices into a stack of 12
                and starts to sum the stacks; process 0 receives matrices 0 to 5 of the sum
        update  process 0 makes the updates of matrices 0 to 5, process 1 those of 6 to 10
                and of the zeros, and they start to send them to each other
        finish  every process subtracts all 11 updates, times the learning rate

    A subclass defines direction(gradients, step), which makes the updates of this process's
    matrices from their gradients, [n / processes, height, width] in float32. The zeros that fill up
    the stack may be among them, and in the first step all gradients of the blocks are zero, because
    the layers that start at zero let none through. What the subclass remembers belongs in a stack
    state[name] of at least two dimensions, the first of length self.shape[0]; it reads and writes
    world.rows(state[name]). `parts` is that of CastedLinear; stacks count whole matrices, not their
    parts."""

    def __init__(self, params, lr, hp, world):
        super().__init__(params, lr, hp, world)
        kinds = {(p.shape, getattr(p, "parts", 1)) for p in params.values()}
        shape, self.parts = next(iter(kinds))
        require(len(kinds) == 1 and len(shape) == 2, f"{list(params)}: one row of the table takes "
                f"matrices of one height, one width and one number of parts, not {kinds}")
        self.shape = (math.ceil(len(params) / world.size) * world.size, *shape)
        # Gradients and updates travel in the dtype of the activations, so gradients are rounded to
        # it before they are summed over the processes.
        self.updates = torch.zeros(self.shape, dtype=getattr(torch, hp.dtype), device=world.device)
        self.gradients = torch.zeros_like(self.updates)

    def begin(self):
        for gradient, p in zip(self.gradients, self.params.values()):
            gradient.copy_(p.grad)
        self.sum = self.world.reduce_scatter(self.gradients)

    def update(self, step: int):
        self.world.rows(self.updates).copy_(self.direction(self.sum.result().float(), step))
        self.gather = self.world.all_gather(self.updates)

    def finish(self, step: int):
        for update, p in zip(self.gather.result(), self.params.values()):
            # There is no weight decay; its place would be here.
            p.add_(update, alpha=-self.lr * lr_scale(step, self.hp))

class Muon(MatrixOptimizer):
    """Nesterov momentum, orthogonalized (Keller Jordan et al., 2024): every direction of the update
    becomes about equally large, so that rare directions are learned too."""

    def __init__(self, params, lr, hp, world):
        super().__init__(params, lr, hp, world)
        self.state["momentum"] = torch.zeros(self.shape, device=world.device)
        self.orthogonalize = newton_schulz if world.device.type != "cuda" else torch.compile(
            newton_schulz, dynamic=False, fullgraph=True)

    def direction(self, gradients: Tensor, step: int) -> Tensor:
        beta = muon_momentum(step, self.hp)
        momentum = self.world.rows(self.state["momentum"]).lerp_(gradients, 1 - beta)
        update = gradients.lerp(momentum, beta).to(self.updates.dtype)  # Nesterov: one step ahead
        matrices = update.unflatten(1, (self.parts, -1)).flatten(0, 1)
        # Those with more rows than columns are scaled up, to change outputs as much as others do.
        scale = max(1, matrices.size(1) / matrices.size(2)) ** 0.5
        return scale * self.orthogonalize(matrices).reshape_as(update)

def newton_schulz(x: Tensor, steps: int = 5) -> Tensor:
    """Approximates U V^T for each matrix U S V^T of x [n, rows, cols] by a quintic iteration, which
    is chosen to be steep at zero: singular values end up between 0.7 and 1.2, except for those that
    are almost zero (Keller Jordan, record #3)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.size(1) > x.size(2)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x

# ---- 8. Data ------------------------------------------------------------------------------------
# A shard is a header of 256 int32 (magic number, version, number of tokens, zeros), then the tokens
# in uint16. Each document begins with the end-of-text token, vocab_size - 1.

SHARD_MAGIC = 20240520
SHARD_VERSION = 1
SHARD_HEADER_BYTES = 4 * 256

class Shard(NamedTuple):
    path: str
    tokens: int  # how many it has
    fingerprint: str  # a hash of the first and the last 64 KB, to notice other data

def find_shards(pattern: str) -> list[Shard]:
    """The shards that a glob matches, in the order of their paths."""
    shards = []
    for path in sorted(glob.glob(pattern, recursive=True)):
        problem = f"{path} is not a whole token shard: data/inspect_shards.py says what is wrong"
        require(os.path.isfile(path) and os.path.getsize(path) > SHARD_HEADER_BYTES, problem)
        with open_file(path, "rb") as f:
            data = np.memmap(f, mode="r")
        magic, version, tokens = data[:12].view("<i4").tolist()
        expected = (SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_BYTES + 2 * tokens)
        require((magic, version, len(data)) == expected, problem)
        ends = data[:2**16].tobytes() + data[-2**16:].tobytes()
        shards.append(Shard(path, tokens, sha256(ends)[:16]))
    require(shards, f"no file matches {pattern}: ./run.sh makes or fetches a preset's data, and "
            "data/tokenize_text.py makes shards of other data")
    return shards

def read_tokens(path: str, start: int, count: int, vocab_size: int, pin: bool = False) -> Tensor:
    """Tokens [count] in uint16 from a shard, from token `start` on; in pinned memory if asked
    for."""
    tokens = torch.empty(count, dtype=torch.uint16, pin_memory=pin)
    with open_file(path, "rb") as f:
        f.seek(SHARD_HEADER_BYTES + 2 * start)
        require(f.readinto(tokens.numpy()) == tokens.nbytes, f"{path} has become shorter")
    largest = tokens.numpy().max()  # by NumPy: torch's threads would disturb those that train
    require(largest < vocab_size, f"{path} holds the token {largest}, which is not below "
            f"--vocab_size={vocab_size}; data/inspect_shards.py says where")
    return tokens

def step_starts(shards: list[Shard], hp: Hyperparameters) -> Iterator[tuple[str, int]]:
    """(path of a shard, the first token in it that a step reads), for step after step as long as
    the data last. What is too short for a step at a shard's end is left out. Each further pass over
    the shards begins at another offset, so that it cuts the text at other places."""
    step = 0
    for epoch in range(hp.epochs):
        offset = int(epoch * 0.6180339887 * hp.train_seq_len) % hp.train_seq_len  # the golden ratio
        for shard in shards:
            start = offset
            # Below, not equal: the last target is one token further.
            while (end := start + batch_size(step, hp) * hp.train_seq_len) < shard.tokens:
                yield shard.path, start
                start = end
                step += 1

def train_batches(shards: list[Shard], hp: Hyperparameters, world: World, first_step: int):
    """For each step from first_step on, this process's share of the micro-batches: (inputs_T int32,
    targets_T int64). They are read into pinned memory and copied to the GPU asynchronously."""
    T = hp.train_seq_len
    for step, (path, start) in islice(enumerate(step_starts(shards, hp)), first_step, None):
        count = batch_size(step, hp) // world.size
        start += world.rank * count * T
        tokens = read_tokens(path, start, count * T + 1, hp.vocab_size,
                             pin=world.device.type == "cuda")
        # uint16 has no arithmetic, so the bits travel as int16; & 0xFFFF makes them unsigned again.
        tokens = tokens.view(torch.int16).to(world.device, non_blocking=True)
        tokens = tokens.to(torch.int32) & 0xFFFF
        inputs = tokens[:-1].view(count, T)
        targets = tokens[1:].to(torch.int64).view(count, T)
        yield list(zip(inputs, targets))

def load_validation(shards: list[Shard], hp: Hyperparameters, world: World) -> list:
    """This process's validation sequences, (inputs_T int32, targets_T int64) each. Over all
    processes, the tokens 1 to val_tokens are predicted once each. The last sequence is filled up
    with targets of -1, which no loss counts."""
    parts = [read_tokens(shard.path, 0, shard.tokens, hp.vocab_size) for shard in shards]
    stream = torch.cat(parts)[:hp.val_tokens + 1].to(torch.int32)
    padding = -hp.val_tokens % hp.val_seq_len  # to whole sequences
    inputs = F.pad(stream[:-1], (0, padding), value=hp.vocab_size - 1).split(hp.val_seq_len)
    targets = F.pad(stream[1:].long(), (0, padding), value=-1).split(hp.val_seq_len)
    mine = range(world.rank, len(inputs), world.size)
    return [(inputs[i].to(world.device), targets[i].to(world.device)) for i in mine]

# ---- 9. Training --------------------------------------------------------------------------------

def record_event(device: torch.device) -> torch.cuda.Event | None:
    """An event that a GPU reaches when it has done all that was launched; None on a CPU."""
    return torch.cuda.current_stream().record_event() if device.type == "cuda" else None

def wait_for(event: torch.cuda.Event | None):
    """Polls, so that signals have an effect even while a GPU waits for a process that is gone. In
    torch.cuda.synchronize() they would not."""
    while event and not event.query():
        time.sleep(1e-4)

def window_tensor(step: int, hp: Hyperparameters, world: World) -> Tensor:
    """The window as a tensor, which can change without a recompile. torch.full does not wait for
    the device; copying a number there would."""
    return torch.full((), window_tokens(step, hp), dtype=torch.int32, device=world.device)

def train_step(model, batches, optimizers, step: int, hp: Hyperparameters, world: World) -> Tensor:
    """One step on this process's micro-batches. Returns the mean loss over all processes. On GPUs
    it only launches work: the host waits neither for the device nor for other processes."""
    window = window_tensor(step, hp, world)
    loss = torch.zeros((), dtype=torch.float64, device=world.device)
    for inputs_T, targets_T in batches:
        # Losses and gradients are summed over micro-batches and processes. With this division, the
        # sums are those of the step's mean loss.
        micro_loss = model(inputs_T, targets_T, window) / batch_size(step, hp)
        micro_loss.backward()
        loss += micro_loss.detach()
    with torch.no_grad():
        for optimizer in optimizers:
            optimizer.begin()
        for optimizer in optimizers:
            optimizer.update(step)
        for optimizer in optimizers:
            optimizer.finish(step)
    model.zero_grad(set_to_none=True)
    return world.all_reduce(loss).result()

@torch.no_grad()
def evaluate(model, sequences: list, step: int, hp: Hyperparameters, world: World) -> float:
    """The mean loss in nats over the validation tokens of all processes."""
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for inputs_T, targets_T in sequences:
        total += model(inputs_T, targets_T, window_tensor(step, hp, world)).double() * len(inputs_T)
    model.train()
    total = world.all_reduce(total).result()
    wait_for(record_event(world.device))
    return float(total) / hp.val_tokens

def gather_training_state(model: nn.Module, optimizers: list[Optimizer]) -> dict:
    """{"model": {parameter: tensor}, "optimizers": {state: {parameter: tensor}}}, whole on every
    process. All processes take part, because each fetches the rows that others have. These are the
    tensors that training uses, not copies. The state of random generators is not among them,
    because training draws nothing at random. A method with dropout would have to save it, and to
    seed each process differently."""
    state = {"model": dict(model.state_dict()), "optimizers": {}}
    for optimizer in optimizers:
        for name, tensors in optimizer.state.items():
            # One entry per parameter, except that a stack is filled up for the processes.
            assert 0 <= len(tensors) - len(optimizer.params) < optimizer.world.size, name
            # A vector would not be divided among the processes, so nobody would fetch the rest.
            assert isinstance(tensors, list) or tensors.ndim > 1, f"{name}: make [n] an [n, 1]"
            for tensor in tensors if isinstance(tensors, list) else [tensors]:
                optimizer.world.all_gather(tensor).result()
            state["optimizers"].setdefault(name, {}).update(zip(optimizer.params, tensors))
    return state

@torch.no_grad()
def load_training_state(saved: dict, model: nn.Module, optimizers: list[Optimizer], world: World):
    """Copies what the first process has in `saved` to the model and the optimizers of every
    process. All processes take part."""
    state = gather_training_state(model, optimizers)
    saved_groups = {"the weight": saved["model"], **saved["optimizers"]}
    for group, tensors in {"the weight": state["model"], **state["optimizers"]}.items():
        for name, tensor in tensors.items():
            if world.rank == 0:
                source = saved_groups.get(group, {}).get(name)
                require(source is not None and source.shape == tensor.shape, "the checkpoint "
                        f"lacks {group} of {name} in the shape {list(tensor.shape)}")
                tensor.copy_(source)
            if world.size > 1:
                dist.broadcast(tensor, src=0)

def warm_up(model, optimizers: list[Optimizer], hp: Hyperparameters, world: World):
    """Compiles everything and allocates memory, by a backward pass, a step and a validation, all on
    random tokens. `train` then restores the weights and the optimizers' state. If your method does
    something at some steps only, do it here too: whatever is compiled later ends the run, because
    compiling would be timed."""
    # Without this, compiled programs with FP8Linear in them would not be kept on the disk.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True

    def random_sequence(length: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(hp.vocab_size, (length + 1,), device=world.device)
        # As in a batch, the targets begin at an aligned address. tokens[1:] itself does not, and
        # would compile to another program.
        return tokens[:-1].int(), tokens[1:].clone()
    # Look for parameters without a gradient here, since train_step clears the gradients.
    model(*random_sequence(hp.train_seq_len), window_tensor(0, hp, world)).backward()
    unused = [name for name, p in model.named_parameters() if p.grad is None]
    require(not unused, f"no gradient reaches {', '.join(unused)}: use or remove these parameters")
    train_step(model, [random_sequence(hp.train_seq_len)], optimizers, 0, hp, world)
    evaluate(model, [random_sequence(hp.val_seq_len)], 0, hp, world)

def train(plan: "Plan", world: World, log: "RunLog"):
    """A run, from the model to the report: builds, warms up, trains, validates and saves."""
    hp = plan.hp
    cuda = world.device.type == "cuda"
    torch.manual_seed(hp.seed)  # for modules that draw_weights leaves as they were constructed
    plain_model = GPT(hp, flex if cuda else block_sparse, getattr(torch, hp.dtype))
    draw_weights(plain_model, hp.seed)
    plain_model.to(world.device)
    # A run on a CPU takes minutes, in which compiling would not pay.
    model = torch.compile(plain_model, dynamic=False, fullgraph=True) if cuda else plain_model
    optimizers = build_optimizers(plain_model, hp, world)
    val_sequences = load_validation(plan.val_shards, hp, world)
    log.write(f"model: {sum(p.numel() for p in plain_model.parameters())} parameters; "
              f"{hp.micro_batches} x {hp.train_seq_len} tokens a step, {world.size} rank(s)")
    for each in optimizers:
        log.write(f"{type(each).__name__}, lr {each.lr}: {', '.join(each.params)}", console=False)

    # The warmup is not timed. It trains, on random tokens, so it is undone: the first process puts
    # back the initial state, or that of the checkpoint, and sends it to the others.
    began = time.perf_counter()
    state = copy.deepcopy(gather_training_state(plain_model, optimizers))
    warm_up(model, optimizers, hp, world)
    if plan.checkpoint and world.rank == 0:
        state = read_checkpoint(plan.checkpoint)
    load_training_state(state, plain_model, optimizers, world)
    del state
    if cuda:
        torch.compiler.set_stance("fail_on_recompile")  # a recompile would be timed
    log.write(f"warmup: {time.perf_counter() - began:.1f} s, untimed")

    # The clock runs for training steps alone: it stops to validate and to save.
    val_loss = plan.start.val_loss
    saved = True  # false once the newest save has failed
    batches_of_steps = train_batches(plan.train_shards, hp, world, plan.start.step)
    clock = StepClock(world.device, plan.start.seconds, log)
    clock.start()
    for step in range(plan.start.step, hp.num_iterations + 1):
        validates, saves = due(step, plan)
        if validates or saves:
            clock.stop()
            if validates:
                val_loss = evaluate(model, val_sequences, step, hp, world)
                log.write_loss("val_loss", val_loss, step, scheduled=step, seconds=clock.elapsed)
            if saves:
                now = Progress(step, clock.elapsed, val_loss if validates else math.nan)
                saved = save_checkpoint(now, plain_model, optimizers, plan, log)
            clock.start()
        if step == hp.num_iterations:
            break
        loss = train_step(model, next(batches_of_steps), optimizers, step, hp, world)
        clock.add_loss(step + 1, loss)

    log.release()
    log.write(f"throughput: {tokens_seen(step, hp) / max(clock.elapsed, 1e-9):.0f} tokens/s")
    if cuda:
        log.write(f"peak_memory: {torch.cuda.max_memory_allocated() >> 20} MiB on rank 0")
    log.write(f"final_val_loss: {val_loss:.4f} nats per token, on {hp.val_tokens} tokens")
    log.write(f"log: {log.path}")
    require(saved, "the run is complete, but its last checkpoint could not be saved")
    require(not log.waiting, f"the run is complete, but {log.path} could not be written to its end")

# ---- 10. Attention on a CPU ---------------------------------------------------------------------

def block_sparse(mask: BlockMask, scale: float) -> Callable:
    """Attention under the same mask in plain PyTorch, for CPUs, where FlexAttention has no
    gradient. Every query block gathers M key blocks and attends to these alone, so time and memory
    grow with T times the window, not with T squared. M is the most that any query block sees.
    Those that see fewer fill up with other blocks or repeat one, and these are masked out. In the
    example of build_block_masks, M is 3, and query block 0 gathers the blocks 0, 0 and 1, of which
    only the first counts."""
    partial_count_N1 = mask.kv_num_blocks[0, 0, :, None]
    count_N1 = partial_count_N1 + mask.full_kv_num_blocks[0, 0, :, None]
    N, M = len(count_N1), int(count_N1.max())
    token_NB = torch.arange(N * BLOCK, device=count_N1.device).view(N, BLOCK)  # [N, BLOCK]
    # Which blocks each query block gathers: those of its partial list, then those of its full list.
    place_M = torch.arange(M, device=count_N1.device)
    full_NM = mask.full_kv_indices[0, 0].gather(1, (place_M - partial_count_N1).clamp(min=0))
    blocks_NM = torch.where(place_M < partial_count_N1, mask.kv_indices[0, 0, :, :M], full_NM)
    # Now by token: which of the M * BLOCK keys that its block gathers does a query see?
    key = token_NB[blocks_NM].view(N, 1, M * BLOCK)
    listed = (place_M < count_N1).repeat_interleave(BLOCK, dim=1).view(N, 1, M * BLOCK)
    sees = listed & mask.mask_mod(0, 0, token_NB.view(N, BLOCK, 1), key)
    bias = torch.where(sees, 0.0, -torch.inf)  # [N, BLOCK, M * BLOCK]

    def attend(q_1HTK: Tensor, k_1HTK: Tensor, v_1HTK: Tensor) -> Tensor:
        _, H, T, K = q_1HTK.shape

        def gathered(x_1HTK: Tensor) -> Tensor:
            """The M blocks of keys or values that each query block gathers, [H * N, M * BLOCK, K].
            A kv head is repeated for all query heads that share it."""
            blocks = x_1HTK[0].repeat_interleave(H // x_1HTK.size(1), dim=0).view(H, N, BLOCK, K)
            return blocks.index_select(1, blocks_NM.flatten()).view(H * N, M * BLOCK, K)
        q = q_1HTK.reshape(H * N, BLOCK, K)
        biases = bias.to(q.dtype).expand(H, N, BLOCK, -1).reshape(H * N, BLOCK, -1)
        scores = torch.baddbmm(biases, q, gathered(k_1HTK).mT, alpha=scale)
        return (scores.softmax(-1) @ gathered(v_1HTK)).view(1, H, T, K)
    return attend

# =================================================================================================
# Nothing below this line is part of the method: it reads settings, and starts, checks, logs, saves
# and resumes runs.
# =================================================================================================

# ---- 11. Start and end of a process -------------------------------------------------------------

def main(argv: list[str]):
    """The story of a run, in the order in which it happens."""
    script = Path(__file__).read_text(encoding="utf-8")  # now, before anyone edits it
    hp, command = parse_flags(argv)
    world = world_of_this_process()
    # The first process makes a plan, with every check that needs no training, and sends it to the
    # others. With --check the processes do not connect, and each makes a plan of its own.
    plans = [prepare(hp, command, script, world) if world.rank == 0 or command.check else None]
    if world.size > 1 and not command.check:
        end_if_torchrun_is_gone()
        connect(world, sha256(script.encode()))
        dist.broadcast_object_list(plans, src=0)  # this replaces the None of the others
        shards = find_shards(plans[0].hp.train_files) + find_shards(plans[0].hp.val_files)
        found = [None] * world.size
        dist.all_gather_object(found, shards)  # what each process finds on its machine
        require(found.count(shards) == world.size, "data differ between machines: copy one to all")
    plan = plans[0]
    if command.check:
        build_optimizers(GPT(plan.hp, flex, getattr(torch, plan.hp.dtype)), plan.hp, world)
        say("checks passed")
        return
    log = RunLog(plan, world)
    end_at_signals(log)
    train(plan, world, log)
    if world.size > 1:
        dist.destroy_process_group()

TIMEOUT = timedelta(minutes=10)  # after which a process no longer waits for another one

def world_of_this_process() -> World:
    """As torchrun describes it in the environment; without torchrun this process is alone."""
    defaults = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    found = {name: os.environ.get(name, default) for name, default in defaults.items()}
    rank, local_rank, size = (int(n) if n.isdecimal() else -1 for n in found.values())
    require(0 <= rank < size and local_rank >= 0, f"the environment has {found}: unset these, "
            "or start with torchrun, which sets them")
    if not torch.cuda.is_available():
        return World(rank, size, torch.device("cpu"))
    require(local_rank < torch.cuda.device_count(), "start at most one process per GPU")
    # torch reads this when it first allocates memory on a GPU.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    torch.cuda.set_device(local_rank)
    return World(rank, size, torch.device("cuda", local_rank))

def connect(world: World, script_hash: str):
    """Joins the other processes and makes sure that all run the same script. They first meet in a
    store, which keeps to the timeout; NCCL would wait forever for one that is missing."""
    device_id = world.device if world.device.type == "cuda" else None
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=TIMEOUT))
        store.set(f"script of {world.rank}", script_hash)
        hashes = {store.get(f"script of {rank}") for rank in range(world.size)}
        require(len(hashes) == 1, "this script differs between machines: copy one to all")
        dist.init_process_group("nccl" if device_id else "gloo", store=store, rank=world.rank,
                                world_size=world.size, timeout=TIMEOUT, device_id=device_id)
    except (RuntimeError, ValueError) as e:
        raise UserError(f"the processes do not reach each other ({first_line(e)}); choose the "
                        "interface by NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME") from None

def end_at_signals(log: "RunLog"):
    """Lets SIGINT and SIGTERM end the run at once. The first process says how to continue it."""
    def end(number, frame):
        message = f"error: stopped by {signal.Signals(number).name}"
        for newest in checkpoints_of(log.path)[:1]:
            message += f"; {newest} is saved, and --resume={log.path} continues from it"
        say(message, sys.stderr)
        os._exit(128 + number)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end if log.file else signal.SIG_DFL)

def end_if_torchrun_is_gone():
    """Starts to watch torchrun, and ends this process if torchrun is gone without ending it."""
    torchrun = os.getppid()

    def watch():
        while os.getppid() == torchrun:
            time.sleep(1)
        os._exit(1)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=watch, daemon=True).start()

# ---- 12. Log and clock --------------------------------------------------------------------------

SEPARATOR = "=" * 100

def say(text: str, stream=None):
    """Prints on the console, as long as there is one: a run needs none."""
    try:
        print(text, file=stream, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), (stream or sys.stdout).fileno())

def first_line(e: Exception) -> str:
    return str(e).partition("\n")[0] or type(e).__name__

class RunLog:
    """The first process's log file and console; on other processes, writing does nothing.

    Lines that cannot be written, because the disk is full, wait in `waiting` and are tried again
    with the next one. When a run is resumed, `held` keeps all its lines there until its first loss
    is known and finite; only then does `release` cut the log back to the checkpoint and let them
    through. So a resume that fails changes nothing."""

    def __init__(self, plan: "Plan", world: World):
        self.hp = plan.hp
        self.file = self.path = None
        self.waiting = b""  # what is not in the file yet
        self.warned = False  # that the file cannot be written
        self.held = plan.checkpoint is not None
        if world.rank > 0:
            return
        self.file = open_log(plan)
        self.path = Path(self.file.name)
        if self.held:
            self.file.seek(plan.start.log_bytes)
            now = f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"
            self.write(f"resumed: step {plan.start.step} at {now}, on {world.size} rank(s) of "
                       f"{platform.node()} with torch {torch.__version__}")
        else:
            settings = [f"{name} = {value!r}" for name, value in asdict(plan.hp).items()]
            head = [*settings, SEPARATOR, *environment(plan, world), SEPARATOR]
            self.write("\n".join([*head, plan.script.removesuffix("\n"), SEPARATOR]), console=False)
        for change in plan.changes:
            self.write(f"changed: {change}")

    def write(self, text: str, console: bool = True):
        if self.file is None:
            return
        self.waiting += f"{text}\n".encode(errors="backslashreplace")
        if console:
            say(text)
        if not self.held:
            try:
                # A disk that is almost full may take only the first of these bytes.
                self.waiting = self.waiting[self.file.write(self.waiting):]
            except OSError as e:
                if not self.warned:
                    say(f"warning: {self.path} cannot be written ({e.strerror}); training goes on")
                self.warned = True

    def write_loss(self, kind: str, loss: float, step: int, scheduled: int, seconds: float):
        """Writes a loss after `step` updates: the val_loss of these weights, or the train_loss of
        the last update, which was computed just before it. The line also gives the window and the
        learning rate that the schedules have for `scheduled`, the number of updates before the loss
        was computed. A loss that is not finite ends the run."""
        if math.isfinite(loss):
            self.release()
        average = f"{1000 * seconds / step:.2f}" if step else "nan"
        self.write(f"step:{step}/{self.hp.num_iterations} {kind}:{loss:.4f} "
                   f"train_time:{1000 * seconds:.0f}ms step_avg:{average}ms "
                   f"tokens:{tokens_seen(step, self.hp)} lr:{lr_scale(scheduled, self.hp):.3f} "
                   f"window:{window_tokens(scheduled, self.hp)}")
        require(math.isfinite(loss), f"step {step}: {kind} is {loss}; try lower learning rates")

    def release(self):
        """Cuts the log of a resumed run back to its checkpoint. From the next line on, nothing is
        held back any more."""
        if self.file and self.held:
            self.file.truncate()
            self.held = False

def open_log(plan: "Plan"):
    """The file of the run's log, which no other process may write until this one ends. A new log is
    named by the time, and if that name exists, by a later second."""
    now = datetime.now(timezone.utc)
    file = open_file(f"{plan.checkpoint.parent}.log", "r+b", 0) if plan.checkpoint else None
    while file is None:
        path = Path(plan.hp.records, f"{now:%Y-%m-%dT%H-%M-%SZ}_{plan.hp.name}.log")
        os.makedirs(plan.hp.records, exist_ok=True)
        try:
            file = open(path, "xb", 0)
        except FileExistsError:
            now += timedelta(seconds=1)
    try:
        import fcntl  # which Windows lacks
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{file.name} is still written by another process: end it first") from None
    except (ImportError, OSError) as e:
        say(f"note: {file.name} cannot be locked ({e}): do not resume a run that is still alive")
    return file

class StepClock:
    """Training time in seconds, which starts and stops on an idle device, and the queue of losses.
    On a GPU a loss is read two steps late, so that the host never waits for the newest step."""

    def __init__(self, device: torch.device, elapsed: float, log: RunLog):
        self.device = device
        self.elapsed = elapsed
        self.log = log
        self.losses = []  # (step, loss, event of its arrival on the host), the oldest first

    def start(self):
        wait_for(record_event(self.device))
        self.started = time.perf_counter()

    def stop(self):
        self.read_losses(keep=0)
        wait_for(record_event(self.device))
        self.elapsed += time.perf_counter() - self.started

    def add_loss(self, step: int, loss: Tensor):
        loss = loss.to("cpu", non_blocking=True)  # into pinned memory, to be read after the event
        self.losses.append((step, loss, record_event(self.device)))
        self.read_losses(keep=2 if self.device.type == "cuda" else 0)

    def read_losses(self, keep: int):
        while len(self.losses) > keep:
            step, loss, arrived = self.losses.pop(0)
            wait_for(arrived)
            seconds = self.elapsed + time.perf_counter() - self.started
            self.log.write_loss("train_loss", float(loss), step, step - 1, seconds)

def environment(plan: "Plan", world: World) -> list[str]:
    """The machine, the software and the data, as lines `key: value`."""
    model = subprocess.getoutput("grep -sm1 'model name' /proc/cpuinfo").partition(": ")[2]
    units = [unit for unit in BF16_UNITS if torch.cpu.get_capabilities().get(unit)]
    cpu = [f"{os.cpu_count()} x {model}", torch.backends.cpu.get_cpu_capability(), *units]
    lines = [f"command: {' '.join(sys.argv)}",
             f"host: {platform.node()}, {platform.platform()}",
             f"cpu: {', '.join(cpu)}",
             f"torch: {torch.__version__}, Python {platform.python_version()}",
             f"ranks: {world.size}",
             f"threads: {torch.get_num_threads()} a rank",
             f"git: {subprocess.getoutput('git describe --always --dirty --abbrev=40')}"]
    for shard in plan.train_shards + plan.val_shards:
        lines.append(f"data: {shard.path} {shard.tokens} tokens {shard.fingerprint}")
    if world.device.type == "cuda":
        lines.append(f"gpus: {torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
        query = "driver_version,clocks.sm,clocks.max.sm,power.limit,temperature.gpu"
        table = subprocess.getoutput(f"nvidia-smi --query-gpu={query} --format=csv").splitlines()
        lines += [f"gpu: {line}" for line in table]
    lines.append(f"script: sha256 {plan.facts()['script']} {plan.script.count(chr(10))} lines")
    return [" ".join(line.split()) for line in lines]  # a name with a line break stays one line

# ---- 13. Checkpoints ----------------------------------------------------------------------------
# One file has all that a run needs to continue, on any number of processes. The two newest are
# kept, in a folder beside the log that has the log's name.

class Progress(NamedTuple):
    """Where a run stands."""
    step: int = 0
    seconds: float = 0.0  # of training time
    val_loss: float = math.nan  # if this step has been validated
    log_bytes: int = 0  # the length of the log, to which a resumed run cuts it back

def checkpoints_of(log_path: Path) -> list[Path]:
    """Newest first."""
    return sorted(log_path.with_suffix("").glob("step*.pt"), reverse=True)

def due(step: int, plan: "Plan") -> tuple[bool, bool]:
    """Whether the run validates, and whether it saves, after this number of steps. At the step from
    which it resumes, it does neither, because the run did what was due before it saved. But a run
    that was complete is validated again if its loss is unknown or something has changed."""
    last = step == plan.hp.num_iterations
    if plan.checkpoint and step == plan.start.step:
        return (last and (math.isnan(plan.start.val_loss) or len(plan.changes) > 0)), False
    validates = last or (plan.hp.val_loss_every > 0 and step % plan.hp.val_loss_every == 0)
    saves = step > 0 and plan.hp.save_every > 0 and (last or step % plan.hp.save_every == 0)
    return validates, saves

def save_checkpoint(now: Progress, model, optimizers, plan: "Plan", log: RunLog) -> bool:
    """Saves under a temporary name and renames, so that what has a checkpoint's name is whole. A
    failure does not end the run: a line says why, and the next save tries again. All processes take
    part; the first one writes."""
    state = gather_training_state(model, optimizers)
    if log.file is None:
        return True  # only the first process knows whether it was saved
    now = now._replace(log_bytes=log.file.tell())
    path = log.path.with_suffix("") / f"step{now.step:08}.pt"
    try:
        require(not log.waiting, f"{log.path} cannot be written")
        require(all(p.isfinite().all() for p in state["model"].values()), "weights are not finite")
        path.parent.mkdir(exist_ok=True)
        with open(path.with_name("unfinished"), "wb") as f:
            torch.save(dict(progress=now._asdict(), facts=plan.facts(), **state), f)
            f.flush()
            os.fsync(f.fileno())
        os.fsync(log.file.fileno())
        os.replace(path.with_name("unfinished"), path)
        for old in checkpoints_of(log.path)[2:]:
            old.unlink()
    except (UserError, OSError, RuntimeError) as e:
        with suppress(OSError):  # it may not exist, or the disk has become read-only
            path.with_name("unfinished").unlink()  # it may be what fills the disk
        # torch.save raises a RuntimeError while it handles the OSError that says why.
        log.write(f"warning: {path} not saved ({first_line(e.__context__ or e)}); training goes on")
        return False
    log.write(f"checkpoint: {path}")
    return True

def read_checkpoint(path: Path) -> dict:
    """A checkpoint whose checksums are right, its tensors mapped from the disk."""
    try:
        with zipfile.ZipFile(path) as archive:
            require(archive.testzip() is None, "a checksum is wrong")
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        require("progress" in saved, "it was saved by another version of this script")
        return saved
    except Exception as e:  # a damaged archive leads to many kinds of exception
        raise UserError(f"{path} cannot be used ({first_line(e)}): if it is damaged, delete it to "
                        "continue from the one before it") from None

# ---- 14. Flags and checks -----------------------------------------------------------------------

def parse_flags(argv: list[str]) -> tuple[Hyperparameters, argparse.Namespace]:
    """The settings that a command line asks for, and its .preset, .check, .resume (a path or None)
    and .named (only the settings that it names). Raises UserError."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.error = lambda message: require(False, f"{message}; --help lists the flags")
    parser.usage = "%(prog)s [--preset=NAME | --resume=LOG] [--check] [--setting=value ...]"
    parser.add_argument("--check", action="store_true", help="check settings and data, then exit")
    either = parser.add_mutually_exclusive_group()
    preset = "speedrun" if torch.cuda.is_available() else "demo"
    either.add_argument("--preset", choices=PRESETS, metavar="NAME", default=preset,
                        help=f"{' or '.join(PRESETS)}; on this machine the default is {preset}")
    either.add_argument("--resume", metavar="LOG", type=Path,
                        help="continue this log's run, in its settings except those named here")
    for f in fields(Hyperparameters):
        kind = type(f.default)
        form = dict(type=str.lower, choices=("true", "false")) if kind is bool else dict(type=kind)
        values = ", ".join(f"{name}: {getattr(at, f.name)}" for name, at in PRESETS.items())
        parser.add_argument(f"--{f.name}", metavar=kind.__name__, default=argparse.SUPPRESS, **form,
                            help=f"{f.metadata['help']} ({values})")
    command = parser.parse_args(argv)
    hp = PRESETS[command.preset]
    command.named = {name: value == "true" if isinstance(getattr(hp, name), bool) else value
                     for name, value in vars(command).items() if hasattr(hp, name)}
    return replace(hp, **command.named), command

def check_settings(hp: Hyperparameters, world_size: int):
    """Refuses settings that make no sense alone or together."""
    for f in fields(hp):
        value = getattr(hp, f.name)
        low, high, unit, marks = f.metadata["allowed"]
        if marks:
            require(set(value) <= set(marks), f"--{f.name}={value} has marks other than {marks}")
            require(len(value) == len(hp.windows) > 1, f"--{f.name}={value} and --windows="
                    f"{hp.windows} need one mark for each of the same two or more layers")
        elif not isinstance(value, str):
            require(low <= value <= high, f"--{f.name}={value} is not from {low} to {high}")
            require(unit == 1 or value % unit == 0,
                    f"--{f.name}={value} is not a multiple of {unit}")
    require(hp.dtype in ("auto", "bfloat16", "float32"),
            f"--dtype={hp.dtype}: choose auto, bfloat16 or float32")
    require(re.fullmatch(r"[\w.-]+", hp.name), f"--name={hp.name}: use letters, digits and ._-")
    check_method(hp)
    sizes = [size for size in range(1, hp.micro_batches + 1) if hp.micro_batches % size == 0]
    require(world_size in sizes, f"{world_size} processes cannot share {hp.micro_batches} "
            f"micro-batches equally: start one of {sizes}, or change --micro_batches")

@dataclass
class Plan:
    """What a run will do, as the first process has decided and checked it."""
    hp: Hyperparameters
    script: str  # the text of this file
    train_shards: list[Shard]
    val_shards: list[Shard]
    start: Progress
    checkpoint: Path | None = None  # to resume from
    changes: list[str] = field(default_factory=list)  # what is not as the checkpoint has it

    def facts(self) -> dict:
        """What a checkpoint keeps to see whether a resumed run is still the same."""
        return dict(asdict(self.hp), script=sha256(self.script.encode()),
                    training_data=[shard.fingerprint for shard in self.train_shards],
                    validation_data=[shard.fingerprint for shard in self.val_shards])

def prepare(hp: Hyperparameters, command: argparse.Namespace, script: str, world: World) -> Plan:
    """Finds the data and, for --resume, the checkpoint, and makes every check that needs no
    training. Raises UserError."""
    # The settings and this machine
    start = Progress()
    if command.resume:
        checkpoint, saved = find_checkpoint(command.resume)
        start = Progress(**saved["progress"])
        settings = saved["facts"] | command.named
        hp = Hyperparameters(**{f.name: settings.get(f.name, f.default) for f in fields(hp)})
    check_settings(hp, world.size)
    hp = resolve(hp, world.device)
    if world.device.type == "cuda":
        compilers = os.environ.get("CC", "gcc clang").split()
        header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
        require(any(map(shutil.which, compilers)) and header.exists(), "Triton needs a C compiler "
                f"(gcc, clang or $CC) and {header}: install gcc and the Python headers")
    # The folder for records, or the nearest one above it that exists:
    folder = next(path for path in Path(hp.records, "log").absolute().parents if path.exists())
    require(os.access(f"{folder}/.", os.W_OK), f"--records: {folder} is no folder to write to")

    # The data
    train_shards = find_shards(hp.train_files)
    val_shards = find_shards(hp.val_files)
    paths = {}
    for shard in train_shards + val_shards:
        require(shard.fingerprint not in paths, f"{shard.path} has the same tokens as "
                f"{paths.get(shard.fingerprint)}: name each shard once, to train or to validate")
        paths[shard.fingerprint] = shard.path
    available = sum(shard.tokens for shard in val_shards) - 1  # the first token is not predicted
    hp = replace(hp, val_tokens=hp.val_tokens or available)
    require(0 < hp.val_tokens <= available, f"--val_files={hp.val_files} has {available} tokens to "
            f"predict, not {hp.val_tokens}: add shards, or lower --val_tokens (0 takes all)")
    steps = sum(1 for _ in islice(step_starts(train_shards, hp), hp.num_iterations))
    require(steps == hp.num_iterations, f"--train_files={hp.train_files} suffices for {steps} "
            f"steps, not {hp.num_iterations}: add shards, raise --epochs or lower --num_iterations")

    # What has changed, if it goes on with an earlier run
    plan = Plan(hp, script, train_shards, val_shards, start)
    require(start.step <= hp.num_iterations, f"the run has done {start.step} steps already")
    if command.resume:
        plan.checkpoint = checkpoint
        for name, value in plan.facts().items():
            before = saved["facts"].get(name)
            if before != value:
                plan.changes.append(f"{name} was {before} and is {value}")
                require(name not in KEPT, f"--resume: {plan.changes[-1]}, but must stay")
    return plan

def find_checkpoint(log_path: Path) -> tuple[Path, dict]:
    """The newest checkpoint of a log's run, and what it holds."""
    require(log_path.suffix == ".log" and os.path.isfile(log_path), f"{log_path} is not a log")
    checkpoints = checkpoints_of(log_path)
    require(checkpoints, f"--resume={log_path}: this run has saved no checkpoint; start it anew")
    saved = read_checkpoint(checkpoints[0])
    log = log_path.read_bytes()[:saved["progress"]["log_bytes"]]
    require(len(log) == saved["progress"]["log_bytes"] and log.endswith(b"\n"),
            f"{log_path} was edited after {checkpoints[0].name} was saved: restore it")
    return checkpoints[0], saved

if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as e:
        message = f"error: {e}"
        if os.environ.get("RANK", "0") != "0":
            time.sleep(5)  # torchrun ends this process meanwhile, if the first one says the same
            message += f" (rank {os.environ['RANK']} on {platform.node()})"
        say(message, sys.stderr)
        os._exit(2)  # an orderly exit could wait for processes that wait for this one
    except Exception:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
