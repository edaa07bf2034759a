"""Recipe files as plain data: YAML in, overrides applied, and every key and kind of value checked against the dataclasses.

An override is `key.sub=value`, or `@FILE`: a YAML mapping of such keys and values, which means the same assignments in the file's order.

Everything wrong is reported with its full key and, for an unknown key, the nearest one that exists. Plain Python, no torch.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_elastic.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML in which `3e-4` is a number (PyYAML follows YAML 1.1, where it is a string)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"),
    list("-+0123456789."),
)
# Integers must win over the wider float pattern above: the first resolver that matches decides.
for _first in "-+0123456789":
    _Loader.yaml_implicit_resolvers[_first] = sorted(_Loader.yaml_implicit_resolvers[_first], key=lambda pair: not pair[0].endswith(":int"))


def read_yaml(path: Path, *, what: str = "recipe", remedy: str = "see recipes/ for examples") -> dict[str, Any]:
    """The mapping in a YAML file.

    what: its kind in words; remedy: what to do when it is missing. Raises ConfigError for one that is missing, not YAML or something else.
    """
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506 - a SafeLoader with one more number format
    except FileNotFoundError:
        raise ConfigError(f"no {what} at {str(path)!r}; {remedy}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; give a file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a YAML file: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a {what} is a mapping of keys, not {type(data).__name__}")
    return data


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`data` with overrides applied in order: `key.sub=value` (the value is YAML; a stage is named as `stages.NAME.key`), or `@FILE`."""
    data = copy.deepcopy(data)  # keeps the order of keys: the first budget is the parent
    for text in overrides:
        if text.startswith("@"):
            for key, value in _read_overrides(Path(text[1:])).items():
                _assign(data, str(key), value, f"{text}: {key}")
            continue
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise ConfigError(f"override {text!r} must be key=value or @FILE, for example optimizer.clip_grad=0.5")
        _assign(data, key, _yaml_value(text, value), text)
    return data


def _read_overrides(path: Path) -> dict[str, Any]:
    """The mapping in the file of `@FILE`, named in full in errors: a shell leaves `~` after an `@` as it is."""
    remedy = "write @ and a path, absolute or from the directory that the command is started in"
    return read_yaml(path.absolute(), what="file of overrides", remedy=remedy)


def _yaml_value(text: str, value: str) -> Any:
    try:
        return yaml.load(value, Loader=_Loader)  # noqa: S506 - a SafeLoader with one more number format
    except yaml.YAMLError as error:
        raise ConfigError(f"override {text!r}: the value is not YAML: {' '.join(str(error).split())}") from None


def _assign(data: dict[str, Any], key: str, value: Any, text: str) -> None:
    """Set `key` in place. `stages.NAME.key` names a stage, and `stages.NAME=null` removes it."""
    node: Any = data
    *parents, last = key.split(".")
    for name in parents:
        if isinstance(node, list):
            node = _stage_named(node, name, text)
        else:
            child = node.get(name)
            node[name] = child if isinstance(child, dict | list) else {}
            node = node[name]
    if isinstance(node, list) and value is None:
        node.remove(_stage_named(node, last, text))
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise ConfigError(f"override {text!r}: {key!r} needs the name of a stage, as in stages.NAME.steps=10")


def _stage_named(stages: list[Any], name: str, text: str) -> dict[str, Any]:
    named = [item for item in stages if isinstance(item, dict) and item.get("name") == name]
    if not named:
        raise ConfigError(f"override {text!r}: no stage is named {name!r}; stages: {', '.join(str(i.get('name')) for i in stages)}")
    return named[0]


def key_problems(data: Any, kind: Any, path: str = "") -> list[str]:
    """Every key of `data` that the dataclass `kind` lacks (with the nearest one it has) or misses, and every value of plainly the wrong kind.

    path: the key of `data` with a trailing dot. What is checked here beside keys is what dacite lets pass or reports without
    the key: true and false where a number is wanted, one value where a list or a mapping is.
    """
    origin, args, key = typing.get_origin(kind), typing.get_args(kind), path[:-1]
    if dataclasses.is_dataclass(kind):
        return _field_problems(data, kind, path) if isinstance(data, dict) else [_wrong(key, data, "a mapping")]
    if origin in (typing.Union, types.UnionType):
        return _union_problems(data, args, path)
    if origin is tuple:
        if not isinstance(data, list):
            return [_wrong(key, data, "a list")]
        return [line for n, item in enumerate(data) for line in key_problems(item, args[0], f"{key}[{n}].")]
    if origin is Mapping:
        if not isinstance(data, dict):
            return [_wrong(key, data, "a mapping")]
        return [line for name, item in data.items() for line in key_problems(item, args[1], f"{path}{name}.")]
    return [_wrong(key, data, "a number")] if kind in (int, float) and isinstance(data, bool) else []


def _union_problems(data: Any, kinds: tuple[Any, ...], path: str) -> list[str]:
    """Problems of a value that may be of several kinds: a mapping is the dataclass, a list the tuple, what else is a single value."""
    others = [kind for kind in kinds if kind is not type(None)]
    if data is None and len(others) < len(kinds):
        return []
    parts = [kind for kind in others if dataclasses.is_dataclass(kind)]
    lists = [kind for kind in others if typing.get_origin(kind) is tuple]
    if len(others) == 1 or (parts and isinstance(data, dict)):
        return key_problems(data, (parts or others)[0], path)
    if lists and (isinstance(data, list) or len(parts) + len(lists) == len(others)):
        return key_problems(data, lists[0], path)
    return [_wrong(path[:-1], data, "a number")] if isinstance(data, bool) and bool not in kinds else []


def _field_problems(data: dict[str, Any], kind: Any, path: str) -> list[str]:
    hints = typing.get_type_hints(kind)
    required = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
    problems = [f"{path}{name} is missing; add it" for name in required if name not in data]
    for name, value in data.items():
        if name in hints:
            problems += key_problems(value, hints[name], f"{path}{name}.")
        else:
            near = difflib.get_close_matches(str(name), hints, 1)
            problems.append(
                f"{path}{name} is not a known key; " + (f"did you mean {path}{near[0]}?" if near else f"keys: {', '.join(hints)}")
            )
    return problems


def _wrong(key: str, value: Any, wanted: str) -> str:
    return f"{key} {value!r} ({type(value).__name__}) must be {wanted}"


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested plain data as one mapping from dotted keys to values; a list of named items counts as a mapping by name."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, list) and value and all(isinstance(item, Mapping) and "name" in item for item in value):
            value = {item["name"]: item for item in value}
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return flat
