"""`megatron-elastic reap` scores experts or takes a ranking, says what is lost, and writes an ordinary smaller model in either format, which transformers
reads; what it must not cut it refuses. Which experts stay and what the smaller model computes is tested in tests/importance/test_reap.py, too.

Run: pytest tests/cli/test_reap.py
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.checkpoint import NamedTensors, open_checkpoint, write_named
from megatron_elastic.export.sources import open_source
from megatron_elastic.platform import prepare_platform

prepare_platform()
from megatron_elastic.importance.ranking import Ranking, fingerprint_of, read_ranking, write_ranking  # noqa: E402
from megatron_elastic.importance.reap import REAPED, best_experts, reaped_shape, select_experts  # noqa: E402
from megatron_elastic.importance.sort import SORTED, sorted_record  # noqa: E402
from megatron_elastic.testing.tiny import tiny_dense, tiny_moe, tiny_shape  # noqa: E402
from tests.elastic.family import tiny_space  # noqa: E402
from tests.export.pretrained import VOCABULARY, contents, family_shapes, same, weights_of, write_pretrained  # noqa: E402
from tests.export.read_back import logits_in_a_fresh_process  # noqa: E402
from tests.importance.naive_experts import hide_experts_  # noqa: E402
from tests.importance.rankings import random_ranking, random_tensors  # noqa: E402
from tests.train.harness import command, in_new_process  # noqa: E402

EXPERTS = ElasticAxis.EXPERTS
SCORED = tiny_moe(score="softmax", layer_pattern="TX", vocab_size=264, padded_vocab_size=264)
"""A small model that reads bytes."""
TEXT = torch.randint(0, VOCABULARY, (2, 22), generator=torch.Generator().manual_seed(3))


def answer(*arguments: object) -> tuple[str, str]:
    """stdout and stderr of a command that succeeds."""
    code, out, err = in_new_process(command, *map(str, arguments))
    assert code == 0, err
    return out, err


def refusal(*arguments: object) -> str:
    """The one line of a command that fails as it should."""
    code, _, err = in_new_process(command, *map(str, arguments))
    assert code == 2 and err.startswith("error: ") and "Traceback" not in err and err.count("\n") == 1, err
    return err.removeprefix("error: ").strip()


def ranking_beside(model: Path, **changes: Any) -> Ranking:
    """A ranking of a model by chance, written beside it."""
    source = open_source(model)
    ranking = random_ranking(source.shape, fingerprint=fingerprint_of(source.tensors, source.shape))
    ranking = replace(ranking, criteria={**ranking.criteria, EXPERTS: "reap"}, **changes)
    write_ranking(model.parent / f"{model.name}.ranking", ranking)
    return ranking


@pytest.fixture(scope="module")
def root(tmp_path_factory: Any) -> Path:
    """Models with experts as others publish them (one a model_type), a checkpoint with a group-limited router, rankings, and a text."""
    root = tmp_path_factory.mktemp("models")
    for kind in ("qwen3_moe", "nemotron_h"):
        write_pretrained(root / kind, family_shapes()[kind])
        ranking_beside(root / kind)
    provenance = {"parent": "somebody/moe", "license": "mit", SORTED: sorted_record(random_ranking(tiny_moe()), tiny_space(tiny_moe()))}
    write_named(root / "groups", random_tensors(tiny_moe()).items(), tiny_moe(), provenance=provenance)
    ranking_beside(root / "groups")
    words = torch.randint(0, 128, (400,), generator=torch.Generator().manual_seed(5)).tolist()
    (root / "words.txt").write_text(" ".join(f"w{number}" for number in words), encoding="utf-8")
    return root


def kept_by(root: Path, name: str, number: int) -> Mapping[int, Tensor]:
    return best_experts(read_ranking(root / f"{name}.ranking"), number)


def wanted(root: Path, name: str, kept: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """The tensors that should be written."""
    source = open_source(root / name)
    return dict(select_experts(source.tensors, source.shape, kept))


def test_experts_scored_here_are_those_that_rank_scores(root: Path, tmp_path: Path) -> None:
    text = ["--text", root / "words.txt", "--tokens", 300, "--sequence-length", 64]
    answer("rank", root / "qwen3_moe", *text, "--depth-tokens", 0, "--out", tmp_path / "file")
    out, _ = answer("reap", root / "qwen3_moe", "--keep", 0.5, *text, "--out", tmp_path / "here")
    again, _ = answer("reap", root / "qwen3_moe", "--keep-experts", 4, "--ranking", tmp_path / "file", "--out", tmp_path / "there")
    assert again.replace("there", "here") == out
    here, there = dict(NamedTensors(tmp_path / "here")), dict(NamedTensors(tmp_path / "there"))
    ranking = read_ranking(tmp_path / "file")
    kept = best_experts(ranking, 4)
    assert same(here, there) and same(here, wanted(root, "qwen3_moe", kept))
    info = open_checkpoint(tmp_path / "here")
    assert info.shape == reaped_shape(open_source(root / "qwen3_moe").shape, 4)
    record = info.provenance[REAPED]
    assert record["criterion"] == "reap" and record["data"] == str(root / "words.txt") and record["tokens"] == ranking.provenance["tokens"]
    assert record["kept"] == {str(layer): stay.tolist() for layer, stay in kept.items()}
    lines = out.splitlines()
    assert lines[0].split() == "layer experts kept reap lost tokens rerouted".split() and len(lines) == 6
    for line, (layer, stay) in zip(lines[1:4], kept.items(), strict=True):
        counts = torch.tensor(ranking.provenance["expert_tokens"][str(layer)], dtype=torch.float64)
        mass = counts * ranking.scores[EXPERTS][layer]
        shares = [f"{1 - float(values[stay].sum() / values.sum()):.1%}" for values in (mass, counts)]
        assert line.split() == [str(layer), "4", "of", "8", *shares]
    assert lines[4].startswith("parameters: ") and lines[5].startswith(f"{tmp_path / 'here'}: model, ")


def test_text_that_hardly_reaches_an_expert_is_told_and_a_dry_run_writes_nothing(root: Path, tmp_path: Path) -> None:
    before = contents(root)
    arguments = ["--keep", 0.5, "--text", root / "words.txt", "--tokens", 20, "--criterion", "frequency", "--out", tmp_path / "out"]
    out, err = answer("reap", root / "qwen3_moe", *arguments, "--dry-run")
    assert "frequency lost" in out and "parameters: " in out
    assert err.count("warning: layer ") == 3 and "experts were chosen by fewer than 32 of 19 tokens" in err
    assert list(tmp_path.iterdir()) == [] and contents(root) == before


def test_groups_keep_as_many_and_sorted_experts_are_sorted_no_more(root: Path, tmp_path: Path) -> None:
    out, _ = answer("reap", root / "groups", "--keep", 0.5, "--ranking", root / "groups.ranking", "--out", tmp_path / "small")
    kept = kept_by(root, "groups", 8)
    assert all([int((stay // 4 == group).sum()) for group in range(4)] == [2] * 4 for stay in kept.values())
    assert same(dict(NamedTensors(tmp_path / "small")), wanted(root, "groups", kept))
    info = open_checkpoint(tmp_path / "small")
    assert info.shape == reaped_shape(tiny_moe(), 8) and info.space is None
    assert info.provenance["license"] == "mit" and "experts" not in info.provenance[SORTED]["groups"]
    assert out.splitlines()[1].split() == ["1", "8", "of", "16", "-", "-"], "this ranking did not count tokens"
    answer("reap", root / "groups", "--keep", 1, "--ranking", root / "groups.ranking", "--out", tmp_path / "same")
    assert same(dict(NamedTensors(tmp_path / "same")), dict(NamedTensors(root / "groups")))
    assert open_checkpoint(tmp_path / "same").provenance[SORTED] == open_checkpoint(root / "groups").provenance[SORTED]


def hidden_logits(directory: Path, kept: Mapping[int, Tensor]) -> Tensor:
    """Logits of a model that may choose among the kept experts only. Makes its own parallel layout."""
    from megatron_elastic.export.load import load_model
    from megatron_elastic.parallel import ParallelContext

    model = load_model(directory, ParallelContext.initialize())
    hide_experts_(model, kept)
    with torch.no_grad():
        return model(TEXT, torch.arange(TEXT.shape[1])[None].expand_as(TEXT), None)[..., :VOCABULARY]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the extra hf")
def test_transformers_reads_it_and_computes_what_the_parent_does_among_the_kept(root: Path, tmp_path: Path) -> None:
    kinds = {"qwen3_moe": 4, "nemotron_h": 5}
    for kind, number in kinds.items():
        answer(
            "reap", root / kind, "--keep-experts", number, "--ranking", root / f"{kind}.ranking", "--format", "hf", "--out", tmp_path / kind
        )
        config = json.loads((tmp_path / kind / "config.json").read_text(encoding="utf-8"))
        assert config["model_type"] == kind and number in (config.get("num_experts"), config.get("n_routed_experts"))
        card = (tmp_path / kind / "README.md").read_text(encoding="utf-8")
        assert (
            f"- Experts: {number} of 8 in every layer that has them, the best by reap; the others" in card and "cut without further" in card
        )
        assert (tmp_path / kind / "tokenizer.json").is_file() and len(weights_of(tmp_path / kind)) < len(weights_of(root / kind))
    found = logits_in_a_fresh_process(dict.fromkeys((tmp_path / kind for kind in kinds), TEXT))
    for (kind, number), logits in zip(kinds.items(), found, strict=True):
        masked = in_new_process(hidden_logits, root / kind, kept_by(root, kind, number))
        assert float((logits - masked).abs().max()) < 1e-4 and float(masked.std()) > 0.1, kind


def test_experts_by_chance_need_no_text(root: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        answer("reap", root / "groups", "--keep", 0.5, "--criterion", "random", "--seed", seed, "--out", tmp_path / name)
    a, b, c = (dict(NamedTensors(tmp_path / name)) for name in "abc")
    assert same(a, b) and not same(a, c)


def test_what_cannot_be_cut_is_refused(root: Path, tmp_path: Path) -> None:
    out, chance = ("--out", tmp_path / "out"), ("--criterion", "random")
    write_named(tmp_path / "dense", random_tensors(tiny_dense()).items(), tiny_dense())
    message = refusal("reap", tmp_path / "dense", "--keep", 0.5, *chance, *out)
    assert message == (
        f"checkpoint '{tmp_path / 'dense'}' has no experts (layer_pattern 'TTTT'); reap a mixture of experts, or extract a plan"
    )
    space = tiny_space(tiny_shape())
    write_named(tmp_path / "family", random_tensors(tiny_shape()).items(), tiny_shape(), space=space, plans={"full": space.parent})
    assert "holds a trained family, whose plans count its experts" in refusal("reap", tmp_path / "family", "--keep", 0.5, *chance, *out)
    groups, ranking = root / "groups", root / "groups.ranking"
    assert "is of another model: model." in refusal("reap", root / "qwen3_moe", "--keep", 0.5, "--ranking", ranking, *out)
    write_named(tmp_path / "other", random_tensors(tiny_moe(), seed=4).items(), tiny_moe())
    assert "is of other weights (somewhere)" in refusal("reap", tmp_path / "other", "--keep", 0.5, "--ranking", ranking, *out)
    code, _, err = in_new_process(command, "reap", str(groups), "--keep", "0.5", "--text", "nowhere", "--format", "hf", *map(str, out))
    assert code == 2 and err.startswith("error: this model has no Hugging Face family"), "said before text is read"
    assert not (tmp_path / "out").exists()


def test_a_ranking_that_cannot_be_used(root: Path, tmp_path: Path) -> None:
    full, arguments = (
        read_ranking(root / "groups.ranking"),
        ["reap", root / "groups", "--keep", 0.5, "--out", tmp_path / "out", "--ranking"],
    )
    write_ranking(tmp_path / "few", replace(full, scores={axis: rows for axis, rows in full.scores.items() if axis is not EXPERTS}))
    assert refusal(*arguments, tmp_path / "few") == f"ranking '{tmp_path / 'few'}' does not score experts; rank the model again"
    with safe_open(root / "groups.ranking", "pt") as stored:
        tensors, metadata = {key: stored.get_tensor(key) for key in stored.keys()}, stored.metadata()
    tensors["experts/2"][3:5] = torch.nan
    save_file(tensors, tmp_path / "nan", metadata)
    assert refusal(*arguments, tmp_path / "nan") == f"ranking '{tmp_path / 'nan'}': experts/2 has 2 scores that are NaN or infinite"
    assert "no ranking at" in refusal(*arguments, tmp_path / "nothing")
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_numbers(root: Path, tmp_path: Path) -> None:
    """While experts are scored, and while the model is written."""
    tensors, name = random_tensors(SCORED), "decoder.layers.1.mlp.experts.experts.linear_fc2.weight"
    tensors[name][3, 2, 1] = torch.nan
    write_named(tmp_path / "bad", tensors.items(), SCORED)
    (tmp_path / "bytes.txt").write_text("text number 4 says 16, " * 40, encoding="utf-8")
    text = ["--text", tmp_path / "bytes.txt", "--tokenizer", "byte", "--tokens", 200]
    code, _, err = in_new_process(command, *map(str, ("reap", tmp_path / "bad", "--keep", 0.75, *text, "--out", tmp_path / "out")))
    assert (
        code == 2 and "error: layer 1, experts: their outputs are NaN or infinite; look at the model with `megatron-elastic eval`\n" in err
    )
    scores = random_ranking(SCORED).scores[EXPERTS]
    scores[1][3] = 9
    found = random_ranking(SCORED, fingerprint=fingerprint_of(tensors, SCORED))
    write_ranking(tmp_path / "ranking", replace(found, scores={**found.scores, EXPERTS: scores}))
    message = refusal("reap", tmp_path / "bad", "--keep", 0.75, "--ranking", tmp_path / "ranking", "--out", tmp_path / "out")
    assert message.startswith(name) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--keep", "0.5"], "--out is missing; name a directory to write, or add --dry-run to look"),
        (["--keep", "0.5", "--out", "groups"], "--out 'groups' exists; choose another path or delete it"),
        (["--keep", "0.5", "--out", "out"], "there is nothing to score experts by; give --text FILE, --data DIR or --ranking FILE"),
        (["--ranking", "groups.ranking", "--out", "out"], "give one of --keep and --keep-experts"),
        (
            ["--keep-experts", "4", "--ranking", "groups.ranking", "--out", "out"],
            "--keep-experts 4 leaves 1 in each of the 4 groups of layer 1",
        ),
        (
            ["--keep", "0.5", "--ranking", "groups.ranking", "--criterion", "gate", "--seed", "1", "--out", "out"],
            "--criterion and --seed: --ranking",
        ),
        (["--keep", "0.5", "--criterion", "random", "--text", "words.txt", "--out", "out"], "--text: --criterion random reads no text"),
        (["--keep", "0.5", "--text", "words.txt", "--tokens", "1", "--out", "out"], "--tokens 1 must be at least 2"),
    ],
)
def test_options_that_contradict_each_other(options: list[str], message: str, root: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(root)
    assert message in refusal("reap", "groups", *options)
    assert not (root / "out").exists()
