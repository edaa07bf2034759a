"""Every file says its format's version, its reader refuses every other by name and says what to do, and no writer is left out.

Run: pytest tests/test_format_versions.py
"""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from megatron_elastic import formats
from megatron_elastic.axes import ElasticAxis, SubmodelPlan
from megatron_elastic.checkpoint.files import CheckpointKind, Description, new_checkpoint, open_checkpoint
from megatron_elastic.cli.extract import read_plan
from megatron_elastic.cluster import CLUSTERS, load_cluster
from megatron_elastic.config import decode_recipe, load_recipe
from megatron_elastic.corpus.info import open_data
from megatron_elastic.errors import ElasticError
from megatron_elastic.formats import FileFormat
from megatron_elastic.platform import prepare_platform
from megatron_elastic.recipe_files import read_yaml
from megatron_elastic.report.record import read_run
from megatron_elastic.testing.tiny import tiny_shape
from megatron_elastic.watchdog import write_heartbeat
from tests.report import synthetic_run
from tests.train.harness import RECIPE, write_data

PACKAGE = Path(formats.__file__).parent


def write_recipe_and_versions(directory: Path) -> None:
    """What a run writes first."""
    prepare_platform()
    from megatron_elastic.train.loop import _keep_recipe

    recipe = decode_recipe(read_yaml(RECIPE), "tiny.yaml")
    _keep_recipe(SimpleNamespace(parallel=SimpleNamespace(is_main=True), directory=directory, recipe=recipe))  # type: ignore[arg-type]


def write_recipe(directory: Path) -> Path:
    write_recipe_and_versions(directory)
    return directory / "recipe.yaml"


def write_cluster(directory: Path) -> Path:
    return Path(shutil.copy(CLUSTERS / "cpu.yaml", directory))


def write_plan(directory: Path) -> Path:
    (directory / "plan.json").write_text(json.dumps(SubmodelPlan.of({ElasticAxis.HIDDEN: 8}).to_dict()))
    return directory / "plan.json"


def write_checkpoint(directory: Path) -> Path:
    with new_checkpoint(directory / "checkpoint", Description(kind=CheckpointKind.MODEL, shape=tiny_shape())):
        pass
    return directory / "checkpoint" / "megatron_elastic.json"


def write_text(directory: Path) -> Path:
    prepare_platform()
    return write_data(directory) / "data.json"


def write_metrics(directory: Path) -> Path:
    prepare_platform()
    from megatron_elastic.train.callbacks import Record

    stage = SimpleNamespace(name="parent", global_batch_size=1, sequence_length=1, total_steps=1)
    recipe = SimpleNamespace(log=SimpleNamespace(tensorboard=False), stages=[stage])
    run: Any = SimpleNamespace(parallel=SimpleNamespace(is_main=True), directory=directory, recipe=recipe, stage=stage, stage_index=0)
    Record(run).write("eval", run, 0, {"loss": {"parent": 1.0}})
    return directory / "metrics.jsonl"


def write_versions(directory: Path) -> Path:
    write_recipe_and_versions(directory)
    return directory / "versions.json"


def write_the_heartbeat(directory: Path) -> Path:
    write_heartbeat(directory, "parent", 3, 96)
    return directory / "heartbeat.json"


def write_family(directory: Path) -> Path:
    prepare_platform()
    from megatron_elastic.train.loop import write_family

    recipe: Any = SimpleNamespace(elastic=SimpleNamespace(cost="total_params"))
    write_family(directory / "family.json", {}, {}, {}, recipe)
    return directory / "family.json"


def write_elastic(directory: Path) -> Path:
    prepare_platform()
    from megatron_elastic.export.nested import Nested, write_nested
    from tests.elastic.family import tiny_space

    space = tiny_space(tiny_shape())
    write_nested(directory, Nested(space, {"full": space.parent}, {"parent": "mine", "license": None, "data": None}))
    return directory / "elastic.json"


def write_origin(directory: Path) -> Path:
    prepare_platform()
    from megatron_elastic.hf.assets import Origin, save_assets

    (directory / "config.json").write_text("{}")
    save_assets(directory, Origin("mine", None), directory / "assets")
    return directory / "assets" / "origin.json"


