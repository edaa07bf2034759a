"""Schedules meet their end points and shapes, and refuse values outside them."""

from __future__ import annotations

import pytest

from megatron_elastic.errors import ConfigError
from megatron_elastic.router import schedules


def test_temperature_is_geometric():
    assert schedules.temperature(0.0) == 1.0
    assert schedules.temperature(1.0) == pytest.approx(0.05)
    assert schedules.temperature(0.5) == pytest.approx(0.05**0.5)
    assert schedules.temperature(0.25, 2.0, 0.5) == pytest.approx(2.0 * 0.25**0.25)


def test_scale_and_tolerance_are_linear():
    assert [schedules.logit_scale(p) for p in (0.0, 0.5, 1.0)] == [1.0, 5.5, 10.0]
    assert [schedules.tolerance(p, end=0.01) for p in (0.0, 0.5, 1.0)] == pytest.approx([0.05, 0.03, 0.01])


def test_learning_rate_warms_up_then_falls_as_a_cosine():
    rates = [schedules.learning_rate(step, 4, 21, 1.0, 0.1) for step in range(21)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[12] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in zip(rates[4:], rates[5:], strict=False))
    assert schedules.learning_rate(0, 0, 10, 3.0, 0.0) == 3.0
    assert schedules.learning_rate(0, 0, 1, 3.0, 0.0) == 3.0


def test_refusals():
    with pytest.raises(ConfigError, match="warmup_steps 10 .* 10 steps"):
        schedules.learning_rate(0, 10, 10, 1.0, 0.0)
    with pytest.raises(ValueError, match="step 10"):
        schedules.learning_rate(10, 2, 10, 1.0, 0.0)
    with pytest.raises(ValueError, match=r"progress 1\.5"):
        schedules.temperature(1.5)
