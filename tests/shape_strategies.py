"""Random shapes, spaces and plans for hypothesis: awkward on purpose, every part optional, sizes mostly different."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from megatron_elastic.axes import ElasticAxis, SubmodelPlan
from megatron_elastic.shape import AttentionShape, MambaShape, MlpShape, ModelShape, MoeShape, parent_plan

quick = settings(deadline=None, max_examples=60)
"""A loaded machine must not fail a test; these properties show themselves in few examples."""

SIZES = st.integers(1, 9)


@st.composite
def shapes(draw: st.DrawFn, letters: str = "M*-E") -> ModelShape:
    """A model of one to seven layers of the given kinds, with or without biases, ties and padding."""
    pattern = draw(st.text(letters, min_size=1, max_size=7))
    bias = draw(st.booleans()) and "E" not in pattern
    kv, groups, vocab = draw(SIZES), draw(st.integers(1, 4)), draw(st.integers(5, 40))
    experts = draw(st.integers(1, 6))
    return ModelShape(
        layer_pattern=pattern,
        hidden_size=draw(st.integers(2, 30)),
        vocab_size=vocab,
        padded_vocab_size=draw(st.sampled_from([None, vocab, vocab + 3])),
        tied_embeddings=draw(st.booleans()),
        linear_bias=bias,
        attention=AttentionShape(heads=kv * draw(SIZES), kv_groups=kv, head_dim=draw(SIZES), qkv_bias=draw(st.booleans()))
        if "*" in pattern
        else None,
        mlp=MlpShape(ffn=draw(st.integers(1, 40))) if "-" in pattern else None,
        moe=MoeShape(
            experts=experts,
            topk=draw(st.integers(1, experts)),
            ffn=draw(st.integers(1, 20)),
            shared_ffn=draw(st.sampled_from([None, 3, 17])),
        )
        if "E" in pattern
        else None,
        mamba=MambaShape(heads=groups * draw(SIZES), head_dim=draw(SIZES), groups=groups, state=draw(SIZES), conv=draw(st.integers(2, 5)))
        if "M" in pattern
        else None,
    )


@st.composite
def plans(draw: st.DrawFn, shape: ModelShape) -> SubmodelPlan:
    """Any plan of a shape: every width from its unit up, any layers dropped."""
    units = {
        ElasticAxis.HEADS: shape.attention.kv_groups if shape.attention else 1,
        ElasticAxis.MAMBA_HEADS: shape.mamba.groups if shape.mamba else 1,
    }
    least = {ElasticAxis.EXPERTS: shape.moe.topk if shape.moe else 1}
    widths = {}
    for axis, parent in parent_plan(shape).widths:
        unit = units.get(axis, 1)
        widths[axis] = unit * draw(st.integers(least.get(axis, 1), parent // unit))
    dropped = draw(st.sets(st.integers(0, shape.num_layers - 1)))
    return SubmodelPlan.of(widths, tuple(dropped))
