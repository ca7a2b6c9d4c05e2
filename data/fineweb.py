"""Fetches FineWeb, already in GPT-2 tokens, from the Hugging Face hub.

    ./run.sh fineweb                    # what the speedrun needs: 8 chunks and validation
    ./run.sh fineweb --num_chunks 103   # all of FineWeb10B: chunks of 100M tokens, 20 GB
    ./run.sh fineweb --verify           # check again what is there, without a network

Safe to run again at any time: it keeps the sound files, fetches the missing and the damaged ones,
and goes on with a download that was cut off. Every token of a new file is checked, and its SHA-256
is compared with the hub's and goes into SHA256SUMS next to it (`sha256sum -c` reads it too). The
hub's own variables hold: HF_ENDPOINT for a mirror, HF_TOKEN, HF_HUB_OFFLINE.
"""

import os
import re
import shutil
import sys
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from data.common import ArgumentParser, UserError, check_shard, require, run, sha256
from data.vocab import GPT2Tokenizer

CHUNKS = {"fineweb10B": 103, "fineweb100B": 1030}  # of 100M training tokens each
SUMS = "SHA256SUMS"


def read_sums(folder: Path) -> dict[str, str]:
    try:
        lines = (folder / SUMS).read_text().splitlines()
    except FileNotFoundError:
        return {}
    pairs = [line.split(maxsplit=1) for line in lines if line.strip()]
    return {name: digest for digest, name in pairs}


def check(path: Path, digest: str | None) -> int:
    """The number of tokens of a sound shard. Raises UserError where it is none, or has another
    SHA-256 than `digest`, if that is known."""
    num_tokens = check_shard(path, GPT2Tokenizer.vocab_size)
    if digest and sha256(path) != digest:
        raise UserError(f"{path}: its SHA-256 is not {digest}; it is damaged, fetch it again")
    return num_tokens


# --------------------------------------------------------------------------------------------------
# The hub.

def ask_hub(request, dataset: str, name: str, **options):
    """The answer of one of the hub library's functions about a file; its failure is one line. They
    have no common ancestor but Exception."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    try:
        return request(f"kjj0/{dataset}-gpt2", name, repo_type="dataset", endpoint=endpoint,
                       **options)
    except Exception as e:
        if isinstance(e, OSError) and e.errno and not isinstance(e, ConnectionError):
            raise  # this machine's: a full disk, say
        reason = f"{type(e).__name__}: {' '.join(str(e).split())[:160]}"
        raise UserError(f"{name}: could not be fetched from {endpoint} ({reason}); HF_ENDPOINT can "
                        "name a mirror, and files fetched on another machine can be copied "
                        "here") from None


def describe(repo: str, name: str, repo_type: str, endpoint: str) -> tuple[int, str | None]:
    """A file's size on the hub, and its SHA-256 where the hub tells it."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    url = hf_hub_url(repo, name, repo_type=repo_type, endpoint=endpoint)
    found = get_hf_file_metadata(url, endpoint=endpoint)
    etag = found.etag or ""
    return found.size or 0, etag if re.fullmatch("[0-9a-f]{64}", etag) else None


def fetch(dataset: str, name: str, digest: str | None, folder: Path):
    """A bad file does not stay. One that was damaged later is replaced."""
    from huggingface_hub import hf_hub_download
    path = Path(ask_hub(hf_hub_download, dataset, name, local_dir=folder))
    try:
        check(path, digest)
    except UserError:
        path.unlink()
        raise
    sums = sorted({**read_sums(folder), name: digest or sha256(path)}.items())
    (folder / SUMS).write_text("".join(f"{digest}  {file}\n" for file, digest in sums))


# --------------------------------------------------------------------------------------------------

def verify(folder: Path):
    paths = sorted(folder.glob("fineweb_*.bin"))
    sums = read_sums(folder)
    bad = 0
    require(paths, f"{folder}: holds no fineweb_*.bin")
    for path in tqdm(paths, disable=None):
        try:
            num_tokens = check(path, sums.get(path.name))
            known = "SHA-256 as fetched" if path.name in sums else "no SHA-256 on record"
            tqdm.write(f"{path.name}: {num_tokens} tokens, sound, {known}")
        except UserError as e:
            bad += 1
            tqdm.write(f"error: {e}", file=sys.stderr)
    require(not bad, f"{bad} of {len(paths)} files are bad; run again without --verify to fetch "
            "them again")


def missing(folder: Path, names: list[str]) -> list[str]:
    """The names without a sound file. What is damaged is removed."""
    wanted = []
    for name in names:
        path = folder / name
        if path.exists():
            try:
                check(path, None)
                continue
            except UserError as e:
                print(f"fetching it again: {e}", file=sys.stderr)
                path.unlink()
        wanted.append(name)
    return wanted


def main(argv=None):
    p = ArgumentParser(description=__doc__, prog="./run.sh fineweb")
    p.add_argument("--num_chunks", type=int, default=8, metavar="N",
                   help="training chunks to have (8)")
    p.add_argument("--dataset", choices=CHUNKS, default="fineweb10B", help="(fineweb10B)")
    p.add_argument("--out", type=Path, metavar="DIR",
                   help="destination (a folder of the dataset's name, in data/)")
    p.add_argument("--verify", action="store_true",
                   help="check the files that are there, fetch nothing")
    args = p.parse_args(argv)
    folder = args.out or Path(os.path.relpath(Path(__file__).resolve().parent / args.dataset))
    if args.verify:
        verify(folder)
        return
    require(0 <= args.num_chunks <= CHUNKS[args.dataset],
            f"--num_chunks {args.num_chunks}: {args.dataset} has {CHUNKS[args.dataset]}")

    names = ["fineweb_val_000000.bin"]
    names += [f"fineweb_train_{i:06d}.bin" for i in range(1, args.num_chunks + 1)]
    wanted = missing(folder, names)
    described = [ask_hub(describe, args.dataset, name) for name in wanted]
    size = sum(size for size, _ in described)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    require(size <= free, f"{folder}: {len(wanted)} files of {size / 1e9:.1f} GB in all do not "
            f"fit, {free / 1e9:.1f} GB are free; fetch fewer --num_chunks, or choose another --out")
    for name, (_, digest) in zip(tqdm(wanted, desc="files", disable=None), described):
        fetch(args.dataset, name, digest, folder)
    print(f"{folder}: {args.num_chunks} training chunks and validation, all sound ({len(wanted)} "
          "fetched now)")


if __name__ == "__main__":
    sys.exit(run(main))
