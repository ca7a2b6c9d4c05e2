"""Block masks against a dense reference. (Attention on them is in test_model.py.)"""

import random
import pytest
import torch
from train_gpt import BLOCK, build_block_masks, plain_attend

pytestmark = pytest.mark.quick
EOT = 9

def dense_mask(tokens, window_blocks, end_of_text=EOT):
    """Which keys [T, T] a query sees, by definition."""
    position = torch.arange(len(tokens))
    document = (tokens == end_of_text).cumsum(0)
    query, key = position[:, None], position[None, :]
    same_document = document[:, None] == document[None, :]
    return same_document & (key <= query) & (query // BLOCK - key // BLOCK < window_blocks)

def blocks_of(mask, kind):
    counts, indices = getattr(mask, f"{kind}_num_blocks"), getattr(mask, f"{kind}_indices")
    named = [(i, j) for i, count in enumerate(counts[0, 0]) for j in
             indices[0, 0, i, :count].tolist()]
    assert len(named) == len(set(named)), "a list has a block twice"
    return set(named)

def as_dense(mask, T):
    """What a BlockMask makes visible [T, T], and its partial and its full blocks as sets."""
    position = torch.arange(T)
    inside = mask.mask_mod(0, 0, position[:, None], position[None, :])
    seen = torch.zeros(T, T, dtype=torch.bool)
    partial, full = (blocks_of(mask, kind) for kind in ("kv", "full_kv"))
    assert not partial & full, "a block is both partial and full"
    for kind, blocks in (("q", partial), ("full_q", full)):
        assert {(i, j) for j, i in blocks_of(mask, kind)} == blocks, "backward lists differ"
        for i, j in blocks:
            tile = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            # The rule is asked about partial blocks only, and must allow all of a full one.
            assert kind == "q" or inside[tile].all()
            seen[tile] = inside[tile]
    return seen, (partial, full)

def plain_as_dense(mask):
    """What a mask for plain_attend makes visible [T, T]."""
    seen = torch.zeros(2 * [len(mask) * BLOCK], dtype=torch.bool)
    for n, (keys, bias) in enumerate(mask):
        assert set(bias.unique().tolist()) <= {0.0, -torch.inf}
        seen[n * BLOCK:(n + 1) * BLOCK, keys] = bias == 0
    return seen

def layouts():
    """Sequences with documents of many lengths, also with borders on those of blocks."""
    rng = random.Random(0)
    for T in (128, 512):
        starts = [[], range(T), *(rng.sample(range(T), density) for density in (1, 3, 10, 40))]
        for spacing in (3, 60, 128, 129, 300):
            starts += [range(shift, T, spacing) for shift in (0, 1, 127)]
        for places in starts:
            tokens = torch.zeros(T, dtype=torch.int32)
            tokens[list(places)] = EOT
            yield tokens

def test_masks_equal_the_dense_reference_and_split_exactly():
    for tokens in layouts():
        T = len(tokens)
        for window in (128, 256, 384, 102400)[:T // 128]:
            long = window // BLOCK
            masks = (build_block_masks(tokens, EOT, torch.tensor(window), flex)
                     for flex in (True, False))
            for mask, plain, blocks in zip(*masks, (long, max(1, long // 2)), strict=True):
                want = dense_mask(tokens, blocks)
                assert torch.equal(plain_as_dense(plain), want)
                seen, (partial_blocks, full_blocks) = as_dense(mask, T)
                assert torch.equal(seen, want), (T, window, tokens.nonzero().flatten().tolist())
                tiles = want.view(T // BLOCK, BLOCK, -1, BLOCK).transpose(1, 2).flatten(2)
                full, touched = tiles.all(-1), tiles.any(-1)
                assert full_blocks == {tuple(b) for b in full.nonzero().tolist()}
                assert partial_blocks == {tuple(b) for b in (touched & ~full).nonzero().tolist()}

def test_nothing_is_quadratic_in_the_sequence_length():
    T, sizes = 8192, []
    with torch.autograd.graph.saved_tensors_hooks(
            lambda x: sizes.append(x.untyped_storage().nbytes() // x.itemsize) or x, lambda x: x):
        tokens = torch.zeros(T, dtype=torch.int32)
        mask, _ = build_block_masks(tokens, EOT, torch.tensor(256), flex=False)
        q, k, v = torch.randn(3, 1, 1, T, 16, requires_grad=True)
        plain_attend(q, k, v, mask, 0.12).sum().backward()
    kept = sum(bias.numel() for _, bias in mask)
    assert len(sizes) > T // BLOCK and max(*sizes, kept) <= 2 * T * BLOCK