def read_elastic(file: Path) -> None:
    from megatron_elastic.export.nested import read_nested

    read_nested(file.parent, tiny_shape())


def read_its_origin(file: Path) -> None:
    from megatron_elastic.hf.assets import read_origin

    read_origin(file.parent)


def write_its_ranking(directory: Path) -> Path:
    prepare_platform()
    from megatron_elastic.importance.ranking import write_ranking
    from tests.importance.rankings import random_ranking

    write_ranking(directory / "mine.ranking", random_ranking(tiny_shape()))
    return directory / "mine.ranking"


def read_its_ranking(file: Path) -> None:
    from megatron_elastic.importance.ranking import read_ranking

    read_ranking(file)


def ranking_content(file: Path) -> dict[str, Any]:
    """The JSON in the metadata of a ranking."""
    from safetensors import safe_open

    with safe_open(file, "pt") as stored:
        return json.loads(stored.metadata()["ranking"])


def change_ranking(file: Path, content: dict[str, Any]) -> None:
    """Write a ranking's own scores with other JSON."""
    from safetensors.torch import load_file, save_file

    save_file(load_file(file), file, {"ranking": json.dumps(content)})


def write_sorted(directory: Path) -> Path:
    from megatron_elastic.importance.sort import write_record

    write_record(directory, {"ranking": "0", "criteria": {}, "groups": {}, "drop_order": []})
    return directory / "sorted.json"


def read_sorted(file: Path) -> None:
    from megatron_elastic.importance.sort import read_record

    read_record(file.parent)


def write_verify(directory: Path) -> Path:
    from megatron_elastic.cli.verify import write_agreements

    write_agreements(directory / "verify.json", "stage-long", {})
    return directory / "verify.json"


def write_eval(directory: Path) -> Path:
    prepare_platform()
    from megatron_elastic.export.evaluate import write_scores

    write_scores(directory / "eval.json", directory, 16, [])
    return directory / "eval.json"


def write_report(directory: Path) -> Path:
    from megatron_elastic.report.summary import report_data

    content = report_data(read_run(synthetic_run.write_run(directory / "of")), [], [], [], [])
    (directory / "report.json").write_text(json.dumps(content))
    return directory / "report.json"


def read_with_a_run(file: Path) -> None:
    """Read a whole run in which `file` stands."""
    run = file.parent / "run"
    shutil.rmtree(run, ignore_errors=True)
    synthetic_run.write_run(run)
    rows = (run / file.name).read_text() if file.suffix == ".jsonl" else ""  # a row among the others
    (run / file.name).write_text(rows + file.read_text())
    read_run(run)


def plain_content(file: Path) -> dict[str, Any]:
    """What is in a file; JSON is YAML, and so is a single row of a .jsonl."""
    return yaml.safe_load(file.read_text())


def change_plain(file: Path, content: dict[str, Any]) -> None:
    """Put something else into a file."""
    file.write_text(json.dumps(content))


@dataclass(frozen=True)
class Case:
    """One kind of file: its writer, its reader (None: nothing of ours reads it), and how the test sees and changes what is in it."""

    format: FileFormat
    write: Callable[[Path], Path]
    read: Callable[[Path], Any] | None
    content: Callable[[Path], dict[str, Any]] = plain_content
    change: Callable[[Path, dict[str, Any]], None] = change_plain


