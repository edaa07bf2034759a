"""What an image holds: versions against the pins, imports, one elastic step. Exit code 0: what the target promises is there and works.

One line for each package; a missing one says what it costs. On the GPU target imports and the step need a GPU: without one, as while the
image is built, only versions are compared, and the last line says so.

Run in an image, or in any environment: python docker/check_image.py cpu|gpu
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_elastic.packages import COSTS, version_of

ROOT = Path(__file__).resolve().parents[1]
MODULES = {
    "megatron-core": "megatron.core",
    "transformer-engine": "transformer_engine.pytorch",
    "apex": "apex",
    "mamba-ssm": "mamba_ssm",
    "causal-conv1d": "causal_conv1d",
    "nvidia-modelopt": "modelopt",
    "deepspeed": "deepspeed",
}
"""Package of `COSTS` -> what is imported to see that it works."""
PROMISED = {"cpu": ("megatron-core",), "gpu": tuple(MODULES)}
"""Target -> packages without which the image is not what it says."""
TOKENS, WORDS = 24, 256
"""Of the step's text: tokens of a sample, different words."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the report. failed: whether the image does not hold what it promises."""

    verdict: str
    what: str
    failed: bool = False


def main(arguments: list[str]) -> int:
    """Print the report and return the exit code: 0 all there, 1 something is not, 2 no such target."""
    if len(arguments) != 1 or arguments[0] not in PROMISED:
        print(f"usage: check_image.py {'|'.join(PROMISED)}", file=sys.stderr)
        return 2
    (target,) = arguments
    if target == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # this image promises nothing of a GPU, even where it sees one
    failed = False
    for line in report(target):
        print(f"{line.verdict:8}  {line.what}", flush=True)
        failed = failed or line.failed
    return int(failed)


def report(target: str) -> Iterator[Line]:
    """Every line, as it is found."""
    import torch

    if target == "gpu" and not torch.cuda.is_available():
        yield from packages(target, imports=False)
        yield Line("left out", "imports and the step: no GPU here; run this again on one")
        return
    from megatron_elastic.platform import prepare_platform

    prepare_platform()
    warnings.simplefilter("ignore")  # what a package misses is a line here, not a warning of each of its modules
    yield from packages(target, imports=True)
    yield from step(torch.bfloat16 if target == "gpu" else torch.float32)


def packages(target: str, *, imports: bool) -> Iterator[Line]:
    """A line for torch and for each package: whether it is there, in the pinned version, and can be imported."""
    pinned = pins(target)
    for name, cost in {"torch": "nothing trains, ranks or extracts", **COSTS}.items():
        promised, found = name == "torch" or name in PROMISED[target], version_of(name)
        wanted = pinned.get(name)
        if found is None:
            yield Line("missing", f"{name}: {cost}", promised)
        elif wanted is not None and found.partition("+")[0] != wanted:
            yield Line("differs", f"{name} {found}, pinned {wanted}", promised)
        elif imports and (error := import_error(MODULES.get(name, name))):
            yield Line("broken", f"{name} {found}: {error}", promised)
        else:
            yield Line("ok", f"{name} {found}")


def pins(target: str) -> dict[str, str]:
    """Package -> exact version, from the pin files of the target; what stays the base image's is not among them."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}.txt"
    text = "\n".join(
        (ROOT / "requirements" / name).read_text(encoding="utf-8") for name in ((python, "gpu.txt") if target == "gpu" else (python,))
    )
    found = dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^;\s]+)", text, flags=re.MULTILINE))
    return {name: version for name, version in found.items() if target == "cpu" or name != "torch"}


def import_error(module: str) -> str:
    """Why a module cannot be imported, in one line; empty when it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - a broken package may raise anything, and the report names it
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def step(params_dtype: Any) -> Iterator[Line]:
    """A tiny hybrid family on the device, and of the layers, that a run would take (Transformer Engine's in bf16): its full budget is the parent, and a step of the smallest plan lowers that plan's loss."""
    import torch

    from megatron_elastic import ParallelContext, build_model, elasticize, load_recipe

    recipe = load_recipe(ROOT / "recipes" / "demo_hybrid.yaml")
    space = recipe.space
    assert space is not None
    parallel = ParallelContext.initialize()
    device = parallel.device
    try:
        model = build_model(recipe.model, parallel, params_dtype=params_dtype)
        whole = float(loss(model, device))
        handle = elasticize(model, space, parallel, recipe.model)
        with handle.use(space.parent):
            full = float(loss(model, device))
        smallest = space.plan({spec.axis: spec.choices[-1] for spec in space.axes})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with handle.use(smallest):
            before = loss(model, device)
            before.backward()
            optimizer.step()
            after = float(loss(model, device))
    finally:
        parallel.destroy()
    same, learnt = full == whole, after < float(before)
    yield Line("ok" if same else "broken", f"the full budget is the parent: loss {full:.6f} and {whole:.6f}", not same)
    yield Line(
        "ok" if learnt else "broken", f"a step of the smallest plan on {device.type}: loss {float(before):.4f} to {after:.4f}", not learnt
    )


def loss(model: Any, device: Any) -> Any:
    """Cross-entropy of a fixed text, 0-d."""
    import torch

    text = torch.randint(0, WORDS, (2, TOKENS + 1), generator=torch.Generator().manual_seed(1)).to(device)
    positions = torch.arange(TOKENS, device=device)[None].expand(2, -1)
    return model(text[:, :-1], positions, None, labels=text[:, 1:]).float().mean()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
