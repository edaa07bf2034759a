"""What several commands show: how far they have come with a model's tensors, and tables that are never cut."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_elastic.cli.progress import progress_bar
from megatron_elastic.layout import full_shapes

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from megatron_elastic.export.member import Member


def print_table(table: Table) -> None:
    """Print a table whole, also where the terminal is too narrow or there is none: a number that is cut is another number."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(highlight=False)
    needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    console.width = max(console.width, needed)
    console.print(table, soft_wrap=True)


def counted(member: Member, title: str) -> Member:
    """The same member; a bar shows which share of its weights has been read, and the time that is left."""
    total = sum(math.prod(size) for size in full_shapes(member.shape).values())

    def tensors() -> Iterator[tuple[str, Tensor]]:
        from rich.progress import TaskProgressColumn

        done = 0
        with progress_bar(title, TaskProgressColumn()) as progress:
            for name, tensor in member.tensors():
                yield name, tensor
                done += tensor.numel()
                del tensor  # it would be held while the next one is read
                progress(done, total)

    return replace(member, tensors=tensors)
