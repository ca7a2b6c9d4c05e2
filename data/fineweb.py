"""Fetches FineWeb, already in GPT-2 tokens, from the Hugging Face hub.

    python data/fineweb.py                    # what the speedrun needs: 8 chunks and validation
    python data/fineweb.py --num_chunks 103   # all of FineWeb10B: chunks of 100M tokens, 20 GB
    python data/fineweb.py --verify           # check again what is there, without a network

Safe to run again at any time: it keeps the sound files and fetches the missing and the damaged
ones. A file is checked before it gets its name, and its SHA-256 goes into SHA256SUMS next to it
(`sha256sum -c` reads it too). The hub's own variables hold: HF_ENDPOINT for a mirror, HF_TOKEN,
HF_HUB_OFFLINE.
"""

import os
import queue
import re
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from data.common import ArgumentParser, UserError, check_shard, publish, run, sha256, staging
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

def ask_hub(request, what: str):
    """request(), its failures as one line. They come from the hub's library and whichever HTTP
    library it uses, and have no common ancestor but Exception."""
    try:
        return request()
    except Exception as e:
        if isinstance(e, OSError) and e.errno and not isinstance(e, ConnectionError):
            raise  # this machine's: a full disk, say
        status = getattr(getattr(e, "response", None), "status_code", None)
        if status == 404:
            raise UserError(f"{what}: {endpoint()} does not have it") from None
        reason = f"{type(e).__name__}: {' '.join(str(e).split())[:160]}"
        if status:
            reason = f"HTTP status {status}"
        raise UserError(f"{what}: could not be fetched from {endpoint()} ({reason}); HF_ENDPOINT "
                        "can name a mirror, and files fetched on another machine can be copied "
                        "here") from None


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def describe(dataset: str, name: str) -> tuple[int, str | None]:
    """A file's size on the hub, and its SHA-256 where the hub tells it."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    url = hf_hub_url(f"kjj0/{dataset}-gpt2", name, repo_type="dataset", endpoint=endpoint())
    found = ask_hub(lambda: get_hf_file_metadata(url, endpoint=endpoint()), name)
    etag = found.etag or ""
    return found.size or 0, etag if re.fullmatch("[0-9a-f]{64}", etag) else None


def fetch(dataset: str, name: str, digest: str | None, folder: Path, lock: threading.Lock):
    from huggingface_hub import hf_hub_download
    unfinished = folder / f".{dataset}.unfinished"

    def download():
        return hf_hub_download(f"kjj0/{dataset}-gpt2", name, repo_type="dataset",
                               local_dir=unfinished, endpoint=endpoint())

    path = Path(ask_hub(download, name))
    check(path, digest)
    digest = digest or sha256(path)
    with lock:
        publish([path], folder)
        sums = sorted({**read_sums(folder), name: digest}.items())
        path = unfinished / SUMS
        path.write_text("".join(f"{sum_of_file}  {file}\n" for file, sum_of_file in sums))
        publish([path], folder)


def fetch_all(dataset: str, wanted: list[tuple[str, str | None]], folder: Path, workers: int):
    """In daemon threads, so that an interruption need not wait for them."""
    jobs = queue.SimpleQueue()
    done = queue.SimpleQueue()
    lock = threading.Lock()
    for job in wanted:
        jobs.put(job)

    def work():
        while True:
            try:
                name, digest = jobs.get_nowait()
            except queue.Empty:
                return
            try:
                fetch(dataset, name, digest, folder, lock)
                done.put(None)
            except BaseException as e:  # noqa: BLE001 - it is raised below
                done.put(e)

    for _ in range(workers):
        threading.Thread(target=work, daemon=True).start()
    for _ in tqdm(wanted, desc="files", disable=None):
        if error := done.get():
            raise error


# --------------------------------------------------------------------------------------------------

def verify(folder: Path):
    paths = sorted(folder.glob("fineweb_*.bin"))
    sums = read_sums(folder)
    bad = 0
    if not paths:
        raise UserError(f"{folder}: holds no fineweb_*.bin")
    for path in tqdm(paths, disable=None):
        try:
            num_tokens = check(path, sums.get(path.name))
            known = "SHA-256 as fetched" if path.name in sums else "no SHA-256 on record"
            tqdm.write(f"{path.name}: {num_tokens} tokens, sound, {known}")
        except UserError as e:
            bad += 1
            tqdm.write(f"error: {e}", file=sys.stderr)
    if bad:
        raise UserError(f"{bad} of {len(paths)} files are bad; run again without --verify to fetch "
                        "them again")


def missing(folder: Path, names: list[str]) -> list[str]:
    """The names without a sound file."""
    wanted = []
    for name in names:
        if (folder / name).exists():
            try:
                check_shard(folder / name, GPT2Tokenizer.vocab_size)
                continue
            except UserError as e:
                print(f"fetching it again: {e}", file=sys.stderr)
        wanted.append(name)
    return wanted


def main(argv=None):
    p = ArgumentParser(description=__doc__)
    p.add_argument("--num_chunks", type=int, default=8, metavar="N",
                   help="training chunks to have (8)")
    p.add_argument("--dataset", choices=CHUNKS, default="fineweb10B", help="(fineweb10B)")
    p.add_argument("--out", type=Path, metavar="DIR",
                   help="destination (a folder of the dataset's name, in data/)")
    p.add_argument("--workers", type=int, default=4, metavar="N", help="files at a time (4)")
    p.add_argument("--verify", action="store_true",
                   help="check the files that are there, fetch nothing")
    args = p.parse_args(argv)
    folder = args.out or Path(os.path.relpath(Path(__file__).resolve().parent / args.dataset))
    if args.verify:
        verify(folder)
        return
    if not 0 <= args.num_chunks <= CHUNKS[args.dataset]:
        raise UserError(f"--num_chunks {args.num_chunks}: {args.dataset} has "
                        f"{CHUNKS[args.dataset]}")
    if args.workers < 1:
        raise UserError(f"--workers {args.workers}: must be 1 or more")

    names = ["fineweb_val_000000.bin"]
    names += [f"fineweb_train_{i:06d}.bin" for i in range(1, args.num_chunks + 1)]
    wanted = missing(folder, names)
    if wanted:
        describe(args.dataset, wanted[0])  # without a network this fails at once, and once
        with ThreadPoolExecutor(args.workers) as pool:
            described = list(pool.map(lambda name: describe(args.dataset, name), wanted))
        size = sum(size for size, _ in described)
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if size > free:
            raise UserError(f"{folder}: {len(wanted)} files of {size / 1e9:.1f} GB in all do not "
                            f"fit, {free / 1e9:.1f} GB are free; fetch fewer --num_chunks, or "
                            "choose another --out")
        with staging(folder / f".{args.dataset}.unfinished"):
            digests = [digest for _, digest in described]
            fetch_all(args.dataset, list(zip(wanted, digests)), folder, args.workers)
    print(f"{folder}: {args.num_chunks} training chunks and validation, all sound ({len(wanted)} "
          "fetched now)")


if __name__ == "__main__":
    sys.exit(run(main))
