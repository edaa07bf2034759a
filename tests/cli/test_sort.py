"""`megatron-elastic sort` writes a model that computes the same and says how it was sorted, in either format; what it must not sort it refuses.

Run: pytest tests/cli/test_sort.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.checkpoint import NamedTensors, open_checkpoint, write_named
from megatron_elastic.checkpoint.files import RANKING_FILE, kept_with
from megatron_elastic.config import load_recipe, to_plain
from megatron_elastic.export.sources import open_source
from megatron_elastic.platform import prepare_platform
from megatron_elastic.space import build_space

prepare_platform()
from megatron_elastic.importance import sort  # noqa: E402
from megatron_elastic.importance.dealing import permutations  # noqa: E402
from megatron_elastic.importance.ranking import fingerprint_of, read_ranking, write_ranking  # noqa: E402
from megatron_elastic.importance.sort import SORTED, permute, read_record, sorted_record, unsorted_axes  # noqa: E402
from megatron_elastic.testing.tiny import tiny_dense, tiny_moe, tiny_shape  # noqa: E402
from tests.elastic.family import tiny_space  # noqa: E402
from tests.export.pretrained import contents, family_shapes, same, weights_of, write_pretrained  # noqa: E402
from tests.importance.rankings import random_ranking, random_tensors  # noqa: E402
from tests.train import harness  # noqa: E402
from tests.train.harness import RECIPE, command, in_new_process  # noqa: E402

A = ElasticAxis


def refusal(*arguments: object) -> str:
    """The one line of a command that fails as it should."""
    code, _, err = in_new_process(command, *map(str, arguments))
    assert code == 2 and err.startswith("error: ") and "Traceback" not in err and err.count("\n") == 1, err
    return err.removeprefix("error: ").strip()


def run(*arguments: object) -> str:
    """What a command prints."""
    code, out, err = in_new_process(command, *map(str, arguments))
    assert code == 0, err
    return out


def write_model(directory: Path, shape: Any, seed: int = 0, **description: Any) -> Path:
    """A megatron checkpoint with weights moved off their start, and a ranking of it beside it."""
    tensors = random_tensors(shape, seed)
    write_named(directory, tensors.items(), shape, **description)
    write_ranking(directory.parent / f"{directory.name}.ranking", random_ranking(shape, fingerprint=fingerprint_of(tensors, shape)))
    return directory


def write_recipe(file: Path, shape: Any, **elastic: Any) -> Path:
    """A recipe of a family: hidden, ffn and layers are elastic, unless it says otherwise."""
    block = {
        "axes": {"hidden": [40, 20], "ffn": [72, 36], "layers": [4, 3]},
        "budgets": {"full": 1.0},
        "shard_groups": 4,
        "drop_order": [1],
    }
    model = {key: value for key, value in to_plain(shape).items() if value is not None}
    file.write_text(yaml.safe_dump({"format_version": 1, "model": model, "elastic": {**block, **elastic}}), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def dense(tmp_path_factory: Any) -> Path:
    """A dense model; beside it its ranking and a recipe."""
    root = tmp_path_factory.mktemp("models")
    write_recipe(root / "recipe.yaml", tiny_dense())
    return write_model(root / "dense", tiny_dense(), provenance={"parent": "somebody/dense", "license": "mit"})


def options(model: Path, **changes: object) -> list[object]:
    """PATH --ranking FILE --recipe FILE with changes (None leaves an option out)."""
    wanted = {"ranking": model.parent / f"{model.name}.ranking", "recipe": model.parent / "recipe.yaml"} | changes
    return ["sort", model, *(part for key, value in wanted.items() if value is not None for part in (f"--{key}", value))]


def expected(shape: Any, space: Any) -> Mapping[str, Tensor]:
    """The tensors of `write_model`, sorted."""
    return dict(permute(random_tensors(shape), shape, permutations(random_ranking(shape), space)))


def test_a_checkpoint_sorted_by_its_recipe(dense: Path, tmp_path: Path) -> None:
    out = run(*options(dense, out=tmp_path / "sorted"))
    shape = tiny_dense()
    space = build_space(shape, {A.HIDDEN: (40, 20), A.FFN: (72, 36), A.LAYERS: (4, 3)}, shard_groups=4, drop_order=(1,))
    ranking = random_ranking(shape, fingerprint=fingerprint_of(random_tensors(shape), shape))
    info, found = open_checkpoint(tmp_path / "sorted"), dict(NamedTensors(tmp_path / "sorted"))
    assert same(found, expected(shape, space)) and info.shape == shape and info.space is None
    assert not same(found, random_tensors(shape))
    assert info.provenance[SORTED] == sorted_record(ranking, space) and unsorted_axes(space, info.provenance) == ()
    assert read_ranking(tmp_path / "sorted" / RANKING_FILE).fingerprint == ranking.fingerprint
    assert info.provenance["extracted_from"] == str(dense) and info.provenance["license"] == "mit"
    first, second = out.splitlines()
    assert first.startswith(f"{tmp_path / 'sorted'}: sorted hidden, ffn over 4 groups; logits of up to ")
    assert float(first.rsplit(" ", 1)[1]) <= 1e-5
    assert second == f"layers stay in place; drop them in this order: elastic.drop_order={info.provenance[SORTED]['drop_order']}"
    assert [path.name for path in tmp_path.iterdir()] == ["sorted"]


@pytest.mark.parametrize("shape", [tiny_shape(), tiny_moe(), tiny_moe(score="softmax")], ids=["hybrid", "sigmoid", "softmax"])
def test_every_axis_with_the_default_groups(shape: Any, tmp_path: Path) -> None:
    out = run(*options(write_model(tmp_path / "model", shape), recipe=None, out=tmp_path / "sorted"))
    groups = open_checkpoint(tmp_path / "sorted").provenance[SORTED]["groups"]
    assert set(groups) == {axis.value for axis in random_ranking(shape).scores} - {"layers"} and groups["moe_ffn"] == 8
    assert float(out.splitlines()[0].rsplit(" ", 1)[1]) <= 1e-5
    assert not same(dict(NamedTensors(tmp_path / "sorted")), random_tensors(shape))


def test_a_parent_of_a_run_is_sorted_over_the_groups_of_its_family(tmp_path: Path) -> None:
    """A stage without elasticity saves its family's space, but no plans yet."""
    shape = tiny_shape()
    space = tiny_space(shape)
    model = write_model(tmp_path / "stage-parent", shape, space=space)
    run(*options(model, recipe=None, out=tmp_path / "sorted"))
    assert same(dict(NamedTensors(tmp_path / "sorted")), expected(shape, space))
    model = write_model(tmp_path / "family", shape, space=space, plans={"full": space.parent})
    message = refusal(*options(model, recipe=None, out=tmp_path / "out"))
    assert (
        message
        == f"checkpoint '{model}' holds a trained family, whose plans name components by their place; sort its parent, and train that"
    )


