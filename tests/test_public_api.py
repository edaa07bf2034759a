"""What a user may import: every public name is there, documented and typed, and none of them costs torch before it is asked for.

Run: pytest tests/test_public_api.py
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.resources
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import megatron_elastic
from megatron_elastic.platform import prepare_platform

prepare_platform()

ROOT = Path(__file__).resolve().parent.parent
WITHOUT_TORCH = """
    AttentionShape AxisChoices AxisSpec CheckpointError CheckpointInfo ConfigError DataError ElasticAxis ElasticError ElasticSpace
    MambaShape MemoryTarget MlpShape ModelShape MoeShape ParallelContext PlanError Recipe SubmodelPlan UnsupportedError active_params
    build_space cost_function find_model_checkpoint flops_per_token load_recipe memory_bytes nearest_plan open_checkpoint parent_plan
    plan_cost resize total_params weight_bytes widths_of
""".split()
"""The public names that import no torch; the others compute with it."""


def heavy_after(code: str) -> str:
    """Which of the heavy packages a new interpreter has imported after `code`."""
    code += "\nimport sys; print(sorted({'torch', 'megatron', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_the_package_imports_nothing() -> None:
    code = "import sys, megatron_elastic; dir(megatron_elastic); print([n for n in sys.modules if n.startswith('megatron_elastic.')])"
    assert heavy_after(code).splitlines() == ["[]", "[]"]


def test_what_needs_no_torch_does_not_import_it() -> None:
    assert "torch" not in heavy_after(f"from megatron_elastic import {', '.join(WITHOUT_TORCH)}")
    others = set(megatron_elastic.__all__) - set(WITHOUT_TORCH)
    assert {"build_model", "elasticize", "extract", "generate"} <= others


def test_the_list_the_types_and_the_homes_of_the_names_agree() -> None:
    names = megatron_elastic.__all__
    assert len(set(names)) == len(names)
    tree = ast.parse(Path(megatron_elastic.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    homes = {name: f"megatron_elastic.{module}" for module, held in megatron_elastic._HOMES.items() for name in held}
    assert typed == homes and set(typed) == set(names)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'megatron_elastic' has no attribute 'elastify'"):
        megatron_elastic.elastify  # noqa: B018
    assert set(megatron_elastic.__all__) < set(dir(megatron_elastic))
    from megatron_elastic import layout  # a module that is not in the list is still found

    assert layout.__name__ == "megatron_elastic.layout"


@pytest.mark.parametrize("name", megatron_elastic.__all__)
def test_a_public_name_is_documented_and_typed(name: str) -> None:
    found = getattr(megatron_elastic, name)
    assert found.__module__.startswith("megatron_elastic."), found
    assert problems(found, name) == []


def problems(found: Any, name: str) -> list[str]:
    """What a class (its public methods included) or a function lacks."""
    lacking = [] if (found.__doc__ or "").strip() and not generated(found) else [f"{name} has no docstring"]
    if not inspect.isclass(found):
        return lacking + untyped(found, name)
    for key, member in vars(found).items():
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if isinstance(function, property):
            function = function.fget
        generated_init = key == "__init__" and dataclasses.is_dataclass(found)
        if inspect.isfunction(function) and not generated_init and (key == "__init__" or not key.startswith("_")):
            lacking += untyped(function, f"{name}.{key}")
            if key != "__init__" and not function.__doc__:
                lacking.append(f"{name}.{key} has no docstring")
    return lacking


def generated(found: Any) -> bool:
    """Whether a dataclass' docstring is only the signature that dataclass() writes."""
    return dataclasses.is_dataclass(found) and found.__doc__.startswith(f"{found.__name__}(")


def untyped(function: Any, name: str) -> list[str]:
    """The parameters, and the result, of a function that have no annotation."""
    function = inspect.unwrap(function)
    names = [key for key in inspect.signature(function).parameters if key not in ("self", "cls")]
    return [f"{name}: {key} has no type" for key in (*names, "return") if key not in function.__annotations__]


def test_types_are_shipped() -> None:
    assert importlib.resources.files("megatron_elastic").joinpath("py.typed").is_file()
    package_data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "py.typed" in package_data["megatron_elastic"]
