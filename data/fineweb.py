"""Fetches FineWeb, already in GPT-2 tokens, from the Hugging Face hub.

    ./run.sh fineweb                    # what `speedrun` needs: 7 chunks and validation, 1.6 GB
    ./run.sh fineweb --num_chunks 1     # what `short` needs: 1 chunk and validation, 0.4 GB

Safe to run again at any time: it checks every token and the SHA-256 of the files that are there,
fetches the missing and the damaged ones, and goes on with a download that was cut off. If all are
sound, it needs no network. The SHA-256 of a new file is compared with the hub's and goes into
SHA256SUMS. The hub's own variables hold: HF_ENDPOINT for a mirror, HF_TOKEN, HF_HUB_OFFLINE.
"""

import os
import re
import sys
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from data.common import (ArgumentParser, UserError, between, check_shard, locked, require, run,
                         sha256, write_whole)
from data.vocab import GPT2Tokenizer

REPOSITORY = "kjj0/fineweb10B-gpt2"
CHUNKS = 103  # of 100M training tokens each
SUMS = "SHA256SUMS"

def read_sums(folder: Path) -> dict[str, str]:
    """{file name: SHA-256} of the files that were fetched."""
    text = (folder / SUMS).read_text(errors="replace") if (folder / SUMS).exists() else ""
    return {name: digest for digest, name in re.findall(r"(?m)^([0-9a-f]{64}) [ *](.+)$", text)}

def check(path: Path, digest: str | None) -> int:
    """The number of tokens of a sound shard. Raises UserError where it is none, or has another
    SHA-256 than `digest`, if that is known."""
    tokens = check_shard(path, GPT2Tokenizer.vocab_size)
    require(not digest or sha256(path) == digest,
            f"{path}: its SHA-256 is not {digest}; it is damaged, fetch it again")
    return len(tokens)

def fetch(name: str, folder: Path):
    """Fetches a file of the hub. One that is bad does not stay."""
    import huggingface_hub as hub
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    place = dict(repo_id=REPOSITORY, filename=name, repo_type="dataset", endpoint=endpoint)
    try:
        etag = hub.get_hf_file_metadata(hub.hf_hub_url(**place)).etag or ""
        path = Path(hub.hf_hub_download(**place, local_dir=folder))
    except Exception as e:  # the library's errors have no other common ancestor
        if isinstance(e, OSError) and e.errno and not isinstance(e, ConnectionError):
            raise  # this machine's: a full disk, say
        reason = f"{type(e).__name__}: {' '.join(str(e).split())[:160]}"
        raise UserError(f"{name}: could not be fetched from {endpoint} ({reason}); HF_ENDPOINT can "
                        f"name a mirror, and other copies may be put into {folder}") from None
    try:
        check(path, etag if re.fullmatch("[0-9a-f]{64}", etag) else None)
    except UserError:
        path.unlink()
        raise
    sums = sorted({**read_sums(folder), name: sha256(path)}.items())
    write_whole(folder / SUMS, "".join(f"{digest}  {file}\n" for file, digest in sums))

def main(argv=None):
    p = ArgumentParser(description=__doc__, prog="./run.sh fineweb")
    p.add_argument("--num_chunks", type=between(0, CHUNKS), default=7, metavar="N",
                   help="training chunks (7)")
    p.add_argument("--out", type=Path, metavar="DIR", help="destination (data/fineweb10B)")
    args = p.parse_args(argv)
    folder = args.out or Path(os.path.relpath(Path(__file__).resolve().parent / "fineweb10B"))
    with locked(folder / ".lock"):
        check_and_fetch(args, folder)

def check_and_fetch(args, folder: Path):
    names = ["fineweb_val_000000.bin"]
    names += [f"fineweb_train_{i:06d}.bin" for i in range(1, args.num_chunks + 1)]
    sums = read_sums(folder)
    wanted = []
    for name in tqdm(names, desc="checking", disable=None):
        try:
            num_tokens = check(folder / name, sums.get(name))
            known = "SHA-256 as fetched" if name in sums else "no SHA-256 on record"
            tqdm.write(f"{name}: {num_tokens} tokens, sound, {known}")
        except FileNotFoundError:
            wanted.append(name)
        except UserError as e:
            wanted.append(name)
            tqdm.write(f"error: {e}", file=sys.stderr)
    for name in tqdm(wanted, desc="fetching", disable=None):
        (folder / name).unlink(missing_ok=True)
        fetch(name, folder)
    print(f"{folder}: {len(names)} files, all sound ({len(wanted)} fetched now)")

if __name__ == "__main__":
    sys.exit(run(main))
