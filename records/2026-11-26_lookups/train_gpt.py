"""Train a GPT in a third of the tokens of the NanoGPT speedrun: an attempt at its record.

The task is a validation loss of 3.28 nats per token on FineWeb, in the least training time on eight
H100 GPUs. This is a copy of train_gpt.py (the record of 2025-01-26) that also looks up how a text
went on where the same tokens occurred before: in the document, and in all that training has read.
README.md beside it says what each change does, and what the evidence is. The preset `demo` is the
same method with a small model, which a laptop trains in minutes.

    torchrun --standalone --nproc_per_node=8 records/speedrun_2026/train_gpt.py  # the attempt
    python records/speedrun_2026/train_gpt.py --preset=demo                      # the demo
    python records/speedrun_2026/train_gpt.py --help         # every setting is a flag
    python records/speedrun_2026/train_gpt.py --resume=records/<run>/step<n>.pt  # continue

Each start writes a log of its own, records/<UTC time>_<name>.log, with the settings, the machine,
this source and a line per step. The run's two newest checkpoints lie in the folder of the same
name.

The method differs from train_gpt.py's in the settings, in section 5 (model), and in one place of
train_step, where the memory reads the step's tokens. From that follow a pattern in
build_optimizers, lines of check_settings, and what main compiles. All else is equal.

A run may be killed at any time. To resume it, start the script again with a checkpoint; it then
writes a new log. Only the first process writes the log, and it only appends. A checkpoint is
written under another name and renamed when it is whole.

Suffixes give the shapes of most tensors: x_TD is [T, D]. T tokens, D model width, H heads, K head
width, V vocabulary, N blocks of 128 tokens, C candidates, L lengths of contexts, W ways of the
memory; 1 is a dimension of length 1. There is no batch dimension: the model takes one long sequence
at a time.

"Record" and a date or number mean an entry of the speedrun's list of world records, which explains
each one: https://github.com/KellerJordan/modded-nanogpt. Needs torch 2.9.1 or newer.
"""

import argparse
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
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Iterator, NamedTuple

import numpy as np
import torch
import torch._functorch.config
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils._pytree import tree_map

class UserError(Exception):
    """An error that the user can fix. Its message is one line: what is wrong, and what to do."""

def require(condition, message: str):
    if not condition:
        raise UserError(message)

# ---- 1. Settings --------------------------------------------------------------------------------

BLOCK = 128  # tokens; attention masks and windows count in whole blocks

def flag(default, help: str, min=0, max=10**9, unit=1, pattern=".+"):
    """A setting: its default, its help text (with %% for a percent sign), and limits on its values.
    A number has a range, both ends included, and a unit of which it must be a multiple; a text must
    fit a pattern."""
    return field(default=default, metadata=dict(help=help, limits=(min, max, unit, pattern)))

@dataclass(frozen=True)
class Hyperparameters:
    """Every field is a flag of the same name. These defaults are the preset `speedrun`. The preset
    `demo`, which is the default on a machine without a GPU, changes only what PRESETS lists; so a
    default that you change here may change in `demo` too. A resumed run takes every setting from
    its checkpoint, except those that its command line names. Its weights come from the checkpoint
    as well, so naming another seed does not change them. Before the model is built, `prepare`
    replaces dtype auto, seed -1 and val_tokens 0 by the values that the run uses, and turns use_fp8
    off where it cannot be used."""
    # The run
    name: str = flag("speedrun_2026", "letters, digits, ._- for the log's name", pattern=r"[\w.-]+")
    records: str = flag("records", "folder for the log and the checkpoints")
    seed: int = flag(-1, "seed of the initial weights; -1 draws one", min=-1, max=2**63 - 1)
    dtype: str = flag("auto", "bfloat16, float32 or auto", pattern="auto|bfloat16|float32")
    save_every: int = flag(500, "steps between checkpoints; 0 saves none, not even at the end")
    val_loss_every: int = flag(125, "steps between validations, besides those at saves and the end")
    # Data. A step trains on micro_batches * train_seq_len tokens, whatever the number of processes.
    # To fit a smaller memory, lower train_seq_len and raise micro_batches, so that their product
    # stays the same. But do not let either depend on the step: step_starts, train_step and the
    # head's FP8 factor use one value for all steps. Compare losses only between equal val_seq_len
    # and val_tokens. The token vocab_size - 1 must begin each document; only its presence in
    # validation data is checked.
    train_files: str = flag("data/fineweb10B/fineweb_train_*.bin", "glob of the training shards")
    val_files: str = flag("data/fineweb10B/fineweb_val_*.bin", "glob of the validation shards")
    vocab_size: int = flag(50257, "vocabulary; its last token begins a document", min=2, max=65536)
    train_seq_len: int = flag(32 * 1024, "tokens per training sequence", min=1, unit=BLOCK)
    val_seq_len: int = flag(256 * 1024, "tokens per validation sequence", min=1, unit=BLOCK)
    val_tokens: int = flag(10485760, "number of validation tokens; 0 takes all", max=10**12)
    micro_batches: int = flag(8, "sequences per step, on all processes together", min=1, max=10**5)
    epochs: int = flag(1, "at most this many passes over the training shards", min=1, max=10**5)
    # The layers: strings with one character per layer
    windows: str = flag("SSSLSSSSSSL", "L: long window, S: half as many blocks", pattern="[LS]+")
    attention: str = flag("xxxxxx.xxxx", "x: with attention, .: without", pattern="[x.]+")
    value_embeds: str = flag("12......012", "digit: value embedding, .: none", pattern="[0-9.]+")
    # The model
    model_dim: int = flag(768, "width of the residual stream", min=16, max=2**16, unit=16)
    num_heads: int = flag(6, "query heads; any number, whatever model_dim", min=1, max=2**10)
    num_kv_heads: int = flag(0, "number of key and value heads; 0 stands for num_heads")
    head_dim: int = flag(128, "width of a head", min=16, max=2**10, unit=16)
    attention_scale: float = flag(0.12, "factor on q @ k; a new head_dim needs another", min=0.001)
    rope_base: float = flag(1024.0, "base of the rotary frequencies", min=1)
    lm_head_softcap: float = flag(15.0, "c: logits z become h * sigmoid(2 * (z + s) / c)", min=0.1)
    softcap_height: float = flag(23.0, "h, the upper bound of the logits", min=0.1)
    softcap_shift: float = flag(5.0, "s, what the cap adds to each logit first", min=-99)
    use_fp8: bool = flag(True, "train the head in FP8 where the GPU can, with dtype bfloat16")
    window_start: int = flag(128, "long window at first, in tokens", min=BLOCK, unit=BLOCK)
    window_end: int = flag(1792, "long window at the end, in tokens", min=BLOCK, unit=BLOCK)
    memory: str = flag("2,3,4,6", "lengths of the contexts that the memory knows, in tokens",
                       pattern=r"[1-9]\d?(,[1-9]\d?)*")
    document_memory: str = flag("1,2,3,4,6", "lengths of contexts to look up in the document",
                                pattern=r"[1-9]\d?(,[1-9]\d?)*")
    memory_rows: int = flag(2**23, "rows of the memory's table for each length", min=1)
    memory_lag: int = flag(8192, "the newest tokens read, which the memory does not know yet")
    # Optimization. The learning rates and the window follow step / num_iterations. So if a resumed
    # run gets more steps, its rates jump up again, and its window may shrink. Muon's momentum
    # depends on the step alone.
    num_iterations: int = flag(870, "training steps", max=10**7)
    cooldown_frac: float = flag(0.6, "last fraction of the run, in which rates fall", max=1)
    lr_floor: float = flag(0.1, "what the learning rates fall to, as a share of their peak", max=1)
    muon_lr: float = flag(0.035, "learning rate of the blocks' matrices (Muon)")
    muon_momentum_start: float = flag(0.85, "Muon's momentum at the first step", max=1)
    muon_momentum_end: float = flag(0.95, "Muon's momentum after its warmup", max=1)
    muon_momentum_steps: int = flag(300, "steps of Muon's momentum warmup, in a run of any length")
    head_lr: float = flag(0.008, "learning rate of the output head (Adam)")
    embed_lr: float = flag(0.6, "learning rate of all embeddings (Adam)")
    scalar_lr: float = flag(0.04, "learning rate of vectors and scalars (Adam)")
    adam_beta1: float = flag(0.5, "decay of Adam's mean gradient", max=1 - 1e-9)
    adam_beta2: float = flag(0.95, "decay of Adam's mean square", max=1 - 1e-9)
    # Where a gradient is only rounding noise, Adam would blow it up to full steps. An epsilon above
    # the noise prevents that.
    adam_eps: float = flag(1e-10, "Adam's epsilon", min=1e-30)

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

PRESETS = {
    "speedrun": Hyperparameters(),
    "demo": Hyperparameters(
        name="demo_2026", save_every=100, val_loss_every=50, vocab_size=257,
        train_files="data/demo/demo_train_*.bin", val_files="data/demo/demo_val_*.bin",
        train_seq_len=2048, val_seq_len=16384, val_tokens=131072, micro_batches=2, windows="LSSL",
        attention="xx.x", value_embeds="0..0", model_dim=128, num_heads=4, head_dim=32,
        attention_scale=0.3, window_start=256, window_end=256, memory="3,4,5,6,8,12",
        document_memory="2,3,4,5,6,8,12", memory_rows=2**17, memory_lag=2048, num_iterations=280,
        cooldown_frac=0.4, muon_lr=0.035, muon_momentum_end=0.9, muon_momentum_steps=0,
        head_lr=0.016, embed_lr=0.2, scalar_lr=0.08, adam_beta2=0.98,
        # With an epsilon of 1e-10, Adam would take full steps on rare bytes, whose gradients are
        # rounding noise.
        adam_eps=1e-7)}

# ---- 2. Schedules: pure functions of the step ---------------------------------------------------

def tokens_seen(step: int, hp: Hyperparameters) -> int:
    """The number of training tokens in all steps before this one."""
    return step * hp.micro_batches * hp.train_seq_len

def window_tokens(step: int, hp: Hyperparameters) -> int:
    """The long window in tokens. It grows linearly from zero, but is never below window_start. If
    you change the schedule, return whole blocks: the masks would round anything else down."""
    # As in the record, `grown` ends half a block below window_end. So the last window is used for
    # half as many steps as the one before it.
    grown = (hp.window_end - BLOCK / 2) * step / max(1, hp.num_iterations)
    return max(hp.window_start, math.ceil(grown / BLOCK) * BLOCK)

def window_tensor(step: int, hp: Hyperparameters, device: torch.device) -> Tensor:
    """The long window as a tensor, which can change without a recompile. It is made by torch.full,
    since torch.tensor would copy the number to the device, and wait for that."""
    return torch.full((), window_tokens(step, hp), dtype=torch.int32, device=device)

def lr_scale(step: int, hp: Hyperparameters) -> float:
    """The factor on every learning rate: 1, then falling linearly to lr_floor at the run's end."""
    left = max(0, 1 - step / max(1, hp.num_iterations))
    height = min(1, left / hp.cooldown_frac) if hp.cooldown_frac else 1
    return hp.lr_floor + height * (1 - hp.lr_floor)

