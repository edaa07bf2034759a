"""`doctor`: every package is named with its version or with what it costs, and torch is asked where there is one.

Run: pytest tests/cli/test_doctor.py
"""

from __future__ import annotations

from importlib.metadata import version

import typer
from typer.testing import CliRunner

from megatron_elastic import environment, packages
from megatron_elastic.cli.doctor import command


def test_the_table_names_everything():
    app = typer.Typer()
    app.command()(command)
    lines = {line.split("  ")[0]: line for line in CliRunner().invoke(app).output.splitlines()}
    assert {"python", "sbatch", "torch", "CUDA", "NCCL", "gloo", "CPUs", "memory", "disk here", *packages.COSTS} <= set(lines)
    assert version("torch") in lines["torch"] and version("megatron-core") in lines["megatron-core"]
    missing = [name for name, found in packages.installed_versions().items() if found is None]
    assert missing and all(packages.COSTS[name] in lines[name] for name in missing)


def test_what_is_missing_or_unsupported_is_said(monkeypatch):
    monkeypatch.setattr(environment, "installed_versions", lambda: dict.fromkeys(packages.COSTS) | {"megatron-core": "0.15.0"})
    monkeypatch.setattr(environment, "version_of", lambda package: None)
    facts = {fact.name: fact for fact in environment.environment()}
    assert facts["megatron-core"].found == "0.15.0" and "0.15.0 is not supported; install" in facts["megatron-core"].note
    assert (facts["torch"].found, facts["torch"].note) == ("-", "nothing trains, ranks or extracts") and "CUDA" not in facts