@pytest.fixture(scope="module")
def hub(tmp_path_factory: Any) -> Path:
    """A model as somebody else published it, and its ranking."""
    root = tmp_path_factory.mktemp("hub")
    write_pretrained(root / "Dense-1B", family_shapes()["qwen2"], dtype=torch.bfloat16)
    source = open_source(root / "Dense-1B")
    write_ranking(root / "Dense-1B.ranking", random_ranking(source.shape, fingerprint=fingerprint_of(source.tensors, source.shape)))
    return root / "Dense-1B"


@pytest.mark.parametrize("format", ["hf", "megatron"])
def test_a_hugging_face_directory(format: str, hub: Path, tmp_path: Path) -> None:
    before = contents(hub)
    run(*options(hub, recipe=None, out=tmp_path / "sorted", format=format))
    source, found = open_source(hub), open_source(tmp_path / "sorted")
    assert set(found.dtypes.values()) == {torch.bfloat16} and contents(hub) == before
    ranking = random_ranking(source.shape, fingerprint=fingerprint_of(source.tensors, source.shape))
    record = read_record(tmp_path / "sorted") if format == "hf" else found.provenance[SORTED]
    assert record is not None and record["ranking"] == ranking.fingerprint and record["groups"]["ffn"] == 8
    assert (tmp_path / "sorted" / RANKING_FILE).exists() == (format == "megatron")
    space = build_space(
        source.shape, {axis: (width,) for axis, width in (source.space or tiny_space(source.shape)).parent.widths if isinstance(width, int)}
    )
    wanted = permute(source.tensors, source.shape, permutations(ranking, space))
    assert same(dict(found.tensors), dict(wanted)) and found.assets is not None and (found.assets / "tokenizer.json").is_file()
    message = refusal(
        *options(tmp_path / "sorted", ranking=hub.parent / "Dense-1B.ranking", recipe=None, out=tmp_path / "again", format=format)
    )
    assert "is sorted by this ranking already; use it as it is" in message
    if format == "hf":
        assert weights_of(tmp_path / "sorted").keys() == weights_of(hub).keys()


