"""`megatron-elastic extract` writes what is asked for - a budget, a plan, a target, the whole model, in shards, with one width a layer - and says what
it wrote, on the screen and in a model card; options that do not fit are one line.

Run: pytest tests/cli/test_extract_command.py
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open

from megatron_elastic.axes import ElasticAxis, SubmodelPlan
from megatron_elastic.checkpoint import NamedTensors, open_checkpoint, write_named
from megatron_elastic.export.sources import open_source
from megatron_elastic.platform import prepare_platform
from megatron_elastic.shape import AttentionShape
from megatron_elastic.space import build_space, resize

prepare_platform()
from tests.elastic.family import staggered, tiny_space  # noqa: E402
from tests.export.pretrained import contents, family_shapes, same, weights_of, write_pretrained  # noqa: E402
from tests.export.random_family import write_family  # noqa: E402
from tests.train.harness import command  # noqa: E402

ELASTIC = {
    "axes": {"hidden": [80, 60, 40], "ffn": [72, 48, 24], "heads": [12, 8, 4], "layers": [4, 3]},
    "drop_order": [2],
    "budgets": {"full": 1.0, "medium": 0.6, "small": 0.3},
    "cost": "total_params",
}


def run(*arguments: object) -> str:
    """What a command prints."""
    code, out, err = command(*map(str, arguments))
    assert code == 0, err
    return out


def refusal(*arguments: object) -> str:
    """The one line of a command that fails as it should."""
    code, _, err = command(*map(str, arguments))
    assert code == 2 and err.startswith("error: ") and "Traceback" not in err and err.count("\n") == 1, err
    return err.removeprefix("error: ").strip()


@pytest.fixture(scope="module")
def dense(tmp_path_factory: Any) -> Path:
    """A dense model as somebody else published it; beside it an import of it, and a recipe that makes it a family."""
    root = tmp_path_factory.mktemp("hub")
    write_pretrained(root / "Dense-1B", family_shapes()["qwen2"])
    run("import", root / "Dense-1B", "--out", root / "ours")
    recipe = yaml.safe_load((root / "ours" / "recipe.yaml").read_text(encoding="utf-8")) | {"elastic": ELASTIC}
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return root / "Dense-1B"


@pytest.fixture(scope="module")
def recipe(dense: Path) -> Path:
    return dense.parent / "recipe.yaml"


def test_a_plain_model_with_a_recipe(dense: Path, recipe: Path, tmp_path: Path) -> None:
    """The same members from the directory and from its import, in both formats."""
    for name, source in (("theirs", dense), ("ours", dense.parent / "ours")):
        out = run("extract", source, "--recipe", recipe, "--format", "hf", "--out", tmp_path / name)
        assert [line.split()[1] for line in out.splitlines()] == ["full,", "medium,", "small,"]
    for budget in ("full", "medium", "small"):
        assert same(weights_of(tmp_path / "theirs" / budget), weights_of(tmp_path / "ours" / budget))
    assert same(weights_of(tmp_path / "theirs" / "full"), weights_of(dense))
    run("extract", dense, "--recipe", recipe, "--budget", "small", "--out", tmp_path / "megatron")
    run("extract", tmp_path / "megatron", "--format", "hf", "--out", tmp_path / "small")
    assert same(weights_of(tmp_path / "small"), weights_of(tmp_path / "theirs" / "small"))
    parameters = [sum(t.numel() for t in weights_of(tmp_path / "theirs" / name).values()) for name in ("full", "medium", "small")]
    assert parameters[1] == pytest.approx(0.6 * parameters[0], rel=0.02) and parameters[2] == pytest.approx(0.3 * parameters[0], rel=0.02)


def test_the_card(dense: Path, recipe: Path, tmp_path: Path) -> None:
    """It is the same however often a member has been written anew, but for the name."""
    run("extract", dense, "--recipe", recipe, "--budget", "small", "--format", "hf", "--out", tmp_path / "small")
    card = (tmp_path / "small" / "README.md").read_text(encoding="utf-8")
    header = yaml.safe_load(card.split("---")[1])
    assert (header["license"], header["base_model"], header["library_name"]) == ("apache-2.0", "Dense-1B", "transformers")
    plan = resize_of(dense, recipe, "small")
    assert f"| hidden | {plan.hidden_size} | 80 |" in card and "| layers dropped | 2 | none |" in card
    assert "- Budget: `small`" in card and "- Licence of the parent: apache-2.0" in card
    assert "- Trained on: nothing since; its weights are those of the parent" in card
    counts = [sum(t.numel() for t in weights_of(path).values()) for path in (tmp_path / "small", dense)]
    assert f"{counts[0]:,} parameters" in card and f"from `Dense-1B` ({counts[1]:,} parameters)" in card
    run("extract", dense, "--recipe", recipe, "--budget", "small", "--out", tmp_path / "megatron")
    run("extract", tmp_path / "megatron", "--format", "hf", "--out", tmp_path / "again" / "small")
    again = (tmp_path / "again" / "small" / "README.md").read_text(encoding="utf-8")
    assert again == card.split("\n## Plan")[0] and contents(tmp_path / "again" / "small").keys() == contents(tmp_path / "small").keys()


def resize_of(dense: Path, recipe: Path, budget: str) -> Any:
    from megatron_elastic.export.write import with_recipe

    source, _ = with_recipe(open_source(dense), recipe)
    return resize(source.shape, source.plans[budget])


@pytest.mark.parametrize("absolute", [False, True])
def test_a_target(dense: Path, recipe: Path, absolute: bool, tmp_path: Path) -> None:
    whole = sum(t.numel() for t in weights_of(dense).values())
    target = f"{0.45 * whole:g}" if absolute else "0.45"
    run("extract", dense, "--recipe", recipe, "--target", target, "--format", "hf", "--out", tmp_path / "between")
    assert sum(t.numel() for t in weights_of(tmp_path / "between").values()) == pytest.approx(0.45 * whole, rel=0.02)
    card = (tmp_path / "between" / "README.md").read_text(encoding="utf-8")
    assert "- Budget: none of its own" in card and "## Plan" in card


def test_a_target_of_a_nested_family_lies_between_its_own_plans(dense: Path, recipe: Path, tmp_path: Path) -> None:
    run("extract", dense, "--recipe", recipe, "--nested", "--format", "hf", "--out", tmp_path / "family")
    elastic = json.loads((tmp_path / "family" / "elastic.json").read_text(encoding="utf-8"))
    medium = elastic["plans"]["medium"]["widths"]
    medium.update(hidden=40, ffn=72, heads=12)  # far from the uniform plan
    elastic["plans"]["medium"]["dropped_layers"] = []
    (tmp_path / "family" / "elastic.json").write_text(json.dumps(elastic), encoding="utf-8")
    nowhere = "is not inside a run, so that nothing says what a target counts; give --recipe or --plan"
    assert nowhere in refusal("extract", tmp_path / "family", "--target", "0.45", "--out", tmp_path / "half")
    run("extract", tmp_path / "family", "--target", "0.438", "--recipe", recipe, "--out", tmp_path / "half")
    plan = SubmodelPlan.from_dict(open_checkpoint(tmp_path / "half").provenance["plan"])
    plans = open_source(tmp_path / "family").plans
    assert (
        plans["medium"].contains(plan)
        and plan.contains(plans["small"])
        and plan.width(ElasticAxis.FFN) == 48
        and plan.width(ElasticAxis.HIDDEN) == 40
    )
    other = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    other["elastic"]["axes"]["ffn"] = [72, 24]
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(other), encoding="utf-8")
    assert "has other axes than the family that" in refusal(
        "extract", tmp_path / "family", "--recipe", tmp_path / "other.yaml", "--out", tmp_path / "no"
    )


def test_shards(dense: Path, tmp_path: Path) -> None:
    run("extract", dense, "--format", "hf", "--shard-gigabytes", "0.0001", "--out", tmp_path / "many")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text(encoding="utf-8"))
    files = sorted(file.name for file in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors" and set(index["weight_map"].values()) == set(files)
    assert same(weights_of(tmp_path / "many"), weights_of(dense))
    with safe_open(tmp_path / "many" / files[0], framework="pt") as shard:
        assert shard.metadata() == {"format": "pt"}


@pytest.fixture(scope="module")
def staggered_family(tmp_path_factory: Any) -> Path:
    """A family whose only budget below the parent has another width in every layer."""
    shape = family_shapes()["qwen2"]
    space = tiny_space(shape, (ElasticAxis.FFN, ElasticAxis.HEADS))
    directory = tmp_path_factory.mktemp("staggered") / "family"
    source = open_source(write_pretrained(directory.parent / "whole", shape))
    write_named(directory, source.tensors.items(), shape, space=space, plans={"full": space.parent, "small": staggered(space, None, 1)})
    return directory


def test_one_width_a_layer(staggered_family: Path, tmp_path: Path) -> None:
    small = ["extract", staggered_family, "--budget", "small", "--out", tmp_path / "small"]
    message = refusal(*small, "--format", "hf")
    assert message == (
        "no Hugging Face config can say sizes that differ from layer to layer (model.attention.heads, model.mlp.ffn); add --homogenise, or "
        "write a megatron checkpoint"
    )
    assert list(tmp_path.iterdir()) == []
    run(*small)
    uneven, whole = NamedTensors(tmp_path / "small"), NamedTensors(staggered_family)
    assert isinstance(uneven.info.shape.mlp.ffn, tuple)  # type: ignore[union-attr]
    out = run("extract", staggered_family, "--budget", "small", "--format", "hf", "--homogenise", "--out", tmp_path / "even")
    old, new = (sum(t.numel() for t in tensors.values()) for tensors in (uneven, weights_of(tmp_path / "even")))
    assert f"one width an axis costs {new - old:,} parameters more ({old:,} to {new:,}, {new / old - 1:+.1%})" in out and new > old
    even = open_source(tmp_path / "even")
    space = whole.info.space
    assert space is not None
    assert even.shape.mlp.ffn == max(uneven.info.shape.mlp.ffn)  # type: ignore[union-attr, arg-type]
    first = "decoder.layers.0.mlp.linear_fc2.weight"  # of the layer that kept most, the weights are the same
    widest = max(range(uneven.info.shape.num_layers), key=lambda n: uneven.info.shape.at(n).mlp.ffn)  # type: ignore[union-attr]
    name = first.replace(".0.", f".{widest}.")
    assert (even.tensors[name] == uneven[name]).all()


def test_what_cannot_be_said_is_found_before_anything_is_written(staggered_family: Path, tmp_path: Path) -> None:
    """The first budget could be written, the second could not."""
    members = ["extract", staggered_family, "--format", "hf", "--out", tmp_path / "members"]
    assert "no Hugging Face config can say sizes that differ" in refusal(*members)
    assert list(tmp_path.iterdir()) == []
    run(*members, "--homogenise")
    assert sorted(path.name for path in (tmp_path / "members").iterdir()) == ["full", "small"]


def test_a_plan_with_too_few_widths(staggered_family: Path, tmp_path: Path) -> None:
    plan = open_source(staggered_family).plans["small"].to_dict()
    plan["widths"]["ffn"] = plan["widths"]["ffn"][:2]  # type: ignore[index]
    (tmp_path / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    for options in (["--homogenise"], ["--homogenise", "--format", "hf"], []):
        message = refusal("extract", staggered_family, "--plan", tmp_path / "plan.json", *options, "--out", tmp_path / "out")
        assert "the plan does not fit the space: ffn names 2 widths, but it has 4 layers" in message
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_only_a_target_needs_the_recipe_of_a_run(dense: Path, recipe: Path, tmp_path: Path) -> None:
    family = tmp_path / "run" / "checkpoints" / "stage-long"
    run("extract", dense, "--recipe", recipe, "--nested", "--out", family)
    (tmp_path / "run" / "recipe.yaml").write_text("{", encoding="utf-8")
    run("extract", tmp_path / "run", "--list")
    run("extract", tmp_path / "run", "--budget", "small", "--out", tmp_path / "small")
    half = ["extract", tmp_path / "run", "--target", "0.45", "--out", tmp_path / "half"]
    assert "recipe.yaml" in refusal(*half)
    shutil.copy(dense.parent / "ours" / "recipe.yaml", tmp_path / "run" / "recipe.yaml")
    message = refusal(*half)
    assert "has no elastic block, which says what a target counts; give --recipe or --plan" in message and "not inside a run" not in message
    shutil.copy(recipe, tmp_path / "run" / "recipe.yaml")
    run(*half)


def test_what_is_there(dense: Path, recipe: Path, tmp_path: Path) -> None:
    plain = run("extract", dense, "--list")
    whole = sum(t.numel() for t in weights_of(dense).values())
    assert plain == f"{dense}: {whole:,} parameters, layers T4, hidden 80, vocabulary 131\n"
    table = run("extract", dense, "--recipe", recipe, "--list").splitlines()[1:]
    assert table[0].split() == ["budget", "parameters", "active", "hidden", "ffn", "heads", "layers"]
    assert table[1].split() == ["full", f"{whole:,}", f"{whole:,}", "80", "72", "12", "4"]
    assert [line.split()[0] for line in table[2:]] == ["medium", "small"] and table[3].split()[-1] == "3"
    assert list(tmp_path.iterdir()) == []


def test_a_table_is_never_cut(tmp_path: Path) -> None:
    """A family of ten axes is wider than a terminal."""
    plans = write_family(tmp_path / "family", family_shapes()["nemotron_h"])
    table = run("extract", tmp_path / "family", "--list").splitlines()[1:]
    assert len(table) == 4 and "…" not in "".join(table) and len(table[0]) > 80
    for line, (name, plan) in zip(table[1:], plans.items(), strict=True):
        widths = [str(plan.width(ElasticAxis(axis))) for axis in table[0].split()[3:-1]]
        assert line.split()[0] == name and line.split()[3:-1] == widths


def test_another_family(dense: Path, tmp_path: Path) -> None:
    hf = ["extract", dense, "--format", "hf", "--out", tmp_path / "no", "--family"]
    assert refusal(*hf, "llama").startswith("a llama config cannot say model.hidden_size 80: transformers wants a multiple of")
    assert "family 'gpt2' is not supported; choose one of llama, mistral" in refusal(*hf, "gpt2")
    assert list(tmp_path.iterdir()) == []


def test_a_member_that_its_own_family_cannot_say(tmp_path: Path) -> None:
    """Llama's heads divide its hidden size; where a member's do not, the next family says the same model."""
    shape = replace(family_shapes()["qwen2"], hidden_size=96, attention=AttentionShape(heads=12, kv_groups=2, head_dim=10, rope_base=500.0))
    llama = write_pretrained(tmp_path / "llama", shape)
    config = json.loads((llama / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "llama"
    space = build_space(shape, {ElasticAxis.HIDDEN: (96, 80)})
    source = open_source(llama)
    plans = {"full": space.parent, "small": space.plan({ElasticAxis.HIDDEN: 80})}
    write_named(tmp_path / "family", source.tensors.items(), shape, space=space, plans=plans, assets=partial(shutil.copytree, llama))
    out = run("extract", tmp_path / "family", "--format", "hf", "--out", tmp_path / "members")
    kinds = [json.loads((tmp_path / "members" / name / "config.json").read_text(encoding="utf-8"))["model_type"] for name in plans]
    assert kinds == ["llama", "mistral"]
    assert f"{tmp_path / 'members' / 'small'}: written as mistral; a llama config cannot say model.hidden_size 80" in out


BAD_OPTIONS: dict[str, tuple[list[str], str]] = {
    "no place": ([], "--out is missing; name a directory to write, or add --list to look"),
    "two plans": (["--budget", "small", "--target", "0.5", "--out", "x"], "--budget and --target exclude each other"),
    "many in one of one": (["--nested", "--budget", "small", "--out", "x"], "--budget and --nested exclude each other"),
    "nothing to nest": (["--nested", "--out", "x"], "holds no family, so there is nothing to nest; leave out --nested or give --recipe"),
    "no family": (["--budget", "small", "--out", "x"], "holds no plans"),
    "no family for a target": (
        ["--target", "0.5", "--out", "x"],
        "holds no family; give --target for the run of an elastic stage, or with --recipe",
    ),
    "shards of a checkpoint": (["--shard-gigabytes", "1", "--out", "x"], "--shard-gigabytes: only a Hugging Face directory has that"),
    "family of a checkpoint": (["--family", "llama", "--out", "x"], "--family: only a Hugging Face directory has that; add --format hf"),
    "empty shards": (["--format", "hf", "--shard-gigabytes", "0", "--out", "x"], "--shard-gigabytes 0.0 must be above 0"),
    "no number": (["--format", "hf", "--shard-gigabytes", "nan", "--out", "x"], "--shard-gigabytes nan must be above 0"),
    "endless shards": (["--format", "hf", "--shard-gigabytes", "inf", "--out", "x"], "--shard-gigabytes inf must be finite"),
    "even without a plan": (["--homogenise", "--out", "x"], "is written whole, without a plan; leave it out"),
    "a list somewhere": (["--list", "--out", "x"], "--out: --list writes nothing and shows every budget; leave out one or the other"),
    "a list of one": (["--list", "--budget", "small"], "--budget: --list writes nothing"),
    "a list of a plan": (["--list", "--plan", "plan.json"], "--plan: --list writes nothing"),
    "a list of a target": (["--list", "--target", "0.5"], "--target: --list writes nothing"),
    "a list of one in many": (["--list", "--nested"], "--nested: --list writes nothing"),
    "a list in a format": (["--list", "--format", "hf"], "--format: --list writes nothing"),
    "a list of types": (["--list", "--homogenise", "--dtype", "bfloat16"], "--homogenise and --dtype: --list writes nothing"),
    "a list in shards": (
        ["--list", "--family", "llama", "--shard-gigabytes", "1"],
        "--family and --shard-gigabytes: --list writes nothing",
    ),
    "no recipe": (["--recipe", "nowhere.yaml", "--out", "x"], "nowhere.yaml"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_options_that_do_not_fit(case: str, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options, message = BAD_OPTIONS[case]
    assert message in refusal("extract", dense, *options) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", ["0", "-1", "nan", "0.1", "1e18"])
def test_targets_that_no_member_costs(target: str, dense: Path, recipe: Path, tmp_path: Path) -> None:
    message = refusal("extract", dense, "--recipe", recipe, "--target", target, "--out", tmp_path / "x")
    assert "target" in message and list(tmp_path.iterdir()) == []


def test_a_recipe_of_another_model(dense: Path, recipe: Path, tmp_path: Path) -> None:
    other = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    other["model"]["norm_epsilon"] = 0.5
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(other), encoding="utf-8")
    message = refusal("extract", dense, "--recipe", tmp_path / "other.yaml", "--out", tmp_path / "x")
    assert "is not of Hugging Face directory" in message and "model.norm_epsilon is" in message
    assert "has no elastic block" in refusal("extract", dense, "--recipe", dense.parent / "ours" / "recipe.yaml", "--out", tmp_path / "x")


@pytest.mark.parametrize("name", ["import", "extract", "verify"])
def test_help_names_everything(name: str) -> None:
    code, out, _ = command(name, "--help")
    plain = re.sub(r"\s+", " ", re.sub(r"[│╭╮╰╯─]", " ", out))
    assert code == 0 and f"megatron-elastic {name} " in plain and "Examples:" in plain
    assert "TEXT" not in [word for line in out.splitlines() if "--plan" in line or "--recipe" in line for word in line.split()]
