"""Learns the demo's vocabulary from every sixteenth file of its text; this takes eight minutes:

    python records/demo/vocabulary.py > data/python.tiktoken

Each line is a token in base64, in the order in which pairs were merged.
"""

import base64
import sys
from pathlib import Path

import torch
from tiktoken._educational import bpe_train
from tiktoken_ext.openai_public import r50k_pat_str

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.tokenize_text import find_files, parse
from data.vocab import PythonTokenizer
from records.tools.launch import DEMO_TEXT

args = parse([str(Path(torch.__file__).parent), *DEMO_TEXT.split(), "--tokenizer=bytes",
              "--out=.", "--name=demo"])
files = find_files(args.inputs, args.glob, args.exclude)
text = "".join(path.read_text(encoding="utf-8") for path in files[::16])
for token in bpe_train(text, PythonTokenizer.eot, r50k_pat_str, visualise=None):
    print(base64.b64encode(token).decode())
