"""The files this package writes, the version of each format, and the one check that every reader makes.

A version goes up when a reader of the version before would misread the file. An older version is read as long as `also_read` names it;
every other one is refused. CHANGELOG.md names each change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_elastic.errors import CheckpointError, ConfigError, DataError, ElasticError, PlanError

FORMAT_VERSION = "format_version"
"""The key of the version in every file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """One kind of file.

    version: what is written. also_read: older versions that are still read; None among them: files from before there was a version.
    error: the kind of error for any other. remedy: what its user should do then.
    """

    version: int
    also_read: tuple[int | None, ...] = ()
    error: type[ElasticError] = CheckpointError
    remedy: str = "write it again with this release"

    @property
    def stamp(self) -> dict[str, int]:
        """The entry that a writer puts first."""
        return {FORMAT_VERSION: self.version}

    def check(self, data: Mapping[str, Any], where: str) -> None:
        """Raise `error` when `data` is of a version that is not read; `where` names the file in the message."""
        found = data.get(FORMAT_VERSION)
        if isinstance(found, bool) or found not in (self.version, *self.also_read):
            known = " or ".join(str(version) for version in (*self.also_read, self.version) if version is not None)
            raise self.error(f"{where}: {FORMAT_VERSION} {found!r} is not {known}; {self.remedy}")


RECIPE = FileFormat(version=1, error=ConfigError, remedy="set it to 1")
"""A recipe, and recipe.yaml in a run."""
CLUSTER = FileFormat(version=1, error=ConfigError, remedy="set it to 1")
"""A description of a cluster (slurm/clusters/*.yaml)."""
PLAN = FileFormat(version=2, also_read=(1,), error=PlanError)
"""A plan, by itself and inside other files. Version 2 knows per-layer widths; version 1 had one integer an axis."""
DATA = FileFormat(version=1, error=DataError, remedy="write the directory again with this release")
"""data.json in a data directory."""
CHECKPOINT = FileFormat(version=1)
"""megatron_elastic.json in a checkpoint; the files beside it are megatron-core's."""
METRICS = FileFormat(version=1, also_read=(None,), remedy="read the run with the release that trained it")
"""Every row of metrics.jsonl in a run."""
VERSIONS = FileFormat(version=1, also_read=(None,), remedy="remove it to go on without versions")
"""versions.json in a run: package -> version."""
HEARTBEAT = FileFormat(version=1)
"""heartbeat.json in a run: where it stands, and when it said so."""
FAMILY = FileFormat(version=1)
"""family.json in a run: budget -> plan, cost, target."""
NESTED = FileFormat(version=1, remedy="export the family again with this release")
"""elastic.json beside the weights of a parent in a Hugging Face directory: its axes and its budgets' plans."""
RANKING = FileFormat(version=1, remedy="rank the model again with this release")
"""The metadata of a ranking: a safetensors file of scores."""
SORTED = FileFormat(version=1, remedy="sort the model again with this release")
"""sorted.json beside the weights of a sorted model in a Hugging Face directory."""
ORIGIN = FileFormat(version=1, remedy="import the model again with this release")
"""origin.json among the assets of an imported model: its name and its licence."""
VERIFY = FileFormat(version=2, also_read=(1,), remedy="run `megatron-elastic verify` on the run again")
"""verify.json in a run. Version 2 has what every reader found of a budget; version 1 had one, and not whether it agreed."""
EVAL = FileFormat(version=1)
"""What `megatron-elastic eval --json` writes."""
REPORT = FileFormat(version=2)
"""report.json beside a report. Version 2 has the widths of every plan, and plots in a directory of their own."""
