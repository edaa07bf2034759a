"""What we and the stand-in rely on in megatron-core's `extensions/transformer_engine.py`, compared with the installed wheel by its syntax
tree: signatures, what it passes to Transformer Engine, the attributes we read. A new release that differs fails here, by name.

Run: pytest tests/elastic/test_te_contract.py
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from megatron_elastic.platform.versions import Generation, megatron_generation

ROOT = Path(__file__).parents[2]
STAND_IN = ROOT / "tests/te_stand_in/transformer_engine/pytorch"

LINEAR = "self, input_size, output_size, *, "
COLUMN = (
    LINEAR + "config, init_method, gather_output, bias, skip_bias_add, is_expert, skip_weight_param_allocation=False, "
    "tp_comm_buffer_name=None, tp_group=None, stride=1"
)
ROW = LINEAR + "config, init_method, bias, input_is_parallel, skip_bias_add, is_expert, tp_comm_buffer_name=None, tp_group=None"
NAMED = ", name=None"
ATTENTION = (
    "self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None, softmax_scale=None, k_channels=None, "
    "v_channels=None, num_splits=None, cp_comm_type='p2p', pg_collection=None"
)
ATTEND = "self, query, key, value, attention_mask, attn_mask_type, attention_bias=None, packed_seq_params=None, num_splits=None"
FORWARD = {
    ("TELinear", "forward"): "self, x",
    ("TELayerNormColumnParallelLinear", "forward"): "self, x",
    ("TEDotProductAttention", "__init__"): ATTENTION,
    ("TEDotProductAttention", "forward"): ATTEND,
}
SIGNATURES = {
    Generation.V0_16: FORWARD
    | {
        ("TENorm", "__new__"): "cls, config, hidden_size, eps=1e-05",
        ("TELayerNormColumnParallelLinear", "__init__"): COLUMN,
        ("TEColumnParallelLinear", "__init__"): COLUMN,
        ("TERowParallelLinear", "__init__"): ROW,
    },
    Generation.V0_19: FORWARD
    | {
        ("TENorm", "__new__"): "cls, config, hidden_size, eps=1e-05, has_residual=False",
        ("TELayerNormColumnParallelLinear", "__init__"): COLUMN + NAMED,
        ("TEColumnParallelLinear", "__init__"): COLUMN + NAMED,
        ("TERowParallelLinear", "__init__"): ROW + NAMED,
    },
}
BASES = {
    "TELinear": ("Linear", "linear_modules.py"),
    "TELayerNormColumnParallelLinear": ("LayerNormLinear", "linear_modules.py"),
    "TEDotProductAttention": ("DotProductAttention", "attention_module.py"),
}
"""Extension class -> what it subclasses, and the stand-in's file of it."""
UNUSED = {
    *("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_wgrad", "ub_bulk_dgrad", "ub_name"),  # tp_comm_overlap
    *("ub_split_ag", "ub_split_rs", "ub_atomic_gemm_ag", "ub_atomic_gemm_rs"),  # the same for old releases
    *("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type"),  # context parallelism: refused
    *("delay_wgrad_compute", "softmax_type"),  # refused
    *("symmetric_ar_type", "window_size", "return_max_logit", "num_splits"),  # settings a ModelShape cannot say
    *("core_attention_bias_type", "core_attention_bias"),  # causal self-attention has none
}
"""Keywords megatron-core passes under settings we do not use; the stand-in does not know them."""


def classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    """Every class of a file, by name."""
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def stand_in(file: str) -> dict[str, ast.ClassDef]:
    """The classes of one file of the stand-in."""
    return classes(ast.parse((STAND_IN / file).read_text()))


@pytest.fixture(scope="module")
def extension() -> ast.Module:
    """The installed megatron-core's extension module."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    return ast.parse((Path(spec.origin).parent / "extensions/transformer_engine.py").read_text())


@pytest.fixture(scope="module")
def wheel(extension: ast.Module) -> dict[str, ast.ClassDef]:
    """Its classes."""
    return classes(extension)


def method(cls: ast.ClassDef, name: str) -> ast.FunctionDef:
    """One method of a class."""
    return next(node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == name)


def signature(function: ast.FunctionDef) -> str:
    """Names, order, defaults and keyword-only marks of a function's arguments, without annotations."""
    arguments = function.args
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        argument.annotation = None
    return ast.unparse(arguments)