def muon_momentum(step: int, hp: Hyperparameters) -> float:
    """Muon's momentum: linear from its start to its end in muon_momentum_steps, then constant."""
    risen = min(1, step / hp.muon_momentum_steps) if hp.muon_momentum_steps else 1
    return hp.muon_momentum_start + risen * (hp.muon_momentum_end - hp.muon_momentum_start)

# ---- 3. Block masks and attention ---------------------------------------------------------------

def build_block_masks(tokens_T: Tensor, end_of_text: int, window: Tensor, flex: bool) -> list:
    """The long and the short mask for FlexAttention (arXiv:2412.05496), in blocks of 128 tokens.

    A token sees itself and the tokens before it in the same document and within the window. The
    window counts whole blocks, the query's own included; the short window has half as many, and at
    least one. `window` is the long one, in tokens, as window_tensor makes it.

    For each query block, FlexAttention takes two lists of key blocks: partial ones, in which it
    asks `sees` about every pair of tokens, and full ones, in which every pair is visible. The
    window only keeps whole blocks out of the lists, so `sees` does not check it. Here are the lists
    of four blocks (p: partial, f: full), where the second document begins inside block 1, and the
    window keeps nothing out:

        query block   key blocks 0 1 2 3
                  0              p . . .     the diagonal is always partial, because it is causal
                  1              p p . .     only its tokens of the first document see block 0
                  2              . p p .     block 0 is wholly of the first document
                  3              . p f p     block 1 is of both documents, block 2 of the second
    """
    document_T = (tokens_T == end_of_text).cumsum(0, dtype=torch.int32)

    def sees(batch, head, query, key):
        return (key <= query) & (document_T[query] == document_T[key])

    # If you change `sees`, change the two maps below, some_visible and all_visible, because
    # FlexAttention asks `sees` about partial blocks only. (To see beyond the window, change seen_NN
    # too.) Test the change on a GPU: a CPU does not use all_visible_NN, and skips all keys after
    # the query's block, even if `sees` allows them.
    block_N = torch.arange(len(tokens_T) // BLOCK, dtype=torch.int32, device=tokens_T.device)
    distance_NN = block_N[:, None] - block_N
    first_doc_N = document_T[::BLOCK]  # the document number of each block's first token
    last_doc_N = document_T[BLOCK - 1::BLOCK]
    # The maps are [query block, key block], without the window yet. Document numbers never fall
    # from one token to the next. So for a query block that comes after the key block:
    #   some pair is visible   if the last key and the first query are in one document
    #   all pairs are visible  if the first key and the last query are in one document
    earlier_NN = distance_NN > 0  # the key block comes before the query block
    some_visible_NN = (distance_NN == 0) | (earlier_NN & (last_doc_N == first_doc_N[:, None]))
    all_visible_NN = earlier_NN & (first_doc_N == last_doc_N[:, None])

    def ordered(chosen_NN: Tensor) -> tuple[Tensor, Tensor]:
        """For each row, the number of chosen blocks, and a list of all blocks in which the chosen
        ones come first, in ascending order. FlexAttention reads only the chosen ones. The two
        dimensions in front are batch and head."""
        counts_N = chosen_NN.sum(1, dtype=torch.int32)
        order_NN = chosen_NN.int().argsort(descending=True, stable=True).int()
        return counts_N[None, None], order_NN[None, None]

    def make_mask(window_blocks: Tensor):
        seen_NN = some_visible_NN & (distance_NN < window_blocks)
        if not flex:
            return plain_mask(seen_NN, sees)
        partial = ordered(seen_NN & ~all_visible_NN)
        full = ordered(seen_NN & all_visible_NN)
        return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=sees)

    long = window // BLOCK
    return [make_mask(long), make_mask((long // 2).clamp(min=1))]

def plain_mask(seen_NN: Tensor, sees) -> list[tuple[slice, Tensor]]:
    """The mask for plain_attention, from a map of the key blocks that each query block sees. For
    each query block it has a slice of the keys, from the start of the first block that it sees to
    the end of the query block, and a bias [128, keys]: 0 where a query sees a key, else -inf."""
    position_T = torch.arange(len(seen_NN) * BLOCK, device=seen_NN.device)
    mask = []
    for query, seen_N in zip(position_T.split(BLOCK), seen_NN):
        key_range = slice(int(seen_N.nonzero()[0]) * BLOCK, int(query[-1]) + 1)
        key = position_T[key_range]
        visible = seen_N[key // BLOCK] & sees(None, None, query[:, None], key)
        mask.append((key_range, torch.where(visible, 0.0, -torch.inf)))
    return mask

def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: list, scale: float) -> Tensor:
    """Attention of one query block after the other, each to its range of keys alone."""
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))  # shared kv heads
    outputs = []
    for q_block, (key_range, bias) in zip(q.split(BLOCK, dim=2), mask):
        scores = (scale * q_block) @ k[:, :, key_range].mT + bias.to(q.dtype)
        outputs.append(scores.softmax(-1) @ v[:, :, key_range])
    return torch.cat(outputs, dim=2)

def attention(q: Tensor, k: Tensor, v: Tensor, mask, scale: float) -> Tensor:
    """Attention of q [1, H, T, K] to k and v [1, kv heads, T, K] under a mask of build_block_masks.
    On GPUs it is FlexAttention, which is compiled with the model. FlexAttention has no gradient on
    CPUs; there, plain_attention computes the same. A change to the scores belongs in both."""
    if isinstance(mask, BlockMask):
        return flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
    return plain_attention(q, k, v, mask, scale)

# ---- 4. FP8 linear ------------------------------------------------------------------------------

# FP8 products take half the time of bf16 ones. A value has 8 bits: e4m3 (up to 448, 3 bits of
# mantissa) for inputs and weights, e5m2 (up to 57344, 2 bits) for gradients, which spread more.
# Each value is multiplied by a factor before its cast, and the product is divided by both factors.

# The factors of input, weight and gradient. The input is normed, so |x| <= sqrt(D) = 28 at D = 768,
# and a factor of 2 leaves room to 448. The weight starts at zero and learns slowly. With a factor
# of 2^9, weights up to 0.875 fit. Training clamps larger ones; validation, which is not in FP8,
# does not. The gradient of the mean loss of T tokens with respect to a capped logit is (p - 1) / T
# for the target and p / T for any other token, where p is the token's probability. So its size is
# at most 1 / T. The slope of the cap is at most 1, so the gradient with respect to the logit before
# the cap is at most 1 / T too. Times 2^19, it is at most 11 at T = 49152, far below 57344. But most
# gradients are much smaller than 1 / T, and a smaller factor would round more of them to zero.
# (train_step divides the loss by micro_batches. To make up for that, GPT multiplies this third
# factor by micro_batches.)
# Choose other factors for another layer, for a head that is tied to the embedding (its weights
# start larger), for much longer sequences, and if the head's input, the logits or the loss are
# scaled in another way.
FP8_SCALES = (2.0, 2.0**9, 2.0**19)

def to_fp8(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max  # an overflowing cast may give NaN or inf, so clamp
    return (x.float() * scale).clamp(-limit, limit).to(dtype)

def fp8_matmul(a: Tensor, b: Tensor, divisor: float, dtype: torch.dtype, fast: bool) -> Tensor:
    """a @ b.T / divisor in dtype, for contiguous FP8 matrices. `fast` sums with less precision."""
    # _scaled_mm takes a factor for each matrix. Only the product of the two matters, so a gets 1.
    one = torch.full((), 1.0, device=a.device)
    inverse = torch.full((), 1 / divisor, device=a.device)
    return torch._scaled_mm(a, b.T, one, inverse, out_dtype=dtype, use_fast_accum=fast)

class FP8Linear(torch.autograd.Function):
    """x_TD @ w_VD.T by products in FP8 (record 2025-01-13), with the factors of x, w and gradient.
    An FP8 product needs both matrices contiguous along the dimension that it sums over. For
    fp8_matmul, which computes a @ b.T, that is the last dimension of both."""

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
        # The product for grad_x sums over V, so it needs w as [D, V]. That for grad_w sums over T,
        # so it needs the gradient as [V, T], and x as [D, T].
        g8_TV = to_fp8(grad_TV, grad_scale, torch.float8_e5m2).contiguous()
        g8_VT, x8_DT, w8_DV = (x.T.contiguous() for x in (g8_TV, x8_TD, w8_VD))
        grad_x_TD = fp8_matmul(g8_TV, w8_DV, grad_scale * w_scale, grad_TV.dtype, fast=False)
        grad_w_VD = fp8_matmul(g8_VT, x8_DT, grad_scale * x_scale, torch.float32, fast=False)
        return grad_x_TD, grad_w_VD, None

# ---- 5. Model -----------------------------------------------------------------------------------

def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))

def init_uniform(weight: Tensor):
    """Initial values of a weight [..., out, in]: uniform, with a deviation of 0.5 / sqrt(in)."""
    bound = 0.5 * math.sqrt(3 / weight.size(-1))
    nn.init.uniform_(weight, -bound, bound)

class CastedLinear(nn.Module):
    """A linear layer without bias. Its weight is kept in float32 and cast to the input's dtype when
    it is used.

    zero: the weight starts at zero, so that the layer adds nothing until it has learned something.
    fp8_scales: factors of input, weight and gradient, with which the layer trains in FP8; section 4
    explains them. GPT gives them to the head alone, and only if FP8 is used."""

    def __init__(self, in_features: int, out_features: int, zero=False, fp8_scales=None):
        super().__init__()
        self.zero = zero
        self.fp8_scales = fp8_scales
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.reset_parameters()

    def reset_parameters(self):
        if self.zero:
            nn.init.zeros_(self.weight)
        else:
            init_uniform(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        # Validation is not in FP8, as in the record. So if you change what this layer computes, for
        # example multiply its output by a constant, change both return statements.
        if self.fp8_scales and self.training:
            return FP8Linear.apply(x, self.weight, self.fp8_scales)
        return F.linear(x, self.weight.type_as(x))

class Rotary(nn.Module):
    """Rotary positions (arXiv:2104.09864) in the first half of each head's channels, where channel
    i is rotated with channel i + K/4. The second half is not rotated, so that it can match content
    at any distance (record 2024-12-17)."""

    def __init__(self, head_dim: int, max_seq_len: int, base: float):
        super().__init__()
        frequencies = base ** -torch.linspace(0, 1, head_dim // 4, dtype=torch.float64)
        # The angles [T, 1, K / 4] are computed in float64, since those of late positions would be
        # inexact in float32.
        angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float64), frequencies)[:, None]
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x_THK: Tensor) -> Tensor:
        cos, sin = self.cos[:len(x_THK)], self.sin[:len(x_THK)]
        a, b, *content = x_THK.float().chunk(4, dim=-1)
        return torch.cat((a * cos + b * sin, b * cos - a * sin, *content), dim=-1).type_as(x_THK)

