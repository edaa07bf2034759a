"""`megatron-elastic import`: a Hugging Face model becomes a megatron checkpoint and the beginning of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A Hugging Face directory (config.json, safetensors), or a GGUF file.")],
    out: Annotated[Path, typer.Option(help="Directory to write: checkpoints/parent, assets, recipe.yaml.")],
    padded_vocab_size: Annotated[
        int | None,
        typer.Option(help="Rows of the embedding: a number that every tensor parallelism divides. Default: the model's words."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything but the weights' values, print the model, keep nothing.")
    ] = False,
) -> None:
    """Read a pretrained model: Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, Mixtral or NemotronH.

    The weights keep their type. What the model's config says and this package does not support is refused by name.

    \b
    Examples:
      megatron-elastic import models/SmolLM2-135M --out runs/smollm2
      megatron-elastic import models/Qwen3-8B --out runs/qwen3-8b --padded-vocab-size 151936
    """
    from megatron_elastic.cli.show import counted
    from megatron_elastic.describe import summary
    from megatron_elastic.errors import CheckpointError
    from megatron_elastic.export.member import cut
    from megatron_elastic.export.to_megatron import import_model, importable

    if out.exists():
        raise CheckpointError(f"--out {str(out)!r} exists; choose another path or delete it")
    with importable(path, out, padded_vocab_size=padded_vocab_size) as source:
        member = cut(source, None)
        typer.echo(f"{path}: {summary(source.shape)}")
        if not dry_run:
            import_model(source, counted(member, f"importing {path.name}"), out)
            typer.echo(f"{out}: checkpoints/parent, assets, recipe.yaml")
