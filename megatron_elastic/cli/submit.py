"""`megatron-elastic submit`: the jobs of a run, handed to SLURM."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, such as recipes/nemotron_nano_v2_12b.yaml.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE | @FILE]...", help="Values that replace the recipe's; @FILE reads them from a file."),
    ] = None,
    *,
    cluster: Annotated[str, typer.Option(metavar="NAME|FILE", help="A name in slurm/clusters/, or a YAML file.")],
    nodes: Annotated[int, typer.Option(help="Nodes of the jobs with a rank on every GPU.")],
    pipeline: Annotated[
        bool, typer.Option("--pipeline", help="Also rank and sort the parent before, and extract and verify the members after.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be written and submitted, and do neither.")] = False,
) -> None:
    """Submit a run to SLURM: stage 1, then stage 2, as jobs of which each waits for the one before.

    What `validate --cluster` refuses is refused here. The code, the resolved recipe, the cluster and the jobs' scripts are kept in
    RUN/submitted/NUMBER, which is all that the jobs read. A job that is told to stop saves the run and goes back to the queue by itself.

    \b
    Examples:
      megatron-elastic submit recipes/nemotron_nano_v2_12b.yaml --cluster h100 --nodes 8 --dry-run
      megatron-elastic submit recipes/nemotron_nano_v2_12b.yaml --cluster my_cluster.yaml --nodes 8 --pipeline
    """
    from megatron_elastic.cluster import load_cluster
    from megatron_elastic.cluster_checks import check_run, refusals
    from megatron_elastic.config import load_recipe
    from megatron_elastic.errors import ConfigError, raise_all
    from megatron_elastic.submit import describe, plan_submission, submit

    loaded, found = load_recipe(recipe, overrides or ()), load_cluster(cluster)
    raise_all(ConfigError, refusals(check_run(loaded, found, nodes)), f"{recipe} --cluster {cluster} --nodes {nodes}")
    planned = plan_submission(loaded, found, nodes, pipeline=pipeline)
    if dry_run:
        typer.echo(describe(planned, loaded, found))
        return
    for name, number in submit(planned):
        typer.echo(f"{name}: job {number}")
    typer.echo(f"frozen in {planned.directory}; logs in {planned.run_dir / 'logs'}")
