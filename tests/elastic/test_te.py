"""Models of Transformer Engine's layers are elastic like those of the local ones: the same parameters, the same parent, masked = sliced =
extracted, the same soft decisions and layouts; what has no elastic form is refused by name.

Transformer Engine needs a GPU, so it is a stand-in in plain PyTorch under megatron-core's own extension classes (tests/te_stand_in). What
this cannot show: docs/gpu.md.

Run: pytest tests/elastic/test_te.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from megatron_elastic.errors import UnsupportedError
from megatron_elastic.layout import full_shapes
from megatron_elastic.models.build import build_model
from megatron_elastic.platform.te import transformer_engine
from tests.elastic import te_tasks
from tests.elastic.te_ranks import StandInRanks

pytestmark = pytest.mark.dist  # runs on ranks of its own
TOLERANCE = 1e-5
VARIANTS = list(te_tasks.VARIANTS)


@pytest.fixture(scope="module")
def te() -> Iterator[StandInRanks]:
    """te(task, *args, world=1): run a task where the stand-in is installed, and return the results in rank order."""
    ranks = StandInRanks()
    yield ranks
    ranks.close()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_parent_is_the_local_one(te: StandInRanks, variant: str) -> None:
    names, local_names, saved, local_saved, logits, grads = te(te_tasks.parameters_and_parent, variant)[0]
    assert names == local_names
    table = {name for name in full_shapes(te_tasks.VARIANTS[variant]()) if ".experts.experts." not in name}
    assert table - {"output_layer.weight"} <= names.keys() | {name for name in table if "expert_bias" in name}
    assert saved == local_saved
    assert logits < 1e-6 and grads < 1e-6


@pytest.mark.parametrize("variant", VARIANTS)
def test_masked_sliced_and_extracted_agree(te: StandInRanks, variant: str) -> None:
    for axis, found in te(te_tasks.agreement, variant)[0].items():
        assert found.pop("another model than the parent") > 1e-3, f"{axis}: the plan changes nothing"
        for what, difference in found.items():
            assert difference < TOLERANCE * (10 if "gradients" in what else 1), f"{axis}: {what}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_full_budget_is_the_parent_bit_for_bit_and_nothing_stays(te: StandInRanks, variant: str) -> None:
    assert te(te_tasks.full_budget, variant) == [True]


@pytest.mark.parametrize("threshold", [0.0, 0.2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_soft_decisions_are_those_of_the_local_layers(te: StandInRanks, variant: str, threshold: float) -> None:
    for what, difference in te(te_tasks.soft_against_local, variant, threshold)[0].items():
        assert difference < 10 * TOLERANCE, what


@pytest.mark.parametrize(("variant", "overlap"), [("hybrid", False), ("dense", True), ("dense-layernorm", False), ("moe", True)])
def test_microbatches_of_different_modes_add_up_in_main_grad(te: StandInRanks, variant: str, overlap: bool) -> None:
    for name, difference in te(te_tasks.microbatches, variant, overlap)[0].items():
        assert difference < TOLERANCE, name


def test_kernels_run_in_mask_mode_and_never_on_a_cut_weight(te: StandInRanks) -> None:
    counts = te(te_tasks.kernel_calls, "dense")[0]
    assert counts["mask"] == counts["linears"] > 0
    assert counts["slice"] == 0
    unfused = te(te_tasks.kernel_calls, "dense-layernorm")[0]
    assert unfused["mask"] == unfused["linears"] // 2, "the norm-fused linears of a LayerNorm model are unfused while hidden is masked"


@pytest.mark.parametrize(
    ("variant", "layout"), [("hybrid", {"tensor": 2}), ("dense-layernorm", {"tensor": 2}), ("moe", {"tensor": 2}), ("moe", {"expert": 2})]
)
def test_layouts_are_those_of_the_local_layers(te: StandInRanks, variant: str, layout: dict[str, int]) -> None:
    for found in te(te_tasks.on_a_layout, variant, layout, world=2):
        for what, difference in found.items():
            assert difference < 10 * TOLERANCE, what


@pytest.mark.parametrize("variant", ["hybrid", "dense"])
def test_packed_documents_are_those_of_the_local_layers(te: StandInRanks, variant: str) -> None:
    assert te(te_tasks.packed, variant)[0] < TOLERANCE


@pytest.mark.parametrize("variant", ["dense", "dense-layernorm", "moe"])
def test_zero_centered_norm_weights(te: StandInRanks, variant: str) -> None:
    for what, difference in te(te_tasks.zero_centered, variant)[0].items():
        assert difference < TOLERANCE, what


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("grouped module", "decoder.layers.1.mlp.experts.linear_fc1 (GroupedLinear) holds parameters but has no elastic form"),
        ("moe_grouped_gemm", "moe_grouped_gemm True"),
        ("gradient_accumulation_fusion", "gradient_accumulation_fusion True"),
        ("delay_wgrad_compute", "delay_wgrad_compute True"),
        ("softmax_type", "softmax_type 'off-by-one'"),
        ("fp8", "fp8 'hybrid': slice mode"),
    ],
)
def test_what_has_no_elastic_form_is_refused_by_name(te: StandInRanks, what: str, named: str) -> None:
    assert named in te(te_tasks.refusal, what)[0]


def test_auto_takes_transformer_engine_only_with_a_gpu(te: StandInRanks) -> None:
    kinds = [te(te_tasks.chosen, layers)[0] for layers in ("te", "local", "auto")]
    assert kinds == ["TELayerNormColumnParallelLinear", "LayerNormColumnParallelLinear", "LayerNormColumnParallelLinear"]


def test_transformer_engine_that_is_not_installed_is_refused(parallel: Any) -> None:
    if transformer_engine() is not None:
        pytest.skip("Transformer Engine is installed")
    with pytest.raises(UnsupportedError, match="layers 'te': Transformer Engine cannot be imported"):
        build_model(te_tasks.VARIANTS["dense"](), parallel, layers="te")