def test_signatures_are_those_we_know(wheel: dict[str, ast.ClassDef]) -> None:
    known = SIGNATURES[megatron_generation()]
    assert {key: signature(method(wheel[key[0]], key[1])) for key in known} == known


def test_the_classes_subclass_what_the_stand_in_offers(wheel: dict[str, ast.ClassDef]) -> None:
    for name, (base, file) in BASES.items():
        assert ast.unparse(wheel[name].bases[0]) == f"te.pytorch.{base}"
        assert base in stand_in(file)
    for name in ("TEColumnParallelLinear", "TERowParallelLinear"):
        assert ast.unparse(wheel[name].bases[0]) == "TELinear"


def passed_to_super(function: ast.FunctionDef, name: str) -> set[str]:
    """Keywords of `super().<name>(...)`, and those put into a dictionary that is unpacked there."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"super().{name}":
            found |= {keyword.arg for keyword in node.keywords if keyword.arg is not None}
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript) and "kwargs" in ast.unparse(node.targets[0].value):
            found.add(ast.literal_eval(node.targets[0].slice))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict":
            found |= {keyword.arg for keyword in node.keywords if keyword.arg is not None}
    return found


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("call", ["__init__", "forward"])
def test_the_stand_in_takes_what_megatron_passes(wheel: dict[str, ast.ClassDef], name: str, call: str) -> None:
    base, file = BASES[name]
    function = method(stand_in(file)[base], call).args
    taken = {argument.arg for argument in [*function.args, *function.kwonlyargs]}
    always = {"params_dtype", "device"} if call == "__init__" and name != "TEDotProductAttention" else set()  # _get_extra_te_kwargs
    passed = passed_to_super(method(wheel[name], call), call) | always
    assert len(passed) > (0 if call == "forward" else 8), "found nothing that is passed: the test proves nothing"
    assert passed - taken - UNUSED == set(), "megatron-core passes these, the stand-in does not know them"
    unused_by_megatron = taken - passed - {"self", "inp", "query_layer", "key_layer", "value_layer", "attention_mask"}
    assert call == "forward" or unused_by_megatron == set(), "the stand-in takes these, megatron-core does not pass them"


def test_the_stand_ins_norms_take_what_megatron_passes(wheel: dict[str, ast.ClassDef]) -> None:
    calls = [node for node in ast.walk(method(wheel["TENorm"], "__new__")) if isinstance(node, ast.Call)]
    built = [call for call in calls if ast.unparse(call.func) in ("te.pytorch.LayerNorm", "te.pytorch.RMSNorm", "norm_module")]
    passed = {keyword.arg for call in built for keyword in call.keywords if keyword.arg is not None}
    taken = {argument.arg for argument in method(stand_in("norm_modules.py")["_Norm"], "__init__").args.args}
    assert len(passed) >= 4 and passed <= taken


def assigned(cls: ast.ClassDef) -> set[str]:
    """Attributes a class gives itself."""
    targets = [target for node in ast.walk(cls) if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in ast.walk(cls) if isinstance(node, ast.AnnAssign)]
    parts = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return {part.attr for part in parts if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self"}


def test_the_attributes_we_read_are_there(extension: ast.Module, wheel: dict[str, ast.ClassDef]) -> None:
    source = ast.parse((ROOT / "megatron_elastic/elastic/te.py").read_text())
    attributes = [node for node in ast.walk(source) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    ours = {"site", "norm_site", "_normalize"}
    read = {node.attr for node in attributes if ast.unparse(node.value) in ("linear", "self", "module")} - ours
    megatrons = {"te_return_bias", "_tp_group"}
    for name in ("TELinear", "TELayerNormColumnParallelLinear"):
        assert megatrons <= assigned(wheel[name])
    offered = set().union(*(assigned(cls) for file in ("linear_modules.py", "norm_modules.py") for cls in stand_in(file).values()))
    assert read - megatrons == read & offered, "the stand-in does not offer these"
    used = {node.attr for node in ast.walk(extension) if isinstance(node, ast.Attribute)}
    assert read <= used, "megatron-core does not read these of Transformer Engine's modules: they may be the stand-in's only"