def test_the_ranking_of_an_import_is_that_of_its_source(hub: Path, tmp_path: Path) -> None:
    """Both have the same weights, so one ranking fits both and gives the same model."""
    run("import", hub, "--out", tmp_path / "ours", "--padded-vocab-size", 136)
    run(*options(tmp_path / "ours", ranking=hub.parent / "Dense-1B.ranking", recipe=None, out=tmp_path / "a"))
    run(*options(hub, recipe=None, out=tmp_path / "b"))
    a, b = dict(NamedTensors(tmp_path / "a")), dict(NamedTensors(tmp_path / "b"))
    assert same({name: tensor[:131] if tensor.shape[0] == 136 else tensor for name, tensor in a.items()}, b)


def test_a_run_takes_the_ranking_of_its_parent_over_and_reports_it(tmp_path: Path) -> None:
    data = in_new_process(harness.write_data, tmp_path / "text")
    model = write_model(tmp_path / "model", load_recipe(RECIPE).model)
    run(*options(model, recipe=RECIPE, out=tmp_path / "sorted"))
    start = ("train", RECIPE, "--steps", 1, f"data.path={data}", f"parent={tmp_path / 'sorted'}", "stages.parent=null")
    said = run(*start, f"run_dir={tmp_path / 'run'}")
    assert "are not sorted by importance" not in said and f"started from the parent {tmp_path / 'sorted'}" in said
    kept = tmp_path / "run" / RANKING_FILE
    assert kept.read_bytes() == (tmp_path / "sorted" / RANKING_FILE).read_bytes()
    shown = run("report", tmp_path / "run").splitlines()
    assert {f"wrote {tmp_path / 'run'}/report/plots/{name}.png" for name in ("importance", "importance_experts")} <= set(shown)
    # What starts from a checkpoint of that run has the same parent's importance; where there is none, nothing is made up.
    again = tmp_path / "run" / "checkpoints" / "stage-long"
    assert kept_with(again, RANKING_FILE) == kept.resolve() and kept_with(model, RANKING_FILE) is None


def test_a_sorted_model_is_not_sorted_by_the_ranking_of_what_it_was(dense: Path, tmp_path: Path) -> None:
    run(*options(dense, out=tmp_path / "sorted"))
    again = options(
        tmp_path / "sorted", ranking=dense.parent / "dense.ranking", recipe=dense.parent / "recipe.yaml", out=tmp_path / "again"
    )
    assert refusal(*again) == f"checkpoint '{tmp_path / 'sorted'}' is sorted by this ranking already; use it as it is"
    tensors = random_tensors(tiny_dense())
    older = random_ranking(tiny_dense(), seed=5, fingerprint=fingerprint_of(tensors, tiny_dense()))
    write_ranking(tmp_path / "older.ranking", older)
    again[3] = tmp_path / "older.ranking"
    assert refusal(*again) == f"ranking '{tmp_path / 'older.ranking'}' is of other weights (somewhere); rank this model and use that file"
    # One of the sorted model itself is used, and its record replaces the other.
    newer = replace(older, provenance={"model": {"fingerprint": fingerprint_of(NamedTensors(tmp_path / "sorted"), tiny_dense())}})
    write_ranking(tmp_path / "newer.ranking", newer)
    again[3] = tmp_path / "newer.ranking"
    run(*again)
    assert open_checkpoint(tmp_path / "again").provenance[SORTED]["ranking"] == newer.fingerprint


