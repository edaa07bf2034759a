"""Members cut out of a trained family are ordinary models: transformers' NemotronH, in a process without this project, computes the logits of
the masked family from them. `extract` refuses what it cannot do, `verify` notices every difference.

Run: pytest tests/export/test_extract.py
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_elastic.axes import ElasticAxis, SubmodelPlan
from megatron_elastic.checkpoint import NamedTensors, open_checkpoint, write_named
from megatron_elastic.config import decode_recipe
from megatron_elastic.cost import total_params, widths_of
from megatron_elastic.space import parent_plan, resize
from tests.export.read_back import family_logits, logits_in_a_fresh_process
from tests.train import harness
from tests.train.harness import command, in_new_process, plain_recipe

BUDGETS = ["full", "medium", "small"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any) -> Path:
    """A trained family; without attention biases, which NemotronH does not have."""
    root = tmp_path_factory.mktemp("family")
    data = in_new_process(harness.write_data, root)
    recipe = plain_recipe(root / "run", data)
    recipe["model"]["attention"]["qkv_bias"] = False
    recipe["model"]["mamba"]["chunk"] = 24  # one chunk: transformers' plain-PyTorch scan sums over the wrong axis when there are several
    in_new_process(harness.train, decode_recipe(recipe, "tiny.yaml"))
    return root / "run"


@pytest.fixture(scope="module")
def members(run: Path) -> Path:
    """Every member of the family."""
    code, out, err = in_new_process(command, "extract", str(run), "--out", str(run.parent / "members"))
    assert code == 0, err
    assert [line.split()[1] for line in out.splitlines()] == [f"{name}," for name in BUDGETS]
    return run.parent / "members"


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return dict(NamedTensors(checkpoint).items())


def refusal(*arguments: Any) -> str:
    """The one message of a command that fails as it should."""
    code, _, err = in_new_process(command, *map(str, arguments))
    assert code == 2 and err.startswith("error: ") and "Traceback" not in err, err
    return err.removeprefix("error: ").strip()


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the extra hf")
def test_transformers_reads_the_smallest_member(run: Path, tmp_path: Path) -> None:
    code, _, err = in_new_process(command, "extract", str(run), "--budget", "small", "--format", "hf", "--out", str(tmp_path / "small"))
    assert code == 0, err
    family = open_checkpoint(run / "checkpoints" / "stage-long")
    assert family.plans["small"].dropped_layers, "no layer is dropped: the test proves less than it says"
    tokens = torch.randint(0, 257, (2, 22), generator=torch.Generator().manual_seed(3))
    theirs = logits_in_a_fresh_process({tmp_path / "small": tokens})[0]
    masked, whole = in_new_process(family_logits, family.path, ["small", "full"], tokens)
    assert float((theirs - masked).abs().max()) < 1e-4
    assert float((whole - masked).abs().max()) > 0.1 and float(theirs.std()) > 0.1


def test_every_budget_has_its_size_and_says_where_it_comes_from(run: Path, members: Path) -> None:
    family = open_checkpoint(run / "checkpoints" / "stage-long")
    for name in BUDGETS:
        info, tensors = open_checkpoint(members / name), tensors_of(members / name)
        assert info.kind == "model" and info.space is None and info.shape == resize(family.shape, family.plans[name])
        counted = sum(tensor.numel() for key, tensor in tensors.items() if not key.endswith("expert_bias"))
        assert counted == total_params(info.shape, widths_of(parent_plan(info.shape), info.shape.num_layers))
        assert info.provenance["extracted_from"] == str(family.path) and info.provenance["plan"] == family.plans[name].to_dict()
        assert info.provenance["budget"] == name and info.provenance["data"].startswith("data (parent: 864 tokens, short: ")
    parent, full = tensors_of(family.path), tensors_of(members / "full")
    assert parent.keys() == full.keys() and all(torch.equal(parent[name], full[name]) for name in parent)


def test_a_plan_from_a_file(run: Path, members: Path, tmp_path: Path) -> None:
    family = open_checkpoint(run / "checkpoints" / "stage-long")
    assert family.space is not None
    other = family.space.plan({ElasticAxis.HIDDEN: 20, ElasticAxis.EXPERTS: 4, ElasticAxis.LAYERS: 4})
    for name, plan in (("small", family.plans["small"]), ("other", other)):
        (tmp_path / f"{name}.json").write_text(json.dumps(plan.to_dict()), encoding="utf-8")
        code, out, err = in_new_process(
            command, "extract", str(run), "--plan", str(tmp_path / f"{name}.json"), "--out", str(tmp_path / name)
        )
        assert code == 0, err
        assert out.startswith(f"{tmp_path / name}: plan, ")
    small, again = tensors_of(members / "small"), tensors_of(tmp_path / "small")
    assert small.keys() == again.keys() and all(torch.equal(small[name], again[name]) for name in small)
    assert open_checkpoint(tmp_path / "other").shape == resize(family.shape, other)


BAD_PLANS: dict[str, tuple[Any, str]] = {
    "width that is no choice": ({"hidden": 24}, "the plan does not fit the space: hidden 24 is not one of its choices [40, 32, 20]"),
    "axis of another model": ({"depth": 4}, "unknown axis 'depth'"),
    "not JSON": ("{", "cannot be read"),
    "width that is no number": ({"hidden": "wide"}, "cannot be read: invalid literal for int()"),
    "not a plan": ("[1, 2]", "cannot be read: a plan is a JSON object"),
    "another version": ('{"format_version": 9}', "plan: format_version 9 is not 1 or 2"),
}


@pytest.mark.parametrize("case", BAD_PLANS)
def test_a_plan_that_does_not_fit(case: str, run: Path, tmp_path: Path) -> None:
    change, text = BAD_PLANS[case]
    plan = open_checkpoint(run / "checkpoints" / "stage-long").plans["full"].to_dict()
    content = change if isinstance(change, str) else json.dumps({**plan, "widths": {**plan["widths"], **change}})  # type: ignore[dict-item]
    (tmp_path / "plan.json").write_text(content, encoding="utf-8")
    assert text in refusal("extract", run, "--plan", tmp_path / "plan.json", "--out", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_extract_overwrites_nothing(run: Path, tmp_path: Path) -> None:
    taken = tmp_path / "members" / "medium"
    taken.mkdir(parents=True)
    (taken / "mine.txt").write_text("precious", encoding="utf-8")
    message = refusal("extract", run, "--out", tmp_path / "members")
    assert f"'{taken}' exists; choose another path or delete it" in message
    assert [path.name for path in (tmp_path / "members").iterdir()] == ["medium"], "an earlier member was written before the refusal"
    assert (taken / "mine.txt").read_text(encoding="utf-8") == "precious"
    assert "medium' exists" in refusal("extract", run, "--budget", "medium", "--out", taken)


def test_extract_refuses_what_is_not_there(run: Path, tmp_path: Path) -> None:
    assert "budget 'smal' is not one of the family's: full, medium, small" in refusal(
        "extract", run, "--budget", "smal", "--out", tmp_path / "a"
    )
    plan = ["--plan", tmp_path / "p.json"]
    assert "cannot be read: " in refusal("extract", run, *plan, "--out", tmp_path / "a")
    assert "--plan and --budget exclude each other" in refusal("extract", run, "--budget", "small", *plan, "--out", tmp_path / "a")
    assert "holds no plans: no elastic stage has saved" in refusal("extract", run / "checkpoints" / "stage-parent", "--out", tmp_path / "a")
    assert "is neither a checkpoint" in refusal("extract", tmp_path, "--out", tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_member_is_no_family(run: Path, members: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(
        json.dumps(open_checkpoint(run / "checkpoints" / "stage-long").plans["small"].to_dict()), encoding="utf-8"
    )
    message = refusal("extract", members / "small", "--plan", tmp_path / "plan.json", "--out", tmp_path / "out")
    assert "holds no family; give --recipe, or extract from the run of an elastic stage" in message and not (tmp_path / "out").exists()


def test_verify_writes_what_it_found(run: Path, members: Path) -> None:
    data = run.parent / "data"
    options = ["--members", members, "--data", data, "--sequence-length", "36"]
    code, out, err = in_new_process(command, "verify", str(run), *map(str, options))
    assert code == 0, err
    assert all(name in out for name in BUDGETS)
    found = json.loads((run / "verify.json").read_text(encoding="utf-8"))
    assert found["format_version"] == 2 and found["checkpoint"] == "stage-long" and list(found["budgets"]) == BUDGETS
    for name, (row,) in found["budgets"].items():
        assert max(row["masked_sliced"], row["masked_extracted"]) < 1e-4
        assert row["extracted_loss"] == pytest.approx(row["loss"], rel=1e-5)
        assert row["loss"] == pytest.approx(last_loss_on_short_samples(run, name), rel=0.2)
    # The parent's plan runs the very same operations.
    assert found["budgets"]["full"][0]["masked_sliced"] == found["budgets"]["full"][0]["masked_extracted"] == 0
    assert found["budgets"]["small"][0]["masked_extracted"] > 0
    assert in_new_process(command, "verify", str(run))[0] == 0  # extracts by itself


def last_loss_on_short_samples(run: Path, budget: str) -> float:
    return harness.rows(run, "eval")[-1]["loss"][budget]


@pytest.mark.parametrize("damage", [0.05, torch.nan], ids=["moved", "not a number"])
def test_verify_notices_one_wrong_weight(run: Path, members: Path, tmp_path: Path, damage: float) -> None:
    for name in BUDGETS:
        tensors = tensors_of(members / name)
        if name == "medium":
            tensors["decoder.layers.2.self_attention.linear_proj.weight"][3, 5] += damage
        write_named(tmp_path / name, tensors.items(), open_checkpoint(members / name).shape)
    message = refusal("verify", run, "--members", tmp_path)
    assert re.fullmatch(
        r"medium \(megatron\): logits differ by \S+, \d\.\de-04 is allowed; the member is not the family's, extract it again", message
    )


def test_verify_refuses_members_that_are_not_there(run: Path, members: Path, tmp_path: Path) -> None:
    assert f"'{tmp_path / 'full'}' does not exist; give a run" in refusal("verify", run, "--members", tmp_path)
    assert "holds no plans" in refusal("verify", members / "small")
    assert "data.path" in refusal("verify", run, "--members", members, "--data", tmp_path / "nowhere")


def test_a_plan_reads_back_from_its_file(run: Path) -> None:
    for plan in open_checkpoint(run / "checkpoints" / "stage-long").plans.values():
        assert SubmodelPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
