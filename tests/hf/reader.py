"""A script of its own: transformers reads directories, without code of theirs, and gives logits. It must not find this project.

Run: python -I reader.py IN.pt OUT.pt, where IN.pt holds {directory: tokens [batch, length]} and OUT.pt will hold {directory: logits}.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch
import transformers


def logits_of(directory: str, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the model in a directory, in fp32, every weight of which is in the files and used."""
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True, dtype=torch.float32, trust_remote_code=False
    )
    model, info = loaded
    assert not any(info.values()), f"{directory}: {info}"
    with torch.no_grad():
        return model.eval()(tokens, use_cache=False).logits


def main() -> None:
    """Read, load, compute."""
    assert importlib.util.find_spec("megatron_elastic") is None, "the reader must not depend on this project"
    torch.save({directory: logits_of(directory, tokens) for directory, tokens in torch.load(sys.argv[1]).items()}, sys.argv[2])


if __name__ == "__main__":
    main()
