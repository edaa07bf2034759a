"""The output loss of a vocabulary divided over two ranks equals that of one process, in values and in every gradient, and gathers nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_elastic.distill.losses import OutputLoss, OutputLossTerms, chunked_output_loss, reference_output_loss
from megatron_elastic.errors import ConfigError

pytestmark = pytest.mark.dist

TOKENS, INPUT, WIDTH, TEACHER_WIDTH, ROWS = 23, 6, 7, 9, 136
WEIGHTS = ("student_weight", "teacher_weight")
TERMS = OutputLossTerms(vocab_size=131, kl_weight=0.7, ce_weight=0.4, chunk_tokens=5)
PADDING_ONLY = 60
"""Words that leave the second of two ranks nothing but padding."""


class Outcome(NamedTuple):
    values: list[torch.Tensor]
    gradients: list[torch.Tensor]
    """Of the hidden states and of the output weight."""


def whole_inputs(dtype: torch.dtype, vocab_size: int, hidden_dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The same on every rank; some tokens are masked, with NaN states and an impossible target."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    inputs = {
        "student_hidden": draw(TOKENS, WIDTH).to(hidden_dtype),
        "student_weight": draw(ROWS, WIDTH),
        "targets": torch.randint(0, vocab_size, (TOKENS,), generator=generator),
        "teacher_hidden": draw(TOKENS, TEACHER_WIDTH).to(hidden_dtype),
        "teacher_weight": draw(ROWS, TEACHER_WIDTH),
        "loss_mask": torch.rand(TOKENS, generator=generator).add(0.2).round().to(hidden_dtype or dtype),
    }
    inputs["targets"][[0, 1, 2]] = torch.tensor([0, vocab_size // 2, vocab_size - 1])  # words of both ranks
    inputs["loss_mask"][[0, 1, 2]] = 1
    masked = inputs["loss_mask"] == 0
    assert 0 < int(masked.sum()) < TOKENS
    inputs["student_hidden"][masked] = float("nan")
    inputs["teacher_hidden"][masked] = float("nan")
    inputs["targets"][masked] = -100
    return inputs


def share(inputs: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """The inputs of one rank."""
    return inputs | {name: inputs[name].chunk(world)[rank].contiguous() for name in WEIGHTS if inputs[name] is not None}


def outcome(loss: OutputLoss, inputs: dict[str, Any]) -> Outcome:
    gradients = torch.autograd.grad(loss.total * 1.7, (inputs["student_hidden"], inputs["student_weight"]))
    return Outcome([value.detach() for value in loss], list(gradients))


def divided(rank: int, world: int, terms: OutputLossTerms, inputs: dict[str, Any]) -> Outcome:
    mine = share(inputs, rank, world)
    for name in ("student_hidden", "student_weight"):
        mine[name].requires_grad_()
    return outcome(chunked_output_loss(**mine, terms=terms, group=dist.group.WORLD), mine)


def whole(function: Any, terms: OutputLossTerms, inputs: dict[str, Any]) -> Outcome:
    inputs = inputs | {name: inputs[name].clone().requires_grad_() for name in ("student_hidden", "student_weight")}
    return outcome(function(**inputs, terms=terms), inputs)


def assert_equal_whole(found: list[Outcome], expected: Outcome, tolerance: float) -> None:
    for one in found:
        for a, b in zip(one.values, expected.values, strict=True):
            torch.testing.assert_close(a, b.to(a.dtype), rtol=tolerance, atol=tolerance)
        assert all(torch.equal(a, b) for a, b in zip(one.values, found[0].values, strict=True))
        assert torch.equal(one.gradients[0], found[0].gradients[0])
    gradients = (found[0].gradients[0], torch.cat([one.gradients[1] for one in found]))
    for a, b in zip(gradients, expected.gradients, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("vocab_size", [131, PADDING_ONLY, ROWS])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize(("kl_weight", "ce_weight"), [(1.0, 0.0), (0.0, 1.0), (0.7, 0.4)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_values_and_gradients_equal_one_process(ranks, vocab_size, temperature, kl_weight, ce_weight, dtype, tolerance):
    terms = OutputLossTerms(vocab_size=vocab_size, kl_weight=kl_weight, ce_weight=ce_weight, temperature=temperature, chunk_tokens=5)
    inputs = whole_inputs(dtype, vocab_size)
    found = ranks(divided, 2, terms, inputs)
    assert_equal_whole(found, whole(reference_output_loss, terms, inputs), tolerance)
    assert_equal_whole(found, whole(chunked_output_loss, terms, inputs), tolerance)
    assert bool((torch.cat([one.gradients[1] for one in found])[vocab_size:] == 0).all())


@pytest.mark.parametrize("vocab_size", [131, PADDING_ONLY])
def test_cross_entropy_without_a_teacher(ranks, vocab_size):
    terms = OutputLossTerms(vocab_size=vocab_size, kl_weight=0.0, ce_weight=1.0, chunk_tokens=8)
    inputs = whole_inputs(torch.float64, vocab_size) | {"teacher_hidden": None, "teacher_weight": None}
    assert_equal_whole(ranks(divided, 2, terms, inputs), whole(reference_output_loss, terms, inputs), 1e-10)


@pytest.mark.parametrize("vocab_size", [131, PADDING_ONLY])
def test_bf16_weights_use_fp32_mathematics(ranks, vocab_size):
    terms = OutputLossTerms(vocab_size=vocab_size, kl_weight=0.7, ce_weight=0.4, temperature=1.5, chunk_tokens=5)
    inputs = whole_inputs(torch.bfloat16, vocab_size)
    exact = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    expected = whole(reference_output_loss, terms, exact)
    found = ranks(divided, 2, terms, inputs)
    torch.testing.assert_close(found[0].values[0].double(), expected.values[0], rtol=1e-6, atol=0)
    assert found[0].gradients[0].dtype == found[0].gradients[1].dtype == torch.bfloat16
    largest = expected.gradients[0].abs().max().item()
    # the parts of two ranks are rounded to bf16, then their sum, then the scaled sum
    torch.testing.assert_close(found[0].gradients[0].double(), expected.gradients[0], rtol=0, atol=4 * 2**-8 * largest)
    rows = torch.cat([one.gradients[1] for one in found]).double()
    torch.testing.assert_close(rows, expected.gradients[1], rtol=2.1 * 2**-8, atol=1e-6)


def test_bf16_weights_with_fp32_states(ranks):
    inputs = whole_inputs(torch.bfloat16, 131, torch.float32)
    exact = inputs | {name: inputs[name].float() for name in WEIGHTS}
    assert_equal_whole(ranks(divided, 2, TERMS, inputs), whole(reference_output_loss, TERMS, exact), 2.1 * 2**-8)


def groups_of_one(rank: int, world: int, inputs: dict[str, Any]) -> tuple[Outcome, Outcome]:
    alone, _ = dist.new_subgroups(1)
    assert isinstance(alone, dist.ProcessGroup)
    for name in ("student_hidden", "student_weight"):
        inputs[name].requires_grad_()
    results = [outcome(chunked_output_loss(**inputs, terms=TERMS, group=group), inputs) for group in (alone, None)]
    dist.destroy_process_group(alone)
    return results[0], results[1]


def test_a_group_of_one_is_no_group(ranks):
    (alone, without), _ = ranks(groups_of_one, 2, whole_inputs(torch.float32, 131))
    assert all(torch.equal(a, b) for a, b in zip([*alone[0], *alone[1]], [*without[0], *without[1]], strict=True))


# Defects of others, each with the number it has in the list of public reports


def replicated_layer(rank: int, world: int, inputs: dict[str, Any]) -> torch.Tensor:
    """Gradient of a layer that every rank has, on a rank of its own or alone."""
    states = torch.randn(TOKENS, INPUT, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    layer = torch.randn(INPUT, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    group = dist.group.WORLD if world > 1 else None
    mine = share(inputs, rank, world) | {"student_hidden": states @ layer}
    (gradient,) = torch.autograd.grad(chunked_output_loss(**mine, terms=TERMS, group=group).total, layer)
    return gradient


def test_g1_gradients_before_the_loss_are_those_of_one_process_not_times_the_ranks(ranks):
    """NVIDIA-NeMo/Automodel#3776: the loss is right, and the gradient of everything below it as many times too large as there are ranks."""
    inputs = whole_inputs(torch.float64, 131)
    expected = replicated_layer(0, 1, inputs)
    for found in ranks(replicated_layer, 2, inputs):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def refusal(rank: int, world: int, inputs: dict[str, Any], terms: OutputLossTerms) -> str | None:
    try:
        chunked_output_loss(**inputs, terms=terms, group=dist.group.WORLD)
    except ConfigError as error:
        return str(error)
    return None


