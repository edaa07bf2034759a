"""The chunked output loss equals whole logits and autograd, in values and gradients, and never holds whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_elastic.distill import losses
from megatron_elastic.distill.losses import OutputLossTerms, chunked_output_loss, reference_output_loss
from megatron_elastic.errors import ConfigError

TOKENS, WIDTH, TEACHER_WIDTH, ROWS, WORDS = 23, 7, 9, 32, 29


def _inputs(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "student_hidden": draw(TOKENS, WIDTH).requires_grad_(),
        "student_weight": draw(ROWS, WIDTH).requires_grad_(),
        "targets": torch.randint(0, WORDS, (TOKENS,), generator=generator),
        "teacher_hidden": draw(TOKENS, TEACHER_WIDTH),
        "teacher_weight": draw(ROWS, TEACHER_WIDTH),
        "loss_mask": (torch.rand(TOKENS, generator=generator) > 0.3).to(dtype),
    }


def _terms(**changes) -> OutputLossTerms:
    return OutputLossTerms(**({"vocab_size": WORDS, "kl_weight": 0.7, "ce_weight": 0.4, "chunk_tokens": 5} | changes))


def _grads(loss, inputs) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss.total * 1.7, (inputs["student_hidden"], inputs["student_weight"]))


@pytest.mark.parametrize("chunk_tokens", [1, 5, 8, 23, 100])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize(("kl_weight", "ce_weight"), [(1.0, 0.0), (0.0, 1.0), (0.7, 0.4)])
def test_values_and_gradients_equal_the_reference(chunk_tokens, temperature, kl_weight, ce_weight):
    inputs = _inputs()
    terms = _terms(kl_weight=kl_weight, ce_weight=ce_weight, temperature=temperature, chunk_tokens=chunk_tokens)
    ours, whole = chunked_output_loss(**inputs, terms=terms), reference_output_loss(**inputs, terms=terms)
    for a, b in zip(ours, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for a, b in zip(_grads(ours, inputs), _grads(whole, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_gradcheck():
    inputs = _inputs()
    hidden, weight = inputs.pop("student_hidden"), inputs.pop("student_weight")
    assert torch.autograd.gradcheck(lambda h, w: chunked_output_loss(h, w, **inputs, terms=_terms(temperature=1.5)).total, (hidden, weight))


def test_padded_rows_change_nothing_and_get_no_gradient():
    inputs = _inputs()
    before = chunked_output_loss(**inputs, terms=_terms())
    grad = _grads(before, inputs)[1]
    assert bool((grad[WORDS:] == 0).all())
    with torch.no_grad():
        inputs["student_weight"][WORDS:] = 50.0
        inputs["teacher_weight"][WORDS:] = -50.0
    assert torch.equal(chunked_output_loss(**inputs, terms=_terms()).total, before.total)


def test_kl_with_itself_is_exactly_zero():
    inputs = _inputs(torch.float32)
    inputs |= {"teacher_hidden": inputs["student_hidden"].detach(), "teacher_weight": inputs["student_weight"].detach()}
    loss = chunked_output_loss(**inputs, terms=_terms(kl_weight=1.0, ce_weight=0.0, temperature=2.0))
    assert loss.kl.item() == 0.0
    assert all(bool((grad == 0).all()) for grad in _grads(loss, inputs))


def test_masked_tokens_are_absent_even_when_broken():
    inputs = _inputs()
    expected = chunked_output_loss(**inputs, terms=_terms())
    kept = inputs["loss_mask"] > 0
    fewer = {name: value if name.endswith("weight") else value.detach()[kept] for name, value in inputs.items()}
    torch.testing.assert_close(chunked_output_loss(**fewer, terms=_terms()).total, expected.total, rtol=1e-12, atol=0)
    assert expected.num_tokens.item() == int(kept.sum())
    grads = _grads(expected, inputs)
    with torch.no_grad():
        inputs["student_hidden"][~kept] = float("nan")
        inputs["teacher_hidden"][~kept] = float("inf")
    inputs["targets"] = torch.where(kept, inputs["targets"], -100)
    broken = chunked_output_loss(**inputs, terms=_terms())
    assert torch.equal(broken.total, expected.total)
    for a, b in zip(_grads(broken, inputs), grads, strict=True):
        assert torch.equal(a, b)
    assert bool((grads[0][~kept] == 0).all())


def test_all_masked_is_zero_and_finite():
    inputs = _inputs()
    inputs["loss_mask"] = torch.zeros(TOKENS)
    loss = chunked_output_loss(**inputs, terms=_terms())
    assert [value.item() for value in loss] == [0.0, 0.0, 0.0, 0.0]
    assert all(bool((grad == 0).all()) for grad in _grads(loss, inputs))


def test_cross_entropy_without_a_teacher():
    inputs = _inputs()
    inputs |= {"teacher_hidden": None, "teacher_weight": None}
    terms = _terms(kl_weight=0.0, ce_weight=1.0)
    loss = chunked_output_loss(**inputs, terms=terms)
    torch.testing.assert_close(loss.total, reference_output_loss(**inputs, terms=terms).total, rtol=1e-12, atol=0)
    assert loss.kl.item() == 0.0


def test_the_gradient_of_a_view_reaches_its_base():
    inputs = _inputs()
    base = torch.randn(ROWS + 3, WIDTH + 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    grads = []
    for function in (chunked_output_loss, reference_output_loss):
        inputs["student_weight"] = base[:ROWS, :WIDTH]
        grads.append(torch.autograd.grad(function(**inputs, terms=_terms()).total, base)[0])
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-12)
    assert bool((grads[0][:, WIDTH:] == 0).all())


def test_terms_are_reported_at_weight_zero_and_the_teacher_gets_no_gradient():
    inputs = _inputs()
    inputs["teacher_hidden"].requires_grad_()
    loss = chunked_output_loss(**inputs, terms=_terms(ce_weight=0.0))
    assert loss.ce.item() > 0
    assert not loss.ce.requires_grad
    loss.total.backward()
    assert inputs["teacher_hidden"].grad is None


def test_frozen_head_and_no_grad():
    inputs = _inputs()
    inputs["student_weight"] = inputs["student_weight"].detach()
    (grad,) = torch.autograd.grad(chunked_output_loss(**inputs, terms=_terms()).total, inputs["student_hidden"])
    (expected,) = torch.autograd.grad(reference_output_loss(**inputs, terms=_terms()).total, inputs["student_hidden"])
    torch.testing.assert_close(grad, expected, rtol=1e-11, atol=1e-12)
    with torch.no_grad():
        assert not chunked_output_loss(**inputs, terms=_terms()).total.requires_grad


def test_bf16_inputs_use_fp32_mathematics():
    inputs = _inputs(torch.bfloat16)
    loss = chunked_output_loss(**inputs, terms=_terms())
    assert loss.total.dtype == torch.float32
    exact = {name: value.detach().double() if value.is_floating_point() else value for name, value in inputs.items()}
    torch.testing.assert_close(loss.total.double(), reference_output_loss(**exact, terms=_terms()).total, rtol=1e-6, atol=0)
    assert [grad.dtype for grad in _grads(loss, inputs)] == [torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("words_at_once", [1, 10, 29, 1000])
def test_a_bf16_weight_may_be_widened_in_blocks(words_at_once, monkeypatch):
    monkeypatch.setattr(losses, "WIDENED_WORDS", words_at_once)
    inputs = _inputs(torch.bfloat16)
    loss = chunked_output_loss(**inputs, terms=_terms())
    exact = {name: value.detach().double() if value.is_floating_point() else value for name, value in inputs.items()}
    for name in ("student_hidden", "student_weight"):
        exact[name].requires_grad_()
    whole = reference_output_loss(**exact, terms=_terms())
    torch.testing.assert_close(loss.total.double(), whole.total, rtol=1e-6, atol=0)
    for grad, expected in zip(_grads(loss, inputs), _grads(whole, exact), strict=True):
        # rounded to bf16 when it is formed, and again when it is scaled
        torch.testing.assert_close(grad.double(), expected, rtol=2.1 * 2**-8, atol=1e-6)


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor any operation returns, of one type or of any."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.numel, self._dtype = 0, dtype

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(value, torch.Tensor) and self._dtype in (None, value.dtype):
                self.numel = max(self.numel, value.numel())
        return out


def test_whole_logits_never_exist():
    tokens, words, width, chunk = 192, 96, 8, 16
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
    weight = torch.randn(words, width, generator=generator).requires_grad_()
    other = (torch.zeros(tokens, dtype=torch.long), hidden.detach() + 1, weight.detach(), torch.ones(tokens))
    terms = _terms(vocab_size=words, chunk_tokens=chunk, temperature=2.0)
    with _Largest() as seen:
        chunked_output_loss(hidden, weight, *other, terms).total.backward()
    assert seen.numel == max(chunk * words, tokens * width)
    with _Largest() as seen:
        reference_output_loss(hidden, weight, *other, terms).total.backward()
    assert seen.numel >= tokens * words  # the instrument does see whole logits


def test_a_whole_bf16_weight_never_exists_in_fp32(monkeypatch):
    tokens, words, width, block = 8, 96, 64, 10
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(words, width, generator=generator).bfloat16()
    other = (torch.zeros(tokens, dtype=torch.long), hidden.detach() + 1, weight, torch.ones(tokens))
    for words_at_once, largest in ((block, block * width), (words, words * width)):
        monkeypatch.setattr(losses, "WIDENED_WORDS", words_at_once)
        with _Largest(torch.float32) as seen:
            chunked_output_loss(hidden, weight, *other, _terms(vocab_size=words, chunk_tokens=4)).total.backward()
        assert seen.numel == largest


@pytest.mark.parametrize(
    ("changes", "terms", "message"),
    [
        ({"teacher_weight": torch.zeros(ROWS + 1, TEACHER_WIDTH)}, {}, "teacher's vocabulary has 33 rows, the student's 32"),
        ({}, {"vocab_size": 33}, "vocab_size 33 does not fit the 32 rows"),
        ({"teacher_hidden": None, "teacher_weight": None}, {}, "kl_weight 0.7 needs a teacher"),
        ({"teacher_weight": None}, {}, "teacher needs both"),
        ({"targets": None}, {}, "ce_weight 0.4 needs target"),
        ({"teacher_hidden": torch.zeros(TOKENS, 4)}, {}, "teacher's hidden states"),
        ({"loss_mask": torch.ones(4)}, {}, "loss mask: 4 tokens"),
        ({}, {"temperature": 0.0}, "temperature 0.0 must be positive"),
        ({}, {"chunk_tokens": 0}, "chunk_tokens 0 must be at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(changes, terms, message):
    with pytest.raises(ConfigError, match=message):
        chunked_output_loss(**(_inputs() | changes), terms=_terms(**terms))
