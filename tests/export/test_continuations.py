"""`generate` continues a text as the model says: every token is the most probable after the whole text before it, for all parents; a
plan of the family and its extracted checkpoint write the same text; it stops at the end of a document; a seed decides its draws.

Run: pytest tests/export/test_continuations.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_elastic.axes import SubmodelPlan
from megatron_elastic.checkpoint import open_checkpoint
from megatron_elastic.elastic.attach import ElasticHandle, elasticize
from megatron_elastic.errors import ConfigError
from megatron_elastic.export.generate import GenerateOptions, generate
from megatron_elastic.export.load import load_model
from megatron_elastic.export.sampling import Sampling
from megatron_elastic.export.write import write_submodel
from tests.elastic.family import PARENTS
from tests.export.random_family import write_family

OPTIONS = GenerateOptions(tokens=9, end=500, vocab_size=131, drawable=131)
"""No id is 500: nothing ends."""
PROMPTS = ([7], [3, 91], [(5 * n * n + n) % 131 for n in range(29)])
"""Of one token, shorter than the convolution, and longer than a chunk of the scan."""


@dataclass
class Family:
    """A family on the disk and in memory."""

    path: Path
    plans: dict[str, SubmodelPlan]
    model: Any
    handle: ElasticHandle


@pytest.fixture(scope="module", params=PARENTS)
def family(request: Any, tmp_path_factory: Any, _one_process: Any) -> Iterator[Family]:
    path = tmp_path_factory.mktemp(request.param) / "family"
    plans = write_family(path, PARENTS[request.param]())
    model, info = load_model(path, _one_process), open_checkpoint(path)
    assert info.space is not None
    yield Family(path, plans, model, elasticize(model, info.space, _one_process, info.shape))


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids]), torch.arange(len(ids))[None], None)[0, :, :131].double()


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_every_token_is_the_most_probable_after_all_before_it(family: Family, prompt: list[int]) -> None:
    with family.handle.use(family.plans["medium"]):
        found = generate(family.model, prompt, OPTIONS)
        logits = logits_of(family.model, [*prompt, *found.ids])  # all at once
    assert len(found.ids) == 9 and not found.ended
    assert logits[len(prompt) - 1 : -1].argmax(1).tolist() == list(found.ids)
    if len(prompt) == 1:
        assert found.prompt_loss is None
    else:
        chances = logits.log_softmax(1)
        wanted = -sum(float(chances[place, token]) for place, token in enumerate(prompt[1:])) / (len(prompt) - 1)
        assert found.prompt_loss == pytest.approx(wanted, rel=1e-5)


def test_a_plan_writes_the_text_of_its_extracted_checkpoint(family: Family, tmp_path: Path, parallel: Any) -> None:
    texts = {}
    for name, plan in family.plans.items():
        write_submodel(family.path, plan, tmp_path / name)
        member = load_model(tmp_path / name, parallel)
        for prompt in PROMPTS:
            with family.handle.use(plan):
                found = generate(family.model, prompt, OPTIONS)
            alone = generate(member, prompt, OPTIONS)
            assert found.ids == alone.ids, (name, prompt)
            assert found.prompt_loss == (None if alone.prompt_loss is None else pytest.approx(alone.prompt_loss, rel=1e-4))
            texts[name, len(prompt)] = found.ids
    assert len(set(texts.values())) == len(texts), "members write the same text: the test proves less than it says"


def test_it_stops_where_the_document_ends(family: Family) -> None:
    prompt = PROMPTS[2]
    whole = generate(family.model, prompt, OPTIONS)
    end = whole.ids[3]
    found = generate(family.model, prompt, replace(OPTIONS, end=end))
    assert found.ended and found.ids == whole.ids[: whole.ids.index(end)] and found.prompt_loss == whole.prompt_loss


def test_only_words_of_the_tokenizer_are_written(family: Family) -> None:
    for sampling in (None, Sampling(temperature=30.0)):
        found = generate(family.model, PROMPTS[1], replace(OPTIONS, drawable=4, sampling=sampling))
        assert max(found.ids) < 4
    assert max(generate(family.model, PROMPTS[1], OPTIONS).ids) >= 4


def test_a_seed_decides_the_draws(family: Family) -> None:
    options = replace(OPTIONS, sampling=Sampling(temperature=3.0, top_k=40))
    texts = [generate(family.model, PROMPTS[1], replace(options, seed=seed)).ids for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]


def test_an_empty_prompt_is_refused(family: Family) -> None:
    with pytest.raises(ConfigError, match="the prompt is empty; give at least one token"):
        generate(family.model, [], OPTIONS)
