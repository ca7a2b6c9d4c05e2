"""Writes copies of train_gpt.py in which FlexAttention has other tiles, for bench to time:

    python records/2026-11-28_candidates/tiles.py
    ./run.sh bench tile_*.py short --steps=10

Options of the backward pass begin with bwd_. Those that are not named stay as they are."""

from pathlib import Path

CALL = "block_mask=mask, scale=scale, enable_gqa=True"
TILES = {  # {name of a copy: options}; torch 2.13 takes 128, 64, 3 stages, 8 warps on an H100
    "forward_128": dict(fwd_BLOCK_M=128, fwd_BLOCK_N=128, fwd_num_stages=2, fwd_num_warps=8),
    "forward_warps": dict(fwd_BLOCK_M=128, fwd_BLOCK_N=64, fwd_num_stages=2, fwd_num_warps=4),
    "backward_64": dict(bwd_BLOCK_M1=64, bwd_BLOCK_N1=64, bwd_BLOCK_M2=64, bwd_BLOCK_N2=64,
                        bwd_num_stages=3, bwd_num_warps=4),
    "backward_warps": dict(bwd_BLOCK_M1=64, bwd_BLOCK_N1=128, bwd_BLOCK_M2=128, bwd_BLOCK_N2=64,
                           bwd_num_stages=2, bwd_num_warps=8)}

if __name__ == "__main__":
    source = Path("train_gpt.py").read_text(encoding="utf-8")
    assert source.count(CALL) == 1
    for name, options in TILES.items():
        changed = source.replace(CALL, f"{CALL},\n{29 * ' '}kernel_options={options}")
        Path(f"tile_{name}.py").write_text(changed, encoding="utf-8")
        print(f"tile_{name}.py: {options}")