class CausalSelfAttention(nn.Module):
    """Attention with normed queries and keys (arXiv:2010.04245). An embedding of the token is mixed
    into the values (record 2024-12-04, after arXiv:2410.17897). With fewer kv heads than heads,
    several query heads share one head of keys and values (arXiv:2305.13245)."""

    def __init__(self, hp: Hyperparameters, rotary: Rotary):
        super().__init__()
        self.hp = hp
        self.rotary = rotary
        # One stack holds the matrices of queries, keys and values, and Muon orthogonalizes each of
        # them by itself. All have the shape of the key matrix, which makes kv_heads heads, so the
        # queries take num_heads / kv_heads matrices. With 6 heads and 3 kv heads, the stack is
        # q, q, k, v; with 6 and 6, it is q, k, v.
        parts = hp.num_heads // hp.kv_heads + 2
        self.qkv = nn.Parameter(torch.empty(parts, hp.kv_heads * hp.head_dim, hp.model_dim))
        self.proj = CastedLinear(hp.num_heads * hp.head_dim, hp.model_dim, zero=True)
        self.value_mix = nn.Parameter(torch.tensor([0.5, 0.5]))  # weights of value and embedding
        self.reset_parameters()

    def reset_parameters(self):
        init_uniform(self.qkv)

    def forward(self, x_TD: Tensor, value_embed: Tensor | None, mask) -> Tensor:
        T, heads, kv_heads = len(x_TD), self.hp.num_heads, self.hp.kv_heads
        qkv = F.linear(x_TD, self.qkv.flatten(0, 1).type_as(x_TD)).view(T, -1, self.hp.head_dim)
        qk, v = qkv.split((heads + kv_heads, kv_heads), dim=1)
        q, k = self.rotary(norm(qk)).split((heads, kv_heads), dim=1)
        v = self.value_mix[0] * v
        if value_embed is not None:
            v = v + self.value_mix[1] * value_embed.view_as(v)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, H, T, K]
        y_1HTK = attention(q, k, v, mask, self.hp.attention_scale)
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
        self.attn = CausalSelfAttention(hp, rotary) if hp.attention[layer] != "." else None
        self.mlp = MLP(hp.model_dim)
        self.residual_mix = nn.Parameter(torch.tensor([1.0, 0.0]))  # weights of the stream and x0

    def forward(self, x_TD: Tensor, x0_TD: Tensor, value_embed: Tensor | None, mask) -> Tensor:
        x_TD = self.residual_mix[0] * x_TD + self.residual_mix[1] * x0_TD
        if self.attn is not None:
            x_TD = x_TD + self.attn(norm(x_TD), value_embed, mask)
        return x_TD + self.mlp(norm(x_TD))

class Candidates(NamedTuple):
    """Tokens that may come next, by what followed elsewhere: C for each of T tokens. Several may
    name the same token."""
    tokens: Tensor  # [T, C] int64; 0 where there is no candidate
    kinds: Tensor  # [T, C] int64: what is known of the candidate, as a number; -1 if there is none
    best: Tensor  # [T, 1 or 2] int64: the places, among the C, of the best one of each source

HASH = -7046029254386353131  # an odd number near 2^64 / 1.618, as a signed integer of 64 bits

def context_hashes(tokens_T: Tensor, lengths: list[int]) -> Tensor:
    """For each length n and each token, a hash in 64 bits of the last n tokens: [lengths, T]. What
    would lie before the first token counts as -1, which no token is."""
    hash_T = torch.zeros_like(tokens_T, dtype=torch.int64)
    hashes = {}
    for back in range(max(lengths)):
        token_T = F.pad(tokens_T, (back, 0), value=-1)[:len(tokens_T)]
        hash_T = (hash_T + token_T + 1) * HASH  # which wraps around
        hash_T = hash_T ^ (hash_T >> 32)
        hashes[back + 1] = hash_T
    return torch.stack([hashes[length] for length in lengths])

@torch.no_grad()
def recall_from_document(tokens_T: Tensor, end_of_text: int, lengths: list[int]) -> Candidates:
    """For each length n, what followed the last n tokens when they last occurred in the same
    document. Attention finds this by induction heads, which take long to form; here it is there
    from the first step on (after n-gram heads, arXiv:2401.12973). The kind is the number of the
    length, and how often these n tokens have occurred before, counted up to 8: one of
    8 * len(lengths) kinds."""
    place_T = torch.arange(len(tokens_T), device=tokens_T.device)
    number_L1 = torch.arange(len(lengths), device=tokens_T.device)[:, None]
    # The document's number is part of the hash. So contexts that reach into the document before
    # find no equal, and neither do those that reach before the first token.
    document_T = (tokens_T == end_of_text).cumsum(0)
    hash_LT = context_hashes(tokens_T, lengths) + document_T * HASH
    # Sorting brings equal contexts together, in the order of the text.
    hash_LT, order_LT = hash_LT.sort(dim=1, stable=True)
    again_LT = F.pad(hash_LT[:, 1:] == hash_LT[:, :-1], (1, 0))
    before_LT = F.pad(order_LT[:, :-1], (1, 0))  # where the same context occurred, if again_LT
    first_LT = torch.where(again_LT, 0, place_T).cummax(1).values
    times_LT = (place_T - first_LT).clamp(max=8)
    kind_LT = torch.where(again_LT, 8 * number_L1 + times_LT - 1, -1)
    next_LT = torch.where(again_LT, tokens_T.roll(-1)[before_LT].long(), 0)
    # back into the order of the text
    next_LT, kind_LT = (torch.empty_like(x).scatter_(1, order_LT, x) for x in (next_LT, kind_LT))
    longest_T = torch.where(kind_LT >= 0, number_L1, -1).argmax(0)
    return Candidates(next_LT.T, kind_LT.T, longest_T[:, None])

class Memory(nn.Module):
    """What training has read, so that the model can look up how a text went on where it has seen it
    before: a proposal of modded-nanogpt's (pull request 367), which keeps the last continuation of
    the longest known context. Here are several continuations of contexts of several lengths.

    A context is the last n tokens, for each n of hp.memory. A table has a row for it, which a hash
    chooses, and a row has WAYS entries: a next token t has its place in entry t % WAYS. An entry is
    one number of 63 bits that begins with a position. So of several that are written to one place,
    the largest is the newest, whatever the order of writes and the number of processes:

        32 bits   the position of the next token in all that was read
         3 bits   repeats: how many times in a row this entry has got the same token again, up to 7
        12 bits   check, of the context's hash: contexts that share a row mostly differ in it
        16 bits   the next token

    Validation writes nothing, so a document that is validated is not in the memory. Training must
    not get used to more: what was read less than memory_lag tokens ago is withheld, since it may be
    of the same document. (A second epoch breaks this: the memory knows its text.) The tables are
    buffers, which a checkpoint holds, so sample.py and a resumed run have them too.

    A candidate's kind says its length, its repeats, and how many other candidates its context has:
    one of len(lengths) * 8 * WAYS kinds."""

    WAYS = 8

    def __init__(self, hp: Hyperparameters):
        super().__init__()
        self.lengths = sorted(int(length) for length in hp.memory.split(","))
        self.register_buffer("length_L1", torch.tensor(self.lengths)[:, None], persistent=False)
        self.kinds = len(self.lengths) * 8 * self.WAYS
        entries = torch.zeros(len(self.lengths), hp.memory_rows, self.WAYS, dtype=torch.int64)
        self.register_buffer("entries", entries)
        # The newest tokens read. They reach back by the lag, and by the longest context before it.
        newest = torch.zeros(hp.memory_lag + max(self.lengths), dtype=torch.int32)
        self.register_buffer("newest", newest)
        self.register_buffer("read", torch.zeros((), dtype=torch.int64))  # how many, in all

    def hashes(self, tokens_T: Tensor) -> tuple[Tensor, Tensor]:
        """For each length and token, the row of the context that ends there, and its check: both
        [lengths, T]. A context that would begin before the first token has a hash as well."""
        hash_LT = context_hashes(tokens_T, self.lengths)
        return (hash_LT >> 12) % self.entries.size(1), hash_LT & 0xFFF

    @torch.no_grad()
    def recall(self, tokens_T: Tensor) -> Candidates:
        """For each token, what followed the contexts that end with it and lie within the sequence.
        """
        T = len(tokens_T)
        row_LT, check_LT = self.hashes(tokens_T)
        table_L1 = torch.arange(len(self.lengths), device=tokens_T.device)[:, None]
        entry_LTW = self.entries[table_L1, row_LT]
        position_T = torch.arange(T, device=tokens_T.device)
        whole_LT = position_T >= self.length_L1 - 1
        same_LTW = (entry_LTW >> 16 & 0xFFF) == check_LT[:, :, None]
        entry_LTW = torch.where(same_LTW & whole_LT[:, :, None], entry_LTW, 0)
        known_LTW = entry_LTW > 0
        others_LT1 = known_LTW.sum(-1, keepdim=True) - 1
        kind_LTW = (table_L1[:, :, None] * 8 + (entry_LTW >> 28 & 7)) * self.WAYS + others_LT1
        kind_LTW = torch.where(known_LTW, kind_LTW, -1)
        # Positions are below 2^32, so a longer context's entry wins against any of a shorter one's.
        rank_LTW = (entry_LTW >> 31) + (table_L1[:, :, None] << 32) * known_LTW
        token_TC, kind_TC, rank_TC = (x.transpose(0, 1).reshape(T, -1) for x in
                                      (entry_LTW & 0xFFFF, kind_LTW, rank_LTW))
        return Candidates(token_TC, kind_TC, rank_TC.argmax(1, keepdim=True))

    @torch.no_grad()
    def remember(self, tokens: Tensor):
        """Reads the tokens [n] of a step (int32), those of all processes in the order of the text.
        Afterwards it knows all but the newest memory_lag tokens."""
        text = torch.cat((self.newest, tokens))
        self.newest.copy_(text[len(tokens):])
        longest = max(self.lengths)
        new = slice(longest - 1, longest - 1 + len(tokens))  # the last tokens of the new contexts
        row_LT, check_LT = (x[:, new] for x in self.hashes(text[:new.stop]))
        next_T = text[longest:new.stop + 1].long()
        # The position of each next token in all that was read, from 0; negative for the zeros that
        # `newest` holds at first.
        position_T = self.read + torch.arange(len(tokens), device=tokens.device)
        position_T = position_T - (len(self.newest) - longest)
        self.read += len(tokens)
        way_T = next_T % self.WAYS
        index_LT = row_LT * self.WAYS + way_T
        before_LT = self.entries.flatten(1).gather(1, index_LT)
        again_LT = (before_LT & 0xFFFFFFF) == (check_LT << 16 | next_T)
        repeats_LT = torch.where(again_LT, (before_LT >> 28 & 7) + 1, 0).clamp(max=7)
        entry_LT = position_T << 31 | repeats_LT << 28 | check_LT << 16 | next_T
        whole_LT = position_T >= self.length_L1
        entry_LT = torch.where(whole_LT, entry_LT, 0)
        self.entries.flatten(1).scatter_reduce_(1, index_LT, entry_LT, "amax")

