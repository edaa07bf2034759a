"""`megatron-elastic doctor`: what this machine has for a run."""

from __future__ import annotations


def command() -> None:
    """Print the environment: versions, GPUs, communication, memory, disk, and what each missing package costs.

    Imports torch, if there is one, to ask it for GPUs. Run it in a job's container to see what jobs have.

    \b
    Example:
      megatron-elastic doctor
    """
    from rich.markup import escape
    from rich.table import Table

    from megatron_elastic.cli.show import print_table
    from megatron_elastic.environment import environment

    table = Table("what", "found", "what is missing without it, or wrong with it", box=None, pad_edge=False)
    for fact in environment():
        table.add_row(escape(fact.name), escape(fact.found), escape(fact.note))
    print_table(table)