def test_bad_input_is_one_line(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    assert refusal(*options(dense, out=tmp_path / "taken")) == f"--out '{tmp_path / 'taken'}' exists; choose another path or delete it"
    out = tmp_path / "out"
    assert "no ranking at" in refusal(*options(dense, ranking=tmp_path / "none", out=out))
    assert "does not exist; give a run" in refusal(*options(dense, out=out)[:1], tmp_path / "nothing", *options(dense, out=out)[2:])
    other = write_model(tmp_path / "other", tiny_dense(), seed=4)
    ranking = dense.parent / "dense.ranking"
    assert "is of other weights (somewhere); rank this model" in refusal(*options(other, ranking=ranking, recipe=None, out=out))
    hybrid = write_model(tmp_path / "hybrid", tiny_shape())
    assert "is of another model: model." in refusal(*options(hybrid, ranking=ranking, recipe=None, out=out))
    assert "is not of checkpoint" in refusal(*options(hybrid, recipe=dense.parent / "recipe.yaml", out=out))
    plain = write_recipe(tmp_path / "plain.yaml", tiny_dense())
    content = yaml.safe_load(plain.read_text(encoding="utf-8"))
    del content["elastic"]
    plain.write_text(yaml.safe_dump(content), encoding="utf-8")
    assert "has no elastic block, which names the axes and their groups; add one" in refusal(*options(dense, recipe=plain, out=out))
    assert not out.exists()


def test_an_axis_that_is_not_ranked(dense: Path, tmp_path: Path) -> None:
    full = random_ranking(tiny_dense(), fingerprint=fingerprint_of(NamedTensors(dense), tiny_dense()))
    write_ranking(
        tmp_path / "few", replace(full, scores={axis: rows for axis, rows in full.scores.items() if axis in (A.HIDDEN, A.LAYERS)})
    )
    message = refusal(*options(dense, ranking=tmp_path / "few", out=tmp_path / "out"))
    assert message == "ranking: axis 'ffn' is elastic, but the ranking does not score it; rank it, too, or remove the axis"
    assert "sorted hidden; logits of up to " in run(*options(dense, ranking=tmp_path / "few", recipe=None, out=tmp_path / "out"))


def test_default_groups_that_do_not_divide_ask_for_a_recipe(tmp_path: Path) -> None:
    shape = tiny_dense()
    assert shape.mlp is not None
    shape = replace(shape, mlp=replace(shape.mlp, ffn=70))
    model = write_model(tmp_path / "odd", shape)
    message = refusal(*options(model, recipe=None, out=tmp_path / "out"))
    assert (
        message.startswith(f"checkpoint '{model}' needs groups of its own, give --recipe: ")
        and "choice 70 is not a multiple of its 8 groups" in message
    )


def wrong_command(*arguments: str) -> tuple[int, str, str]:
    """`command` in a process whose sort forgets one parameter."""

    def wrong(tensors: Mapping[str, Tensor], shape: Any, orders: Any) -> Mapping[str, Tensor]:
        moved = dict(permute(tensors, shape, orders))
        return {**moved, "decoder.layers.1.mlp.linear_fc2.weight": tensors["decoder.layers.1.mlp.linear_fc2.weight"]}

    sort.permute = wrong  # type: ignore[assignment]
    return command(*arguments)


@pytest.mark.parametrize("format", ["hf", "megatron"])
def test_a_sort_that_changes_the_model_leaves_nothing(format: str, hub: Path, tmp_path: Path) -> None:
    code, _, err = in_new_process(wrong_command, *map(str, options(hub, recipe=None, out=tmp_path / "sorted", format=format)))
    assert code == 2 and "would change its logits by " in err and "nothing was written, please report this" in err
    assert list(tmp_path.iterdir()) == []
