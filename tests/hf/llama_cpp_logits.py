"""Run by the interpreter of scripts/llama_cpp.py: FILE.gguf IDS.json TEXT. Prints llama.cpp's perplexity of the ids and its ids of the text as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from llama_cpp import Llama


def main() -> None:
    file, ids_file, text_file = sys.argv[1:]
    ids = json.loads(Path(ids_file).read_text())
    # Attention, keys and values in the precision llama.cpp has by default, one thread as the tests have.
    model = Llama(file, n_ctx=len(ids), n_batch=len(ids), logits_all=True, n_threads=1, n_threads_batch=1, verbose=False)
    model.eval(ids)
    logits = np.asarray(model.scores[: len(ids) - 1], dtype=np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    targets = logits[np.arange(len(ids) - 1), ids[1:]]
    loss = np.log(np.exp(logits).sum(axis=1)) - targets
    text = Path(text_file).read_bytes()
    print(json.dumps({"perplexity": float(np.exp(loss.mean())), "ids": model.tokenize(text, add_bos=False, special=False)}))


main()