CASES = {
    "RECIPE": Case(formats.RECIPE, write_recipe, load_recipe),
    "CLUSTER": Case(formats.CLUSTER, write_cluster, lambda file: load_cluster(str(file))),
    "PLAN": Case(formats.PLAN, write_plan, read_plan),
    "DATA": Case(formats.DATA, write_text, lambda file: open_data(file.parent)),
    "CHECKPOINT": Case(formats.CHECKPOINT, write_checkpoint, lambda file: open_checkpoint(file.parent)),
    "METRICS": Case(formats.METRICS, write_metrics, read_with_a_run),
    "VERSIONS": Case(formats.VERSIONS, write_versions, read_with_a_run),
    "HEARTBEAT": Case(formats.HEARTBEAT, write_the_heartbeat, None),
    "FAMILY": Case(formats.FAMILY, write_family, None),
    "NESTED": Case(formats.NESTED, write_elastic, read_elastic),
    "ORIGIN": Case(formats.ORIGIN, write_origin, read_its_origin),
    "RANKING": Case(formats.RANKING, write_its_ranking, read_its_ranking, ranking_content, change_ranking),
    "SORTED": Case(formats.SORTED, write_sorted, read_sorted),
    "VERIFY": Case(formats.VERIFY, write_verify, read_with_a_run),
    "EVAL": Case(formats.EVAL, write_eval, None),
    "REPORT": Case(formats.REPORT, write_report, None),
}


def test_every_format_is_in_the_table() -> None:
    assert {name for name, value in vars(formats).items() if isinstance(value, FileFormat)} == set(CASES)


@pytest.mark.parametrize("kind", CASES)
def test_every_file_says_its_version(kind: str, tmp_path: Path) -> None:
    case = CASES[kind]
    assert case.content(case.write(tmp_path))["format_version"] == case.format.version


@pytest.mark.parametrize("kind", [kind for kind, case in CASES.items() if case.read is not None])
@pytest.mark.parametrize("version", [99, "1"])
def test_a_reader_refuses_every_other_version(kind: str, version: object, tmp_path: Path) -> None:
    case = CASES[kind]
    assert case.read is not None
    file = case.write(tmp_path)
    case.read(file)
    case.change(file, {**case.content(file), "format_version": version})
    with pytest.raises(case.format.error) as caught:
        case.read(file)
    assert re.search(rf"format_version {re.escape(repr(version))} is not [0-9 or]+; {re.escape(case.format.remedy)}", str(caught.value))
    assert kind == "PLAN" or str(file.name if kind not in ("CHECKPOINT", "DATA") else file.parent) in str(caught.value)


@pytest.mark.parametrize("kind", ["RECIPE", "CLUSTER", "PLAN", "DATA", "CHECKPOINT", "NESTED", "ORIGIN", "RANKING", "SORTED"])
def test_a_file_without_a_version_is_refused(kind: str, tmp_path: Path) -> None:
    case = CASES[kind]
    file = case.write(tmp_path)
    content = case.content(file)
    del content["format_version"]
    case.change(file, content)
    assert case.read is not None
    with pytest.raises(case.format.error, match="format_version None is not"):
        case.read(file)


def test_an_older_version_that_is_named_is_read() -> None:
    old = FileFormat(version=3, also_read=(None, 2), error=ElasticError, remedy="do it again")
    for data in ({"format_version": 3}, {"format_version": 2}, {}):
        old.check(data, "it")
    for other in (1, True, "3", 3.5):
        with pytest.raises(ElasticError, match=f"^it: format_version {other!r} is not 2 or 3; do it again$"):
            old.check({"format_version": other}, "it")
    with pytest.raises(ElasticError, match="format_version True is not 1"):
        FileFormat(version=1, error=ElasticError).check({"format_version": True}, "it")


def test_no_writer_is_left_out() -> None:
    """A module that writes plain data stamps it, or is known to write none of ours."""
    no_file_of_ours = {
        "router/sampling.py": "hashes it",
        "report/page.py": "shows it",
        "checkpoint/named.py": "megatron-core's index",
        "export/to_hugging_face.py": "transformers' config.json",
        "hf/card.py": "the header of a model card",
        "hf/write.py": "Hugging Face's index",
        "testing/pool.py": "sends it to a process",
        "packed_task.py": "sends it to a process",
        "launch.py": "a recipe, which says its own version",
        "submit.py": "a cluster, which says its own version",
    }
    unstamped = set()
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)}
        if calls & {"json.dump", "json.dumps", "yaml.dump", "yaml.safe_dump", "pickle.dump", "pickle.dumps"} and ".stamp" not in text:
            unstamped.add(file.relative_to(PACKAGE).as_posix())
    assert unstamped == {*no_file_of_ours, "cli/report.py"}  # report.summary.report_data makes report.json's content
