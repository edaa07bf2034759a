"""`validate`: a summary for a recipe that can run, every problem at once for one that cannot, all without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from megatron_elastic.cli.validate import command
from megatron_elastic.errors import ConfigError

TINY = Path(__file__).parent / "tiny.yaml"


def validate(*arguments):
    """Output of the command in this process. Errors propagate."""
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_a_good_recipe_is_summed_up(tmp_path):
    lines = validate(TINY, f"data.path={tmp_path}").splitlines()
    assert lines[0] == f"ok: {TINY}"
    assert lines[1] == "parent: 1,364,400 parameters, 774,576 active, 6 layers"
    assert lines[2].startswith("budgets: full, medium, small; elastic axes: hidden, ffn, moe_ffn")
    assert lines[3].startswith("stage parent (parent): ") and lines[4].startswith("stage short (elastic): ")
    assert not any(line.startswith("note:") for line in lines)


def test_per_layer_axes_are_named():
    choices = "elastic.axes.moe_ffn={choices: [192, 144, 96, 64], per_layer: true}"
    assert "elastic axes: hidden, ffn, moe_ffn (2 layers), shared_ffn" in validate(TINY, choices)


GPT = (
    *("model.layer_pattern=TX", "model.mamba=null", "elastic=null", "stages=[]"),
    "model.attention={heads: 8, kv_groups: 2, head_dim: 16, rope_base: 10000}",
)


def test_gpt_parents():
    assert validate(TINY, *GPT).splitlines()[1].endswith(" active, 2 layers")
    for override, message in [
        ("parallel.tensor=3", "parallel.tensor 3 does not divide model.mlp.ffn 512"),
        ("parallel.tensor=3", "parallel.tensor 3 does not divide model.attention.heads 8"),
        ("parallel.expert=3", "parallel.expert 3 does not divide model.moe.experts 8"),
        ("parallel.pipeline=4", "parallel.pipeline 4 does not divide the 2 layers of model.layer_pattern"),
    ]:
        with pytest.raises(ConfigError) as caught:
            validate(TINY, *GPT, override)
        assert message in str(caught.value)
    with pytest.raises(ConfigError, match="parallel.expert 2 needs a mixture of experts"):
        validate(TINY, *GPT, "model.layer_pattern=TT", "parallel.expert=2")


def test_sizes_of_every_layer_are_checked_against_the_layout():
    uneven = (*GPT, "model.layer_pattern=TT", "model.mlp={ffn: [512, 384]}")
    assert "ok:" in validate(TINY, *uneven, "parallel.tensor=2")
    with pytest.raises(ConfigError) as caught:
        validate(TINY, *uneven, "parallel.tensor=256")
    assert any(line.startswith("parallel.tensor 256 does not divide model.mlp.ffn 384") for line in caught.value.problems)


def test_steps_and_tokens_of_a_stage():
    output = validate(TINY, "stages.short.steps=7", "stages.short.warmup_steps=2", "stages.short.global_batch_size=16")
    assert "stage short (elastic): 7 steps of 16 x 256, 28,672 tokens" in output


def test_notes_about_data():
    assert "note: data.path 'nowhere' is not there yet; write it with `megatron-elastic data`" in validate(TINY, "data.path=nowhere")
    assert "note: no data section: this recipe can be planned, not trained; set data.path" in validate(TINY, "data=null")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["elastic.budgets.small=0.01"],
            "elastic.budgets.small: no plan nested in the larger budgets costs 7745.76 within 0.02; the nearest",
        ),
        (["elastic.budgets.small=0.9"], "elastic.budgets.small: no plan nested in the larger budgets costs"),
        (
            ["elastic.budgets.medium={plan: {hidden: 64}}", "elastic.budgets.small={plan: {ffn: 128}}"],
            "elastic.budgets.small: its pinned plan is not nested",
        ),
        (
            ["stages.short.global_batch_size=36", "stages.short.micro_batch_size=4"],
            "global_batch_size 36 is not a multiple of router.samples_per_decision 8",
        ),
        (
            ["router.samples_per_decision=8", "stages.short.micro_batch_size=16"],
            "micro_batch_size 16 x 1 replicas that share experts (parallel.expert 1) = 16 samples are computed together",
        ),
        (
            ["parallel.expert=2", "stages.short.micro_batch_size=8"],
            "micro_batch_size 8 x 2 replicas that share experts (parallel.expert 2) = 16 samples are computed together",
        ),
        (["parallel.pipeline=4"], "parallel.pipeline 4 does not divide the 6 layers of model.layer_pattern"),
        (["parallel.pipeline=2", "parallel.virtual_pipeline=2"], "parallel.pipeline 2 x virtual_pipeline 2 does not divide the 6 layers"),
        (["parallel.virtual_pipeline=2"], "parallel.virtual_pipeline 2 needs parallel.pipeline above 1; set it to 1"),
        (["parallel.sequence_parallel=true"], "parallel.sequence_parallel true needs parallel.tensor above 1; remove it"),
        (["parallel.tensor=2", "parallel.sequence_parallel=false"], "megatron-core trains experts under tensor parallelism with it only"),
        (
            ["parallel.tensor=2", "parallel.expert=2", "parallel.expert_tensor=4"],
            "parallel.expert_tensor 4 does not divide elastic.shard_groups 2",
        ),
        (
            ["elastic=null", "stages=[]", "parallel.context=4", "parallel.expert=2", "parallel.expert_tensor=3"],
            "parallel.expert 2 x expert_tensor 3 = 6 ranks and tensor 1 x context 4 = 4 ranks: one must divide the other",
        ),
        (
            ["parallel.context=2", "parallel.tensor=2", "stages.short.sequence_length=130", "stages.short.micro_batch_size=1"],
            "micro_batch_size 1 x sequence_length 130 = 130 tokens are cut into 8 (parallel.tensor 2, context 2); use a multiple",
        ),
        (
            ["elastic=null", "stages=[]", "parallel.dispatcher=allgather", "model.layer_pattern=M*-M"],
            "parallel.dispatcher 'allgather' needs a mixture of experts; remove it",
        ),
        (
            ["elastic=null", "stages=[]", "parallel.context=3"],
            "parallel.context 3: a tensor-parallel rank has 4 of the 4 model.mamba.groups, and one number must divide the other",
        ),
        (["parallel.tensor=2", "model.padded_vocab_size=265"], "parallel.tensor 2 does not divide model.padded_vocab_size 265"),
        (["elastic=null", "stages=[]", "parallel.tensor=3"], "parallel.tensor 3 does not divide model.mlp.ffn 512"),
        (
            ["elastic=null", "stages=[]", "parallel.tensor=3"],
            "parallel.tensor 3 is neither a divisor nor a multiple of model.attention.kv_groups 2; change one",
        ),
        (["elastic=null", "stages=[]", "parallel.expert=3"], "parallel.expert 3 does not divide model.moe.experts 8"),
        (
            ["elastic=null", "stages=[]", "parallel.expert=2", "model.layer_pattern=M*-M"],
            "parallel.expert 2 needs a mixture of experts; set it to 1",
        ),
        (
            ["elastic.cost=flops", "stages.long.sequence_length=1000"],
            "the last stage's sequence_length 1000 is not a multiple of model.mamba.chunk 32; use 992",
        ),
        (["elastic.axes.hidden=[128, 0.3]"], "elastic.axes.hidden: fraction 0.3 of 128 is 38.4"),
        (
            ["elastic.axes.moe_ffn={choices: [192, 96], per_layer: true}", "elastic.budgets.small={plan: {moe_ffn: [96, 96, 96]}}"],
            "elastic.budgets.small.plan: moe_ffn names 3 widths, but it has 2 layers",
        ),
    ],
)
def test_each_problem_has_its_message(overrides, message):
    with pytest.raises(ConfigError) as caught:
        validate(TINY, *overrides)
    assert message in str(caught.value)


def test_problems_come_together():
    with pytest.raises(ConfigError) as caught:
        validate(TINY, "parallel.pipeline=4", "elastic.budgets.small=0.01", "stages.short.global_batch_size=36")
    assert len(caught.value.problems) == 3


def test_torch_is_not_imported():
    script = (
        "import sys, typer; from megatron_elastic.cli.validate import command; app = typer.Typer(); app.command()(command); "
        "app(sys.argv[1:2], standalone_mode=False); app(sys.argv[1:], standalone_mode=False); "
        "print('torch' in sys.modules, 'megatron' in sys.modules)"
    )
    on_cluster = [str(TINY), "data=null", "--cluster", "cpu", "--nodes", "2"]
    done = subprocess.run([sys.executable, "-c", script, *on_cluster], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False False"