def own_rows_refusal(rank: int, world: int, inputs: dict[str, Any], rows: int, teacher_rows: int | None) -> str | None:
    """What is said to `rows` rows of the student on each rank and `teacher_rows` of the teacher; None: all of them."""
    mine = inputs | {"student_weight": inputs["student_weight"][rank * rows : (rank + 1) * rows]}
    if teacher_rows is not None:
        mine["teacher_weight"] = inputs["teacher_weight"][rank * teacher_rows : (rank + 1) * teacher_rows]
    return refusal(rank, world, mine, TERMS)


@pytest.mark.parametrize("vocab_size", [131, PADDING_ONLY])
def test_g11_a_whole_weight_on_every_rank_is_refused(ranks, vocab_size):
    """NVIDIA/Megatron-LM#7452: whole logits in a vocabulary-parallel loss add log(ranks) to it and spoil its gradient."""
    inputs = whole_inputs(torch.float32, vocab_size)
    terms = OutputLossTerms(vocab_size=vocab_size, kl_weight=0.7, ce_weight=0.4)
    for message in ranks(refusal, 2, inputs, terms):
        assert message is not None
        assert "every one of the 2 tensor-parallel ranks holds the whole output weight of 136 rows" in message


def test_g11_rows_that_cannot_hold_the_vocabulary_are_refused(ranks):
    for message in ranks(own_rows_refusal, 2, whole_inputs(torch.float32, 131), 65, 65):
        assert message is not None
        assert "model.vocab_size 131 does not fit the 65 rows of the output layer on each of 2 ranks" in message