class GPT(nn.Module):
    """Call it with the tokens and targets of one sequence and the attention window; it returns the
    mean loss per token in nats. With `flex`, attention is by FlexAttention, which is for GPUs. Then
    the model must be compiled: without the compiler, FlexAttention asks `sees` about every pair of
    tokens and never looks at the lists of blocks, so it ignores the window.

    Embeddings are kept in `dtype`. The residual stream has the same dtype in all layers, which
    `stream` checks after each layer. All other parameters are float32. A bfloat16 stream times a
    float32 tensor without dimensions, such as residual_mix[0], stays bfloat16. But a float32 vector
    or matrix would turn the product into float32, so cast vectors and matrices with type_as.

    On a GPU, `main` has `loss` compiled, that is, all but the search for candidates, which sorts
    and reads tables, and which the compiler would not make faster."""

    # Logits are computed for at most this many tokens at a time, because those of a validation
    # sequence of 256K tokens would take 53 GB. (Training saves no memory by this, because the
    # backward pass needs the logits of all parts.)
    LOGITS_TOKENS = 65536

    def __init__(self, hp: Hyperparameters, dtype: torch.dtype, flex: bool):
        super().__init__()
        self.hp = hp
        self.flex = flex
        self.end_of_text = hp.vocab_size - 1  # in the shards, each document begins with it
        # FP8 products need a multiple of 16 rows. With a multiple of 64, the rows can also be
        # divided equally among 2, 4, 8, 16, 32 or 64 processes (see World).
        padded_vocab = math.ceil(hp.vocab_size / 64) * 64
        self.embed = nn.Embedding(padded_vocab, hp.model_dim)
        self.memory = Memory(hp)
        self.recalled_embed = nn.Embedding(padded_vocab, hp.model_dim)
        self.document_lengths = sorted(int(length) for length in hp.document_memory.split(","))
        kinds = self.memory.kinds + 8 * len(self.document_lengths)
        self.recalled_mix = nn.Parameter(torch.zeros(kinds))
        self.candidate_scores = nn.Parameter(torch.full((kinds,), -5.0))
        self.own_score = nn.Parameter(torch.zeros(hp.model_dim))
        # Layers marked by the same digit share a value embedding (record 2024-12-08). The marks are
        # sorted because all processes must have their parameters in one order.
        self.value_embeds = nn.ModuleDict({
            mark: nn.Embedding(padded_vocab, hp.kv_heads * hp.head_dim)
            for mark in sorted(set(hp.value_embeds) - {"."})})
        rotary = Rotary(hp.head_dim, max(hp.train_seq_len, hp.val_seq_len), hp.rope_base)
        self.blocks = nn.ModuleList(Block(hp, layer, rotary) for layer in range(len(hp.windows)))
        self.skip_weights = nn.Parameter(torch.ones(len(self.blocks) // 2))
        scales = (*FP8_SCALES[:2], FP8_SCALES[2] * hp.micro_batches) if hp.use_fp8 else None
        self.lm_head = CastedLinear(hp.model_dim, padded_vocab, zero=True, fp8_scales=scales)
        draw_weights(self, hp.seed)  # after all modules and parameters are there
        # Embeddings are drawn in float32 and cast afterwards, because what torch draws in bfloat16
        # depends on torch's version. Their dtype is also that of the stream.
        for embed in (self.embed, self.recalled_embed, *self.value_embeds.values()):
            embed.weight.data = embed.weight.data.to(dtype)

    def forward(self, tokens_T: Tensor, targets_T: Tensor, window: Tensor) -> Tensor:
        return self.loss(self.candidates(tokens_T), tokens_T, targets_T, window)

    def candidates(self, tokens_T: Tensor) -> Candidates:
        """The document's candidates, then the memory's, whose kinds are counted on from there."""
        near = recall_from_document(tokens_T, self.end_of_text, self.document_lengths)
        far = self.memory.recall(tokens_T)
        far_kinds = torch.where(far.kinds < 0, -1, far.kinds + 8 * len(self.document_lengths))
        return Candidates(torch.cat((near.tokens, far.tokens), dim=1),
                          torch.cat((near.kinds, far_kinds), dim=1),
                          torch.cat((near.best, far.best + near.kinds.size(1)), dim=1))

    def loss(self, candidates: Candidates, tokens_T, targets_T, window: Tensor) -> Tensor:
        """The sum of -log p(target) over all tokens, divided by T. Targets of -1 add nothing.
        Validation reports this loss as well: what only training shall minimize belongs under
        `if self.training`."""
        parts = (self.stream(candidates, tokens_T, window), candidates.tokens,
                 self.scores(candidates), targets_T)
        total = 0
        for x, named, scores, target_T in zip(*[part.split(self.LOGITS_TOKENS) for part in parts]):
            # As in `logits`, but for the target alone, since a second table [T, V] would take time:
            # the logarithm of the probability that each gives to the target is own_T for the model,
            # 0 for a candidate that names it, and -inf for any other. (is_own_C is in place of a
            # torch.cat, with which the compiler stored another table [T, V].)
            own_T = -F.cross_entropy(self.own_logits(x), target_T, ignore_index=-1,
                                     reduction="none")
            names_TC = F.pad(named == target_T[:, None], (1, 0), value=True)
            is_own_C = torch.arange(names_TC.size(1), device=x.device) == 0
            given_TC = torch.where(is_own_C, own_T[:, None], 0).masked_fill(~names_TC, -torch.inf)
            mixed_T = (self.log_shares(x, scores) + given_TC).logsumexp(1)
            total -= mixed_T.masked_fill(target_T < 0, 0).sum()
        return total / len(tokens_T)

    def features(self, tokens_T: Tensor, window: Tensor) -> Tensor:
        """What `logits` needs to predict each next token, in float32: [T, D + 2C], the normed
        residual stream after the last layer, the candidates, and their scores."""
        candidates = self.candidates(tokens_T)
        x_TD = self.stream(candidates, tokens_T, window)
        numbers_TC = candidates.tokens.float()  # exact, since they are below 2^16
        return torch.cat((x_TD.float(), numbers_TC, self.scores(candidates)), dim=1)

    def stream(self, candidates: Candidates, tokens_T: Tensor, window: Tensor) -> Tensor:
        """The normed residual stream [T, D] after the last layer."""
        masks = dict(zip("LS", build_block_masks(tokens_T, self.end_of_text, window, self.flex)))
        embedded = {mark: embed(tokens_T) for mark, embed in self.value_embeds.items()}
        # The input is the token's embedding, and a share of another embedding of the best
        # candidate: once of the document's, once of the memory's. The share belongs to the
        # candidate's kind, and starts at zero.
        x_TD = self.embed(tokens_T)
        for place_T in candidates.best.T:
            token_T, kind_T = (x.gather(1, place_T[:, None])[:, 0]
                               for x in (candidates.tokens, candidates.kinds))
            mix_T = self.recalled_mix[kind_T].masked_fill(kind_T < 0, 0)
            x_TD = x_TD + mix_T.type_as(x_TD)[:, None] * self.recalled_embed(token_T)
        # A U-Net (record 2024-11-10): the first half of the layers push their outputs on a stack,
        # and each layer of the second half pops one, that of its mirror image, and adds it. A layer
        # in the middle does neither.
        x_TD = x0_TD = norm(x_TD)
        skips = []
        half = len(self.blocks) // 2
        second = len(self.blocks) - half  # the first layer of the second half
        for layer, block in enumerate(self.blocks):
            if layer >= second:
                x_TD = x_TD + self.skip_weights[layer - second] * skips.pop()
            value_embed = embedded.get(self.hp.value_embeds[layer])  # None for "."
            x_TD = block(x_TD, x0_TD, value_embed, masks[self.hp.windows[layer]])
            if layer < half:
                skips.append(x_TD)
            assert x_TD.dtype == self.embed.weight.dtype, f"layer {layer} lacks a cast (type_as)"
        return norm(x_TD)

    def scores(self, candidates: Candidates) -> Tensor:
        """The learned score of each candidate's kind [T, C]; -inf where there is none."""
        scores_TC = self.candidate_scores[candidates.kinds]
        return scores_TC.masked_fill(candidates.kinds < 0, -torch.inf)

    def log_shares(self, x: Tensor, scores: Tensor) -> Tensor:
        """The logarithms of the weights in the mixture (arXiv:1609.07843) [..., 1 + C]: the model's
        own, by a learned function of the stream, then the candidates', by their scores."""
        own_score = (x @ self.own_score.type_as(x)).float().unsqueeze(-1)
        return torch.cat((own_score, scores), dim=-1).log_softmax(-1)

    def own_logits(self, x: Tensor) -> Tensor:
        """The logits without the candidates. A smooth cap keeps them between 0 and softcap_height.
        It is lower than the cap of train_gpt.py, and steeper for unlikely tokens, where most logits
        are (record #54). Tokens that only pad the vocabulary have logits as well, but are never
        targets."""
        shifted = self.lm_head(x).float() + self.hp.softcap_shift
        return self.hp.softcap_height * torch.sigmoid(shifted * (2 / self.hp.lm_head_softcap))

    def logits(self, features: Tensor) -> Tensor:
        """The logarithms of the next token's probabilities: the model's own, mixed with the
        candidates."""
        C = (features.size(-1) - self.hp.model_dim) // 2
        x, tokens, scores = features.split((self.hp.model_dim, C, C), dim=-1)
        x = x.type_as(self.embed.weight)
        shares = self.log_shares(x, scores).exp()
        own_p = shares[..., :1] * self.own_logits(x).softmax(-1)
        return own_p.scatter_add(-1, tokens.long(), shares[..., 1:]).log()

def draw_weights(model: nn.Module, seed: int):
    """Calls reset_parameters of every module that has it and has parameters of its own, each with a
    random seed that depends on `seed` and on the module's name. So two scripts start from equal
    weights in all layers of the same name and shape, and their runs can be compared in pairs.

    This overwrites what a constructor drew. So initialize parameters in the reset_parameters of the
    module that owns them; what a parent sets in its children is lost, because they are drawn after
    it. Parameters that no reset_parameters sets keep the values of their constructors. If two
    modules share a weight, as with a tied head, only the first of them draws it."""
    drawn = set()
    for name, module in model.named_modules():
        undrawn = set(module.parameters(recurse=False)) - drawn
        if undrawn and hasattr(module, "reset_parameters"):
            torch.manual_seed(int(sha256(f"{seed} {name}".encode()).hexdigest()[:15], 16))
            module.reset_parameters()
            drawn |= undrawn

# ---- 6. Processes -------------------------------------------------------------------------------

# torch 2.13 renamed all_gather_into_tensor to all_gather_single, and reduce_scatter_tensor to
# reduce_scatter_single.
if not hasattr(dist, "all_gather_single"):
    dist.all_gather_single = dist.all_gather_into_tensor
    dist.reduce_scatter_single = dist.reduce_scatter_tensor

class Exchange(NamedTuple):
    """A tensor that is still being sent or received. Call `result` before you use it. On GPUs, this
    makes the GPU's stream wait, not the host."""
    tensor: Tensor
    work: "dist.Work | None" = None  # None where there is nothing to wait for

    def result(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.tensor

@dataclass(frozen=True)
class World:
    """The processes that train together, and this one's place among them.

    A matrix, or a stack of matrices, is divided among them by its first dimension, in equal parts.
    With two processes, each updates 25,152 rows of a matrix [50304, 768]. Vectors and scalars, and
    what cannot be divided equally, are not divided: every process does the same work on all of it.
    """
    rank: int
    size: int
    device: torch.device

    def is_divided(self, whole: Tensor) -> bool:
        """Whether the processes divide a tensor among them."""
        return self.size > 1 and whole.ndim > 1 and len(whole) % self.size == 0

    def rows(self, whole: Tensor) -> Tensor:
        """This process's rows of a tensor, as a view."""
        return whole.chunk(self.size)[self.rank] if self.is_divided(whole) else whole

    def reduce_scatter(self, whole: Tensor) -> Exchange:
        """Starts to sum a tensor over the processes. The result is this process's rows of the sum,
        in a new tensor. A tensor that is not divided is summed in place, and is the result."""
        if not self.is_divided(whole):
            return self.all_reduce(whole)
        local = torch.empty_like(self.rows(whole))
        return Exchange(local, dist.reduce_scatter_single(local, whole, async_op=True))

    def all_gather(self, whole: Tensor) -> Exchange:
        """Starts to fetch the other processes' rows of a tensor. It works in place: what this
        process sends are its own rows of the same tensor."""
        if not self.is_divided(whole):
            return Exchange(whole)
        return Exchange(whole, dist.all_gather_single(whole, self.rows(whole), async_op=True))

    def all_reduce(self, whole: Tensor) -> Exchange:
        """Starts to sum a tensor over the processes, in place."""
        work = dist.all_reduce(whole, async_op=True) if self.size > 1 else None
        return Exchange(whole, work)

# ---- 7. Optimizers ------------------------------------------------------------------------------

class Optimizer:
    """Trains some parameters. The work is divided among the processes, as in ZeRO
    (arXiv:1910.02054): each updates its part of the parameters.

    A subclass defines three phases of a step. train_step runs each phase for all optimizers before
    the next one, so that the exchange of one overlaps the arithmetic of another:
        begin()       starts to sum the gradients over the processes
        update(step)  computes the update of this process's rows, and starts to send the result
        finish(step)  waits for the results of the others; Muon then applies all of them

    When a matrix, or a stack of matrices, is divided among the processes, each process has:
        p.grad           all rows, but summed over its own micro-batches only
        summed gradient  its own rows, in update()
        parameter        all rows; Adam changes its own in update(), and gets others' in finish()
        state            tensors for all rows, of which only its own are up to date
    For Muon, read "row" in this table as one whole parameter, because it divides a stack of them.
    Adam divides each matrix. So if Adam's update() needs a sum over a whole matrix, as for a norm,
    sum the process's own rows, then add up the processes by world.all_reduce(x).result(). Do this
    only if world.is_divided(p). Otherwise every process has the whole sum already.

    What an optimizer remembers from step to step belongs in `state`, under a name, and is created
    in the constructor. Anything kept elsewhere is neither saved nor reset after the warmup.
    state[name] is a list with one tensor per parameter. Each tensor has as many dimensions and rows
    as its parameter. (Muon has one stack instead.) A process reads and changes only its own rows,
    in place, by the view world.rows(tensor). The work is divided, the memory is not."""

    def __init__(self, params: dict, lr: float, hp: Hyperparameters, world: World):
        self.params = params  # {name: parameter}
        self.peak_lr = lr
        self.hp = hp
        self.world = world
        self.state = {}

    def lr(self, step: int) -> float:
        return self.peak_lr * lr_scale(step, self.hp)

    def gather_state(self):
        """Fetches the other processes' rows of the state. All processes take part."""
        for tensors in self.state.values():
            for x, p in zip(tensors, self.params.values(), strict=True):
                # World must divide x in the same way as p, so both need equal ndim and rows. If
                # you keep one number per row of a matrix, give it the shape [rows, 1].
                assert (x.ndim, x.shape[:1]) == (p.ndim, p.shape[:1]), f"a state of {x.shape}"
                self.world.all_gather(x).result()

class Adam(Optimizer):
    """Adam (arXiv:1412.6980) by PyTorch's fused kernel. Each process updates its rows of every
    matrix, and all of every vector and scalar.

    Embeddings in bfloat16 have gradients and a state in bfloat16 as well, without a copy in
    float32. A bfloat16 has 8 significant bits, so a change below 1/512 of a value is rounded away:
    a small step leaves its weight as it was, a mean square that should fall by 1/1000 in a step (a
    beta2 of 0.999) never falls, and in a sum over hundreds of micro-batches small gradients are
    lost."""

    def __init__(self, params, lr, hp, world):
        super().__init__(params, lr, hp, world)
        self.state["mean"] = [torch.zeros_like(p) for p in params.values()]
        self.state["mean_square"] = [torch.zeros_like(p) for p in params.values()]

    def begin(self):
        self.pending_sums = [self.world.reduce_scatter(p.grad) for p in self.params.values()]

    def update(self, step: int):
        gradients = [exchange.result() for exchange in self.pending_sums]
        self.pending_sums = []  # or the sums would stay in memory until the next begin()
        local = [self.world.rows(p.detach()) for p in self.params.values()]
        means = [self.world.rows(mean) for mean in self.state["mean"]]
        mean_squares = [self.world.rows(square) for square in self.state["mean_square"]]
        # This is the kernel of AdamW, which is Adam if the weight decay is 0. (A decay here would
        # also shrink vectors and scalars.) The kernel corrects the bias of its averages by the
        # number of updates so far, this one included. An Adam that skips steps must pass a smaller
        # number than step + 1.
        # The kernel only reads the number, so one tensor serves all parameters.
        steps = [torch.full((), step + 1.0, device=self.world.device)] * len(local)
        torch._fused_adamw_(local, gradients, means, mean_squares, [], steps,
                            lr=self.lr(step), beta1=self.hp.adam_beta1, beta2=self.hp.adam_beta2,
                            eps=self.hp.adam_eps, weight_decay=0.0, amsgrad=False, maximize=False)
        # From here to the end of finish(), the exchange writes to the parameters.
        self.pending_gathers = [self.world.all_gather(p.detach()) for p in self.params.values()]

    def finish(self, step: int):
        for exchange in self.pending_gathers:
            exchange.result()

class Muon(Optimizer):
    """Nesterov momentum, orthogonalized (Keller Jordan et al., 2024): every direction of the update
    becomes about equally large, so that rare directions are learned too.

    All parameters of one Muon have the same shape: a matrix, or a few matrices as in qkv. Their
    gradients, their updates and their momentum lie in stacks, with one entry per parameter. Every
    process updates equally many entries, so the stacks are padded with zeros. With 11 parameters on
    two processes, a step goes so:

        begin   every process copies its 11 gradients into a stack of 12 and starts to sum the
                stacks; process 0 receives 0 to 5 of the sum
        update  process 0 makes the updates of 0 to 5, process 1 those of 6 to 10 and of the zeros,
                and they start to send them to each other
        finish  every process subtracts all 11 updates, times the learning rate

    Another optimizer of matrices is a subclass with another `direction`, whose input is this
    process's part of the stack. If it has a state of its own, that is such a stack as well."""

    def __init__(self, params, lr, hp, world):
        super().__init__(params, lr, hp, world)
        (shape_of_one,) = {p.shape for p in params.values()}
        shape = (math.ceil(len(params) / world.size) * world.size, *shape_of_one)
        # Gradients and updates travel in the dtype of the activations, so gradients are rounded to
        # it before they are summed over the processes. newton_schulz computes in it too.
        self.gradients = torch.zeros(shape, dtype=getattr(torch, hp.dtype), device=world.device)
        self.updates = torch.zeros_like(self.gradients)
        self.state["momentum"] = torch.zeros(shape, device=world.device)
        self.orthogonalize = newton_schulz if world.device.type != "cuda" else torch.compile(
            newton_schulz, dynamic=False, fullgraph=True)

    def begin(self):
        for gradient, p in zip(self.gradients, self.params.values()):  # the padding stays zero
            gradient.copy_(p.grad)
        self.pending_sum = self.world.reduce_scatter(self.gradients)

    def update(self, step: int):
        gradients = self.pending_sum.result().float()  # of this process's part of the stack
        self.world.rows(self.updates).copy_(self.direction(gradients, step))
        self.pending_gather = self.world.all_gather(self.updates)

    def finish(self, step: int):
        for update, p in zip(self.pending_gather.result(), self.params.values()):
            # Weight decay would go here.
            p.add_(update, alpha=-self.lr(step))

    def direction(self, gradients: Tensor, step: int) -> Tensor:
        """The updates of this process's part of the stack, from its gradients in float32. If the
        part has n entries, entry i belongs to parameter rank * n + i. Beyond the last parameter,
        entries are padding: their gradients are zero, and their updates are ignored."""
        beta = muon_momentum(step, self.hp)
        momentum = self.world.rows(self.state["momentum"]).lerp_(gradients, 1 - beta)
        ahead = gradients.lerp(momentum, beta).to(self.updates.dtype)  # Nesterov: one step ahead
        # A matrix with more rows than columns is scaled up, so that its outputs change as much as
        # those of a square matrix.
        scale = max(1, ahead.size(-2) / ahead.size(-1)) ** 0.5
        # newton_schulz takes [n, rows, cols]. The stack of qkv is [n, parts, rows, cols], and
        # becomes [n * parts, rows, cols] here; a stack of three dimensions stays as it is.
        return scale * self.orthogonalize(ahead.flatten(0, -3)).view_as(ahead)

    def gather_state(self):
        for stack in self.state.values():
            assert len(stack) == len(self.updates) and stack.ndim > 1, "state of another stack"
            self.world.all_gather(stack).result()

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
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b gram + c gram @ gram
        x = torch.baddbmm(x, polynomial, x, beta=a)  # a x + polynomial @ x
    return x.mT if tall else x

def build_optimizers(model: nn.Module, hp: Hyperparameters, world: World) -> list[Optimizer]:
    """Which optimizer trains which parameters, and how fast. A new matrix needs a row here, or a
    place in a row's pattern. A new vector or scalar does not: those that fit no row are trained by
    Adam with scalar_lr.

    A parameter belongs to the first row whose pattern fits its whole name. Parameters of one row,
    shape and dtype share an optimizer. Frozen parameters, which need no gradient, are left out. The
    last row also takes new layers of a block, if they are called proj or fc. Muon takes a parameter
    of three dimensions for a stack of matrices, so give it no convolution."""
    # Shapes in `speedrun`: head and embeddings [50304, 768]; qkv [3, 768, 768], attention's proj
    # [768, 768], the MLP's fc [3072, 768] and its proj [768, 3072].
    table = [
        # names of the parameters               optimizer  peak rate
        (r"lm_head\.weight",                          Adam, hp.head_lr),
        (r"(value_|recalled_)?embeds?\..*",          Adam, hp.embed_lr),
        (r"blocks\..*\.(qkv|proj\.weight|fc\.weight)", Muon, hp.muon_lr),
    ]
    optimizers = []
    remaining = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for pattern, optimizer, lr in table:
        names = [name for name in remaining if re.fullmatch(pattern, name)]
        require(names, f"no parameter fits the row {pattern} of the table in build_optimizers")
        by_shape = {}
        for name in names:
            p = remaining.pop(name)
            by_shape.setdefault((p.shape, p.dtype), {})[name] = p
        optimizers += [optimizer(params, lr, hp, world) for params in by_shape.values()]
    matrices = [name for name, p in remaining.items() if p.ndim > 1]
    require(not matrices, f"no row of the table in build_optimizers takes {', '.join(matrices)}")
    if remaining:
        optimizers.append(Adam(remaining, hp.scalar_lr, hp, world))
    return optimizers

# ---- 8. Data ------------------------------------------------------------------------------------
# A shard is a header of 256 int32 (magic number, version, number of tokens, zeros), then the tokens
# in uint16. Each document begins with the end-of-text token, vocab_size - 1.

SHARD_MAGIC = 20240520
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
        data = np.memmap(path, dtype=np.uint8, mode="r")  # the bytes of the file
        magic, version, tokens = data[:12].view("<i4").tolist()
        expected = (SHARD_MAGIC, 1, SHARD_HEADER_BYTES + 2 * tokens)
        require((magic, version, len(data)) == expected, problem)
        ends = data[:2**16].tobytes() + data[-2**16:].tobytes()
        shards.append(Shard(path, tokens, sha256(ends).hexdigest()[:16]))
    require(shards, f"no file matches {pattern}: ./run.sh makes or fetches a preset's data, and "
            "data/tokenize_text.py makes shards of other data")
    return shards

def read_tokens(path: str, start: int, count: int, vocab_size: int) -> Tensor:
    """Tokens [count] in uint16 from a shard, from token `start` on. Where there is a GPU, they lie
    in pinned memory, from which they can be copied to it asynchronously. Each call makes a new
    tensor, because such a copy may still be reading the last one."""
    tokens = torch.empty(count, dtype=torch.uint16, pin_memory=torch.cuda.is_available())
    with open(path, "rb") as f:
        f.seek(SHARD_HEADER_BYTES + 2 * start)
        require(f.readinto(tokens.numpy()) == tokens.nbytes, f"{path} is shorter than it was")
    largest = tokens.numpy().max()  # by NumPy, since torch's threads would slow training down
    require(largest < vocab_size, f"{path} holds the token {largest}, which is not below "
            f"--vocab_size={vocab_size}; data/inspect_shards.py says where")
    return tokens

def step_starts(shards: list[Shard], hp: Hyperparameters) -> Iterator[tuple[Shard, int]]:
    """Yields (shard, start) for each step, as long as the data last: the step reads the shard from
    token `start` on. What is too short for a step at a shard's end is left out. Each further pass
    begins every shard one block later than the pass before, so that the text is cut at other
    places. When the shift reaches a whole sequence, it starts at 0 again.

    Every process runs this by itself, and a resumed run repeats it from the start. So an order of
    your own must depend on the arguments alone: shuffle a copy, by a generator that hp.seed seeds.
    """
    for epoch in range(hp.epochs):
        for shard in shards:
            start = (epoch * BLOCK) % hp.train_seq_len
            # The token at `end` is read as well: it is the last target.
            while (end := start + hp.micro_batches * hp.train_seq_len) < shard.tokens:
                yield shard, start
                start = end

def train_batches(shards: list[Shard], hp: Hyperparameters, world: World, first_step: int):
    """For each step from first_step on, this process's share of the micro-batches: (inputs_T int32,
    targets_T int64). The host does not wait until they are on the GPU."""
    T = hp.train_seq_len
    count = hp.micro_batches // world.size
    for shard, start in islice(step_starts(shards, hp), first_step, None):
        start += world.rank * count * T
        # uint16 has no arithmetic, so the bits travel as int16; & 0xFFFF makes them unsigned again.
        tokens = read_tokens(shard.path, start, count * T + 1, hp.vocab_size).view(torch.int16)
        tokens = tokens.to(world.device, non_blocking=True).to(torch.int32) & 0xFFFF
        inputs = tokens[:-1].view(count, T)
        targets = tokens[1:].to(torch.int64).view(count, T)
        yield list(zip(inputs, targets))

def load_validation(shards: list[Shard], hp: Hyperparameters, world: World) -> list:
    """This process's validation sequences, (inputs_T int32, targets_T int64) each. Together, the
    processes predict val_tokens tokens, every token once, from the second of the data on. The last
    sequence is filled up with targets of -1, which no loss counts."""
    stream = torch.cat([read_tokens(s.path, 0, s.tokens, hp.vocab_size) for s in shards]).int()
    require((stream == hp.vocab_size - 1).any(), f"no text in --val_files begins with the token "
            f"{hp.vocab_size - 1}, the last one of --vocab_size={hp.vocab_size}: lower that")
    padding = -hp.val_tokens % hp.val_seq_len  # to whole sequences
    inputs = F.pad(stream[:hp.val_tokens], (0, padding), value=hp.vocab_size - 1)
    targets = F.pad(stream[1:hp.val_tokens + 1].long(), (0, padding), value=-1)
    sequences = list(zip(inputs.split(hp.val_seq_len), targets.split(hp.val_seq_len)))
    return [(x.to(world.device), y.to(world.device)) for x, y in sequences[world.rank::world.size]]

# ---- 9. Training steps, state and warmup --------------------------------------------------------

def train_step(model, batches, optimizers, step: int, hp: Hyperparameters, world: World) -> Tensor:
    """One step on this process's micro-batches. Returns the mean loss over all processes. On GPUs
    it only launches work: the host waits neither for the device nor for other processes.

    The sums of the gradients over the processes exist only in update(), as its variable
    `gradients`, so clip them there. Before begin(), p.grad holds the sum over this process's
    micro-batches only. After begin(), it is too late to change p.grad, because Muon has copied it.
    (Clipping in update() treats each optimizer by itself. A norm over all optimizers needs a phase
    of its own after begin().)

    An optimizer that acts on some steps only must skip all three phases at the others. The
    gradients of these steps are lost, because zero_grad clears them."""
    window = window_tensor(step, hp, world.device)
    local_loss = torch.zeros((), dtype=torch.float64, device=world.device)
    for inputs_T, targets_T in batches:
        # The model returns the mean loss of a sequence. Divided by the number of sequences and
        # summed over them, it is the step's mean loss, and the gradients are those of that mean.
        # (If you add a loss on the weights, with a backward pass outside this loop, every process
        # adds its gradient. So divide that loss by world.size.)
        micro_loss = model(inputs_T, targets_T, window) / hp.micro_batches
        micro_loss.backward()
        local_loss += micro_loss.detach()
    # Each process's memory reads the tokens of all, in the order of the text.
    tokens = torch.cat([inputs_T for inputs_T, _ in batches])
    text = tokens.new_zeros(world.size, len(tokens))
    text[world.rank] = tokens
    model.memory.remember(world.all_gather(text).result().flatten())
    with torch.no_grad():
        for optimizer in optimizers:
            optimizer.begin()
        for optimizer in optimizers:
            optimizer.update(step)
        for optimizer in optimizers:
            optimizer.finish(step)
    model.zero_grad(set_to_none=True)
    return world.all_reduce(local_loss).result()

@torch.no_grad()
def evaluate(model, sequences: list, step: int, hp: Hyperparameters, world: World) -> float:
    """The mean loss in nats over the validation tokens of all processes, which all take part. Pass
    all sequences of load_validation: the sum of their losses is divided by val_tokens, which is the
    number of their targets."""
    model.eval()
    window = window_tensor(step, hp, world.device)
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for inputs_T, targets_T in sequences:
        # The model returns a sum divided by T, padding included. Times T, it is the sum again.
        # (Processes may have unequally many sequences, so they cannot exchange anything here.)
        total += model(inputs_T, targets_T, window).double() * len(inputs_T)
    model.train()
    return float(world.all_reduce(total).result()) / hp.val_tokens

def gather_training_state(model: nn.Module, optimizers: list[Optimizer]) -> dict:
    """All that decides how training goes on: {"model": {parameter: tensor}, "Muon momentum":
    {parameter: tensor}, ...}, whole on every process. All processes take part. These are the
    tensors that training uses, not copies, because load_training_state writes into them. If
    something else changes during training, such as an average of the weights, add it here. If
    forward changes a tensor in training, such as a running mean, make it a persistent buffer,
    and let every process change it in the same way. In validation, forward must change nothing. The
    state of a random generator does not belong here, because every process would load that of the
    first. For dropout, seed each process's generator from hp.seed, the step and the rank."""
    state = {"model": dict(model.state_dict())}
    for optimizer in optimizers:
        optimizer.gather_state()
        for name, entries in optimizer.state.items():
            kind = f"{type(optimizer).__name__} {name}"
            # entries: Adam's list, or Muon's stack, whose padding zip leaves out.
            state.setdefault(kind, {}).update(zip(optimizer.params, entries))
    return state

@torch.no_grad()
def load_training_state(saved: dict | None, model: nn.Module, optimizers: list, world: World):
    """Copies what the first process has in `saved`, in the form of gather_training_state, to the
    model and the optimizers of every process. All take part; the others may pass None."""
    # Only the references to the tensors are needed here. That this call also gathers their values
    # does no harm.
    state = gather_training_state(model, optimizers)
    if world.rank == 0:
        ours = {(kind, name, *x.shape) for kind in state for name, x in state[kind].items()}
        theirs = {(kind, name, *x.shape) for kind in saved for name, x in saved[kind].items()}
        require(ours == theirs, "the checkpoint does not fit the script: only the script has "
                f"{sorted(ours - theirs)[:1]}, only the checkpoint has {sorted(theirs - ours)[:1]}")
    for kind, tensors in state.items():
        for name, tensor in tensors.items():
            if world.rank == 0:
                tensor.copy_(saved[kind][name])
            if world.size > 1:
                dist.broadcast(tensor, src=0)

def warm_up(model, optimizers: list[Optimizer], hp: Hyperparameters, world: World):
    """Compiles everything and allocates memory, by a backward pass, a step and a validation, all on
    random tokens; then gives all processes the weights and the optimizers' state that the first one
    had. If your method does something at some steps only, do it here too: whatever is compiled
    later is an error, because it would be timed."""
    # FP8Linear is a custom function; the compiler caches it from run to run only if told so.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    before = tree_map(lambda x: x.to("cpu", copy=True), gather_training_state(model, optimizers))

    def random_sequence(length: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(hp.vocab_size, (length + 1,), device=world.device)
        # tokens[1:] begins at an unaligned address, for which the compiler makes another program.
        # clone() makes an aligned copy, as the cast to int64 does in train_batches.
        return tokens[:-1].int(), tokens[1:].clone()
    # train_step clears its gradients, so the check below needs a backward pass of its own.
    model(*random_sequence(hp.train_seq_len), window_tensor(0, hp, world.device)).backward()
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    require(not unused, f"no gradient reaches {', '.join(unused)}: use, freeze or remove it")
    train_step(model, [random_sequence(hp.train_seq_len)], optimizers, 0, hp, world)
    evaluate(model, [random_sequence(hp.val_seq_len)], 0, hp, world)
    load_training_state(before, model, optimizers, world)
    if world.device.type == "cuda":
        torch.compiler.set_stance("fail_on_recompile")
        torch.cuda.reset_peak_memory_stats()

# ---- 10. What a run needs besides the method ----------------------------------------------------

# ---- Processes

def world_of_this_process() -> World:
    """As torchrun describes it in the environment; without torchrun this process is alone."""
    rank, local_rank, size = (int(os.environ.get(name, default)) for name, default in
                              (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
    # srun alone starts several copies of this script, and tells them nothing that torch reads.
    require("WORLD_SIZE" in os.environ or os.environ.get("SLURM_STEP_NUM_TASKS", "1") == "1",
            "these processes do not know of each other: let srun start torchrun, once on each node")
    if not torch.cuda.is_available():
        return World(rank, size, torch.device("cpu"))
    require(local_rank < torch.cuda.device_count(), "start at most one process per GPU")
    # PYTORCH_ALLOC_CONF is the new name of PYTORCH_CUDA_ALLOC_CONF. If both are set, torch takes
    # the old one. So setting the old one here would override what the user set by the new name.
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    torch.cuda.set_device(local_rank)
    return World(rank, size, torch.device("cuda", local_rank))

# How long a process waits for another one before it gives up. While the first process saves a
# checkpoint, the others wait for it: raise this if saving takes as long.
TIMEOUT = timedelta(minutes=10)

def connect(plan: "Plan | None", script: str, world: World) -> "Plan":
    """Joins the other processes, and returns the first one's plan. Raises UserError if one does not
    come, or if machines have different scripts or data."""
    gpu = world.device if world.device.type == "cuda" else None
    try:
        dist.init_process_group("nccl" if gpu else "gloo", timeout=TIMEOUT, device_id=gpu)
    except (RuntimeError, ValueError) as e:
        reason = str(e).partition("\n")[0]
        raise UserError(f"the processes do not reach each other ({reason}); choose the "
                        "interface by NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME") from None
    plans = [plan]
    dist.broadcast_object_list(plans, src=0)  # replaces the None of the others
    here = (script, find_shards(plans[0].hp.train_files), find_shards(plans[0].hp.val_files))
    everywhere = [None] * world.size
    dist.all_gather_object(everywhere, here)
    require(everywhere.count(here) == world.size, "script or data differ between the machines")
    return plans[0]

def cpu_info() -> dict[str, str]:
    """What Linux says of the processor, such as its model and its flags; elsewhere nothing."""
    info = Path("/proc/cpuinfo")  # lines "key\t: value", and an empty one after each processor
    text = info.read_text(errors="replace") if info.exists() else ""
    return dict(re.findall(r"(?m)^([^\t]+)\t+: (.*)$", text.partition("\n\n")[0]))

# ---- Flags and checks

def true_or_false(text: str) -> bool:
    return bool(["false", "true"].index(text.lower()))  # another word is a ValueError

def parse_flags(argv: list[str]) -> tuple[Hyperparameters, argparse.Namespace]:
    """Returns the settings that a command line asks for, and what argparse made of it. The latter
    has .preset, .check, .resume (a path or None) and .named, a dict of only those settings that
    were typed. Raises UserError."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.error = lambda message: require(False, f"{message}; --help lists the flags")
    parser.usage = "%(prog)s [--preset=NAME | --resume=CHECKPOINT] [--check] [--setting=value ...]"
    parser.add_argument("--check", action="store_true", help="check settings and data, then exit")
    either = parser.add_mutually_exclusive_group()
    preset = "speedrun" if torch.cuda.is_available() else "demo"
    either.add_argument("--preset", choices=PRESETS, metavar="NAME", default=preset,
                        help=f"{' or '.join(PRESETS)}; on this machine the default is {preset}")
    either.add_argument("--resume", metavar="CHECKPOINT", type=Path,
                        help="continue from a checkpoint, in its settings but those named here")
    for f in fields(Hyperparameters):
        kind = true_or_false if f.type is bool else f.type
        values = ", ".join(f"{name}: {getattr(hp, f.name)}" for name, hp in PRESETS.items())
        parser.add_argument(f"--{f.name}", type=kind, metavar=kind.__name__,
                            default=argparse.SUPPRESS, help=f"{f.metadata['help']} ({values})")
    command = parser.parse_args(argv)
    hp = PRESETS[command.preset]
    command.named = {name: value for name, value in vars(command).items() if name in asdict(hp)}
    return replace(hp, **command.named), command

def resolve(hp: Hyperparameters, device: torch.device) -> Hyperparameters:
    """The settings with everything decided that depends on the machine or on chance: the dtype
    `auto`, a seed of -1, and FP8, which is used only where the hardware has it. A resumed run keeps
    what was decided, even on a faster machine: name --dtype or --use_fp8 to change it. A run that
    resumes where there is no FP8 stays without it, even if it is later resumed where there is."""
    cuda = device.type == "cuda"
    has_fp8 = cuda and torch.cuda.get_device_capability(device) >= (8, 9)
    fast_bf16 = (torch.cuda.is_bf16_supported(including_emulation=False) if cuda else
                 bool(re.search("amx_bf16|avx512_bf16", cpu_info().get("flags", ""))))
    if hp.dtype == "auto":
        hp = replace(hp, dtype="bfloat16" if fast_bf16 else "float32")
    if hp.seed < 0:
        hp = replace(hp, seed=int(np.random.default_rng().integers(2**31)))
    return replace(hp, use_fp8=hp.use_fp8 and has_fp8 and hp.dtype == "bfloat16")

def check_settings(hp: Hyperparameters, world_size: int):
    """Refuses settings that make no sense, alone or together. It runs before `resolve`, so dtype
    may still be `auto`, and the seed -1."""
    for f, value in zip(fields(hp), asdict(hp).values()):
        low, high, unit, pattern = f.metadata["limits"]
        if isinstance(value, str):
            require(re.fullmatch(pattern, value), f"--{f.name}={value} is not {f.metadata['help']}")
        else:
            require(low <= value <= high, f"--{f.name}={value} is not from {low} to {high}")
            require(unit == 1 or value % unit == 0, f"--{f.name}={value} is no multiple of {unit}")
    for name, marks in (("attention", hp.attention), ("value_embeds", hp.value_embeds)):
        require(len(marks) == len(hp.windows), f"--{name} and --windows differ in their length")
    unused = [v for v, a in zip(hp.value_embeds, hp.attention) if v != "." and a == "."]
    require(not unused, f"--value_embeds={hp.value_embeds} marks a layer without --attention")
    require(hp.window_start <= hp.window_end, "--window_start is above --window_end")
    require(len(hp.windows) > 1, f"--windows={hp.windows}: name at least two layers")
    require(tokens_seen(hp.num_iterations, hp) < 2**32, f"--num_iterations={hp.num_iterations}: "
            "the memory counts fewer than 2^32 tokens")
    require(hp.num_heads % (hp.num_kv_heads or 1) == 0, "--num_kv_heads must divide --num_heads")
    require(hp.micro_batches % world_size == 0, f"{world_size} processes cannot share "
            f"{hp.micro_batches} micro-batches equally: start a number that divides it")

@dataclass
class Plan:
    """What a run will do, as the first process has decided and checked it."""
    hp: Hyperparameters
    script: str  # the text of this file
    train_shards: list[Shard]
    val_shards: list[Shard]
    checkpoint: Path | None  # to resume from
    step: int = 0  # the first one that this run makes
    seconds: float = 0.0  # the training time of all steps before it

    def data_read(self, step: int) -> str:
        """A hash of what the steps before this one have read: the shards' fingerprints, the places
        in them, and the number of tokens."""
        steps = islice(step_starts(self.train_shards, self.hp), step)
        starts = [(shard.fingerprint, start) for shard, start in steps]
        return sha256(f"{starts} {tokens_seen(step, self.hp)}".encode()).hexdigest()

def prepare(hp: Hyperparameters, command, script: str, world: World, saved: dict | None) -> Plan:
    """Finds the data and makes every check that needs no training. A resumed run has the settings
    of what was saved in its checkpoint, except those that the command line names. Raises
    UserError."""
    if saved:
        # Every setting of this script must be in the checkpoint or on the command line. If one were
        # missing, today's default would silently replace what the run began with.
        own = {f.name for f in fields(Hyperparameters)}
        given = saved["settings"].keys() | command.named.keys()
        require(own == given, f"--resume: {sorted(own ^ given)} are settings of only the script or "
                "only the checkpoint: name new ones as flags, or take the script in the run's log")
        hp = Hyperparameters(**(saved["settings"] | command.named))
    check_settings(hp, world.size)
    hp = resolve(hp, world.device)

    train_shards = find_shards(hp.train_files)
    val_shards = find_shards(hp.val_files)
    by_fingerprint = {}
    for shard in train_shards + val_shards:
        first = by_fingerprint.setdefault(shard.fingerprint, shard)
        require(shard is first, f"{shard.path} has the same tokens as {first.path}: name each "
                "shard once, to train or to validate")
    available = sum(shard.tokens for shard in val_shards) - 1  # the first token is not predicted
    hp = replace(hp, val_tokens=hp.val_tokens or available)
    require(0 < hp.val_tokens <= available, f"--val_files={hp.val_files} has {available} tokens to "
            f"predict, not {hp.val_tokens}: add shards, or lower --val_tokens (0 takes all)")
    steps = sum(1 for _ in islice(step_starts(train_shards, hp), hp.num_iterations))
    require(steps == hp.num_iterations, f"--train_files={hp.train_files} suffices for {steps} "
            f"steps, not {hp.num_iterations}: add shards, raise --epochs or lower --num_iterations")

    plan = Plan(hp, script, train_shards, val_shards, command.resume)
    if saved:
        plan = replace(plan, step=saved["step"], seconds=saved["seconds"])
        require(plan.step <= hp.num_iterations, f"the run has done {plan.step} steps already")
        require(plan.data_read(plan.step) == saved["data_read"], "--resume: keep the steps' tokens "
                "(micro_batches, train_seq_len) and the shards read; new shards may follow them")
    return plan

# ---- Log and clock

def say(text: str):
    """Prints on the console. If that fails, nothing is printed any more, and the run goes on."""
    try:
        print(text, flush=True)
    except (OSError, ValueError):  # it is closed, full, or cannot show a letter
        sys.stdout = open(os.devnull, "w")

class RunLog:
    """The first process's log file and console; on other processes, writing does nothing. The log
    of a resumed run names the checkpoint from which it continues; records/logs.py joins the two."""

    def __init__(self, plan: Plan, world: World):
        self.hp = plan.hp
        self.path = self.file = None
        self.failed = False  # whether the newest write to the file failed
        if world.rank > 0:
            return
        now = datetime.now(timezone.utc)
        try:
            os.makedirs(plan.hp.records, exist_ok=True)
            while self.file is None:
                self.path = Path(plan.hp.records, f"{now:%Y-%m-%dT%H-%M-%SZ}_{plan.hp.name}.log")
                with suppress(FileExistsError):  # of a run that started in the same second
                    self.file = open(self.path, "xb", buffering=0)
                now += timedelta(seconds=1)
        except OSError as e:
            raise UserError(f"--records={plan.hp.records} takes no log: {e.strerror}") from None
        settings = [f"{name} = {value!r}" for name, value in asdict(plan.hp).items()]
        script = plan.script.removesuffix("\n").split("\n")
        for part in (settings, environment(plan, world), script):
            self.write("\n".join([*part, "=" * 100]), console=False)

    def write(self, text: str, console: bool = True):
        """Writes a line to the file and, if asked for, to the console. Training goes on if one of
        them is full or gone."""
        if self.file is None:
            return
        if console:
            say(text)
        # If the last write failed, half a line may stand in the file: "..." ends it.
        line = f"...\n{text}\n" if self.failed else f"{text}\n"
        line = line.encode(errors="backslashreplace")
        complete = False
        with suppress(OSError):
            complete = self.file.write(line) == len(line)
        if not complete and not self.failed:
            say(f"warning: {self.path} cannot be written (disk full?); training goes on")
        self.failed = not complete

    def write_loss(self, kind: str, step: int, loss: float, seconds: float):
        """Writes the line of a loss after `step` updates and `seconds` of training. A loss that is
        not finite ends the run, so all processes call this."""
        # records/logs.py reads these lines. The lr and the window of a line are computed here, from
        # the schedules: if you change them elsewhere, do it here as well. A val_loss at step n is
        # measured after n updates, with the schedules of n. A train_loss at step n comes from
        # train_step(step=n - 1), with the schedules of n - 1.
        scheduled = step - 1 if kind == "train_loss" else step
        average = f"{1000 * seconds / step:.2f}" if step else "nan"
        self.write(f"step:{step}/{self.hp.num_iterations} {kind}:{loss:.4f} "
                   f"train_time:{1000 * seconds:.0f}ms step_avg:{average}ms "
                   f"tokens:{tokens_seen(step, self.hp)} lr:{lr_scale(scheduled, self.hp):.3f} "
                   f"window:{window_tokens(scheduled, self.hp)}")
        require(math.isfinite(loss), f"step {step}: {kind} is {loss}; try lower learning rates")

def environment(plan: Plan, world: World) -> list[str]:
    """The machine, the software and the data, as lines `key: value`."""
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
    for shard in plan.train_shards + plan.val_shards:
        lines.append(f"data: {shard.path} {shard.tokens} tokens {shard.fingerprint}")
    if world.device.type == "cuda":
        lines.append(f"gpus: {torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
        query = "driver_version,clocks.sm,clocks.max.sm,power.limit,temperature.gpu"
        table = subprocess.getoutput(f"nvidia-smi --query-gpu={query} --format=csv").splitlines()
        lines += [f"gpu: {line}" for line in table]
    if plan.checkpoint:
        lines.append(f"resumed: {plan.checkpoint.absolute()} at step {plan.step}")
    newlines = plan.script.count("\n")
    lines.append(f"script: sha256 {sha256(plan.script.encode()).hexdigest()} {newlines} lines")
    return [" ".join(line.split()) for line in lines]  # a name with a line break stays one line

class StepClock:
    """Measures training time in seconds, and holds the losses of steps until they are read. The
    clock starts and stops when the device is idle. On a GPU, a step's loss is read after the next
    step has been launched, so that the GPU never waits for the host."""

    def __init__(self, device: torch.device, seconds: float):
        self.cuda = device.type == "cuda"
        self.synchronize = torch.cuda.synchronize if self.cuda else lambda: None
        self.seconds = seconds  # at the last stop
        self.losses = []  # (step, loss, event of its arrival on the host), the oldest first

    def start(self):
        self.synchronize()
        self.started = time.perf_counter() - self.seconds  # as if there had been no pauses

    def stop(self):
        self.synchronize()
        self.seconds = time.perf_counter() - self.started

    def add_loss(self, step: int, loss: Tensor):
        loss = loss.to("cpu", non_blocking=True)  # a copy from a GPU is there after `arrival`
        arrival = torch.cuda.current_stream().record_event() if self.cuda else None
        self.losses.append((step, loss, arrival))

    def read_losses(self, keep: int) -> Iterator[tuple[int, float, float]]:
        """(step, loss, seconds) of all but the `keep` newest."""
        while len(self.losses) > keep:
            step, loss, arrival = self.losses.pop(0)
            if arrival:
                arrival.synchronize()
            yield step, float(loss), time.perf_counter() - self.started

# ---- Checkpoints

def read_checkpoint(path: Path) -> dict:
    """A checkpoint whose checksums are right, its tensors mapped from the disk."""
    try:
        require(zipfile.ZipFile(path).testzip() is None, "a checksum is wrong")
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        require("data_read" in saved, "this script did not save it")
        return saved
    except Exception as e:  # a damaged archive leads to many kinds of exception
        reason = str(e).partition("\n")[0]
        raise UserError(f"--resume={path} cannot be used ({reason}): name a checkpoint, "
                        "step<n>.pt; if it is damaged, the one before it") from None

def save_checkpoint(step: int, seconds: float, model, optimizers, plan: Plan, log, warn) -> bool:
    """Saves all that a run needs to continue, on any number of processes, and returns whether that
    worked. If the disk fails, the run goes on; if `warn` is true, a line says why.

    The file is written under the name `unfinished` and renamed when it is complete. A power failure
    can still damage it. Then its checksum is wrong, and read_checkpoint refuses it. The two
    newest are kept. If a run is killed while it saves, `unfinished` stays; you may delete it. All
    processes take part; the first one writes, while the others wait for it in the next step (see
    TIMEOUT)."""
    state = gather_training_state(model, optimizers)
    if log.file is None:  # only the first process saves; what the others return has no effect
        return True
    path = log.path.with_suffix("") / f"step{step:08}.pt"
    unfinished = path.with_name("unfinished")
    # Only tensors, numbers, texts, lists and dicts: read_checkpoint refuses anything else.
    saved = dict(step=step, seconds=seconds, settings=asdict(plan.hp), state=state,
                 script=sha256(plan.script.encode()).hexdigest(), data_read=plan.data_read(step))
    file = io.BytesIO()  # in memory first, so that an OSError below is the disk's
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

# ---- 11. The run --------------------------------------------------------------------------------

def main(argv: list[str]):
    """The story of a run, in the order in which it happens."""
    # What to do. The first process makes a plan, with every check that needs no training, and sends
    # it to the others. With --check the processes do not connect, and each makes its own.
    script = Path(__file__).read_text(encoding="utf-8")  # now, before anyone edits it
    asked, command = parse_flags(argv)
    world = world_of_this_process()
    saved = plan = None
    if world.rank == 0 or command.check:
        saved = read_checkpoint(command.resume) if command.resume else None
        plan = prepare(asked, command, script, world, saved)
    if command.check:
        world = World(0, 1, world.device)  # this process goes on as if it were alone
    elif world.size > 1:
        plan = connect(plan, script, world)
    # The log and the checkpoints have these settings. To compute a setting from others, do so in
    # `prepare`. A resumed run calls `prepare` on the settings that were saved, so the computation
    # must be idempotent.
    hp = plan.hp
    cuda = world.device.type == "cuda"

    # What to train. All processes draw the same weights. draw_weights seeds each reset_parameters
    # by itself; the seed below is for constructors that draw, such as by torch.randn.
    torch.manual_seed(hp.seed)
    # To debug on a GPU without the compiler, set TORCH_COMPILE_DISABLE=1. Attention is then that of
    # a CPU, because FlexAttention would ignore the lists of blocks.
    switches = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
    compiles = cuda and not any(os.environ.get(name) == "1" for name in switches)
    model = GPT(hp, getattr(torch, hp.dtype), flex=compiles).to(world.device)
    optimizers = build_optimizers(model, hp, world)
    if plan.checkpoint:
        # Only the first process has read it. load_training_state sends its content to the others.
        load_training_state(saved["state"] if saved else None, model, optimizers, world)
    val_sequences = load_validation(plan.val_shards, hp, world)
    if command.check:
        print("checks passed")
        return

    log = RunLog(plan, world)
    try:
        log.write(f"log: {log.path}")
        log.write(f"to resume: {sys.argv[0]} --resume=FILE, with the FILE of a `checkpoint:` line")
        if saved and saved["script"] != sha256(script.encode()).hexdigest():
            log.write("changed: the script is not the one that saved the checkpoint")
        log.write(f"model: {sum(p.numel() for p in model.parameters())} parameters; "
                  f"{hp.micro_batches} x {hp.train_seq_len} tokens a step, {world.size} rank(s)")
        log.write("\n".join(f"{type(each).__name__}, lr {each.peak_lr}: {', '.join(each.params)}"
                            for each in optimizers), console=False)

        # What comes before the clock. model.compile() works in place, so the parameters keep their
        # names for the checkpoints; torch.compile(model) would put a prefix before them. Only
        # model(...) is compiled: a direct call of another method, such as features, is not.
        if compiles:
            model.loss = torch.compile(model.loss, dynamic=False, fullgraph=True)
        batches_of_steps = train_batches(plan.train_shards, hp, world, plan.step)
        began = time.perf_counter()
        warm_up(model, optimizers, hp, world)
        log.write(f"warmup: {time.perf_counter() - began:.1f} s, untimed")

        # The clock runs for training steps alone: it stops to validate and to save.
        clock = StepClock(world.device, plan.seconds)
        save_worked = True  # whether the newest save worked
        clock.start()
        for step in range(plan.step, hp.num_iterations + 1):
            # To end a run early, make `last` true here. All processes must decide alike, so not by
            # the clock or by save_worked, in which they differ.
            last = step == hp.num_iterations
            save_due = step > 0 and hp.save_every > 0 and (last or step % hp.save_every == 0)
            val_due = hp.val_loss_every > 0 and step % hp.val_loss_every == 0
            # A save is preceded by a validation, which ends the run if the loss is not finite, so
            # that such weights are never saved.
            if last or save_due or val_due:
                for entry in clock.read_losses(keep=0):
                    log.write_loss("train_loss", *entry)
                clock.stop()
                val_loss = evaluate(model, val_sequences, step, hp, world)
                log.write_loss("val_loss", step, val_loss, clock.seconds)
                if save_due and step > plan.step:  # the step that it resumed from is saved already
                    save_worked = save_checkpoint(step, clock.seconds, model, optimizers, plan, log,
                                                  warn=save_worked or last)
                clock.start()
            if last:
                break
            loss = train_step(model, next(batches_of_steps), optimizers, step, hp, world)
            clock.add_loss(step + 1, loss)
            for entry in clock.read_losses(keep=int(cuda)):
                log.write_loss("train_loss", *entry)

        log.write(f"throughput: {tokens_seen(step, hp) / max(clock.seconds, 1e-9):.0f} tokens/s")
        if cuda:
            log.write(f"peak_memory: {torch.cuda.max_memory_allocated() >> 20} MiB on rank 0")
        log.write(f"final_val_loss: {val_loss:.4f} nats per token, on {hp.val_tokens} tokens")
        log.write(f"log: {log.path}")
    except Exception as e:  # so that the log ends with the reason (other processes have no log)
        prefix = "" if isinstance(e, UserError) else f"{type(e).__name__}: "
        log.write(f"error: {prefix}{e}", console=False)
        raise
    if world.size > 1:
        dist.destroy_process_group()

if __name__ == "__main__":
    # Ctrl+C ends this process at once, even while it waits for a GPU, as SIGTERM does anyway.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        main(sys.argv[1:])
    except Exception as e:
        if os.environ.get("RANK", "0") != "0":
            # Usually the first process fails with the same error. While this one sleeps, torchrun
            # then ends it, so that the console shows the error once instead of eight times.
            time.sleep(3)
        if not isinstance(e, UserError):
            sys.excepthook(*sys.exc_info())
            os._exit(1)  # an orderly exit could wait for processes that wait for this one
        with suppress(OSError):
            print(f"error: {e}", file=sys.stderr, flush=True)
        os._exit(2)