@pytest.mark.parametrize(("teacher_rows", "told"), [(66, 66), (None, ROWS)])
def test_g38_a_teacher_of_another_padding_or_division_is_refused(ranks, teacher_rows, told):
    """NVIDIA/Model-Optimizer#2489, meta-pytorch/torchtune#2119: the padded vocabularies of teacher and student differ."""
    for message in ranks(own_rows_refusal, 2, whole_inputs(torch.float32, 131), ROWS // 2, teacher_rows):
        assert message is not None
        assert f"the teacher's vocabulary has {told} rows on each of 2 ranks, the student's 68" in message


class Watch(TorchDispatchMode):
    """Remembers the largest tensor any operation returns, and every collective with the numbers it moves."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.collectives: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.collectives.append((func.__name__.split(".")[0], sum(value.numel() for value in args[0])))
            return out
        for value in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.numel())
        return out


def sizes(rank: int, world: int, gradients: bool) -> tuple[int, list[tuple[str, int]]]:
    tokens, rows, width = 192, 96, 8
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).requires_grad_(gradients)
    weight = torch.randn(rows, width, generator=generator).requires_grad_(gradients)
    terms = OutputLossTerms(vocab_size=world * rows, kl_weight=0.7, ce_weight=0.4, chunk_tokens=16, temperature=2.0)
    with Watch() as watch:
        loss = chunked_output_loss(
            hidden, weight, torch.zeros(tokens, dtype=torch.long), hidden.detach() + 1, weight.detach(), torch.ones(tokens), terms,
            group=dist.group.WORLD,
        )  # fmt: skip
        if gradients:
            loss.total.backward()
    return watch.largest, watch.collectives


@pytest.mark.parametrize("gradients", [True, False])
def test_g5_no_tensor_is_larger_than_a_rank_s_logits_of_a_chunk_and_none_is_gathered(ranks, gradients):
    """verl-project/verl#6593: logits of all tokens over the vocabulary take tens of gigabytes."""
    for largest, collectives in ranks(sizes, 2, gradients):
        assert largest == max(16 * 96, 192 * 8)
        assert {name for name, _ in collectives} == {"allreduce_"}
        # A maximum and a sum for each of three softmaxes and each token of 12 chunks; kl and ce; hidden gradients once for all tokens.
        assert sorted(numel for _, numel in collectives) == [2] + 24 * [3 * 16] + [192 * 8] * gradients


def stray_target(rank: int, world: int, inputs: dict[str, Any], word: int) -> str:
    inputs["targets"][0] = word
    try:
        chunked_output_loss(**share(inputs, rank, world), terms=TERMS, group=dist.group.WORLD)
    except (IndexError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("word", [-1, 131, ROWS])
def test_a_target_outside_the_vocabulary_stops_every_rank(ranks, word):
    assert all("out of range" in message for message in ranks(stray_target, 2, whole_inputs(torch.float32, 131), word))
