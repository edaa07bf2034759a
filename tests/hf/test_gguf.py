"""GGUF files in: the directory made of one gives the logits of the model it was written from; what cannot be honoured is refused by name."""

from __future__ import annotations

import json
import re
import resource
import struct
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml
from gguf import GGMLQuantizationType
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from megatron_elastic.errors import CheckpointError, ElasticError, UnsupportedError
from megatron_elastic.hf.gguf import convert_gguf, find_gguf
from tests.hf.gguf_writer import write_gguf

F32 = GGMLQuantizationType.F32
LETTERS = sorted(ByteLevel.alphabet())
MERGES = ["1 2", "Ġ t", "h e", "Ġt he"]
TOKENS = ["<unk>", "<s>", "</s>", *LETTERS, *(merge.replace(" ", "") for merge in MERGES), "Ġit", "<tool>"]
TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (len(TOKENS) - 4), 4],
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    "general.license": "apache-2.0",
}
# No two sizes alike.
SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 176,
    "rms_norm_eps": 1e-4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def model_directory(directory: Path, config: PretrainedConfig) -> Path:
    """A model with random weights, none of them at its start."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory(tmp_path_factory.mktemp("llama"), LlamaConfig(**SIZES, tie_word_embeddings=True))


@pytest.fixture
def write(llama: Path, tmp_path: Path) -> Callable[..., Path]:
    """write(**options of write_gguf) -> a GGUF file of the llama model."""

    def write_file(**options: Any) -> Path:
        file = tmp_path / "model.gguf"
        write_gguf(llama, file, **{"kind": F32, "tokenizer": TOKENIZER, **options})
        return file

    return write_file


def converted(file: Path) -> Path:
    directory = file.parent / "converted"
    directory.mkdir(exist_ok=True)
    convert_gguf(file, directory)
    return directory


def logits(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.arange(40)[None] * 7 % SIZES["vocab_size"]).logits


CONFIGS: dict[str, PretrainedConfig] = {
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2: biases": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3: q/k norm": Qwen3Config(**SIZES, tie_word_embeddings=False),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_directory_gives_the_logits_of_the_model_the_file_was_written_from(name: str, tmp_path: Path) -> None:
    source = model_directory(tmp_path / "source", CONFIGS[name])
    write_gguf(source, tmp_path / "model.gguf", kind=F32, tokenizer=TOKENIZER)
    directory = converted(tmp_path / "model.gguf")
    torch.testing.assert_close(logits(directory), logits(source), rtol=1e-5, atol=1e-5)
    before, after = (json.loads((path / "config.json").read_text()) for path in (source, directory))
    assert {key: after[key] for key in before if key in SIZES} == {key: before[key] for key in before if key in SIZES}
    assert after["tie_word_embeddings"] == before["tie_word_embeddings"] and after["dtype"] == "float32"


def test_a_quantised_file_gives_its_own_rounding_of_the_weights(write: Callable[..., Path], llama: Path) -> None:
    directory = converted(write(kind=GGMLQuantizationType.F16))
    torch.testing.assert_close(logits(directory), logits(llama), rtol=0.02, atol=0.02)
    assert not torch.equal(logits(directory), logits(llama))


def test_experts_come_out_one_by_one(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(**SIZES, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)
    source = model_directory(tmp_path / "source", config)
    write_gguf(source, tmp_path / "model.gguf", kind=F32, tokenizer=TOKENIZER)
    torch.testing.assert_close(logits(converted(tmp_path / "model.gguf")), logits(source), rtol=1e-5, atol=1e-5)
    write_gguf(source, tmp_path / "model.gguf", kind=F32, tokenizer=TOKENIZER, leave_out=("blk.1.ffn_gate_exps.weight",))
    with pytest.raises(CheckpointError, match=r"tensor blk\.1\.ffn_gate_exps\.weight is missing"):  # transformers would take zeros
        convert_gguf(tmp_path / "model.gguf", tmp_path)


def test_the_tokenizer_and_the_licence_come_along(write: Callable[..., Path]) -> None:
    directory = converted(write())
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = "the 12 ways</s> it<tool>s"
    pieces = ["t", "he", "Ġ", "1", "2", "Ġ", "w", "a", "y", "s", "</s>", "Ġ", "i", "t", "<tool>", "s"]
    assert tokenizer.tokenize(text) == pieces  # digits are cut before "12" could be merged
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "hello"
    assert json.loads((directory / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 2
    assert "license: apache-2.0" in (directory / "README.md").read_text()


def test_a_first_word_is_added_where_the_file_says_so(write: Callable[..., Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted(write(extra={"tokenizer.ggml.pre": "llama-bpe"})))
    assert tokenizer.convert_ids_to_tokens(tokenizer("the 12 it")["input_ids"]) == ["<s>", "t", "he", "Ġ", "12", "Ġit"]


@pytest.mark.parametrize("shown", [True, False])
def test_transformers_draws_no_bars_that_can_be_switched_off(
    shown: bool, write: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.utils.logging, "_tqdm_active", shown)
    for options in ({}, {"extra": {"llama.feed_forward_length": 80}}):
        file = write(**options)
        capsys.readouterr()
        with pytest.raises(CheckpointError) if options else nullcontext():
            converted(file)
        assert set(re.findall(r"\r([\w -]+)", capsys.readouterr().err)) <= {"Converting and de-quantizing GGUF tensors"}
        assert transformers.utils.logging.is_progress_bar_enabled() is shown, "as it was"


def test_a_file_without_tokenizer_gives_a_directory_without_one(write: Callable[..., Path]) -> None:
    directory = converted(write(tokenizer={}))
    assert {file.name for file in directory.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}


def test_a_file_is_found_by_its_name_or_alone_in_a_directory(tmp_path: Path) -> None:
    assert find_gguf(tmp_path) is None and find_gguf(tmp_path / "missing") is None
    (tmp_path / "a.gguf").touch()
    assert find_gguf(tmp_path) == find_gguf(tmp_path / "a.gguf") == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(CheckpointError, match=r"several GGUF files \(a\.gguf, b\.gguf\); name one"):
        find_gguf(tmp_path)
    assert find_gguf(tmp_path / "b.gguf") == tmp_path / "b.gguf"


REFUSED: dict[str, tuple[dict[str, Any], type[ElasticError], str]] = {
    "architecture": (
        {"extra": {"general.architecture": "mamba"}},
        UnsupportedError,
        "general.architecture 'mamba' is not supported, only llama",
    ),
    "rotary scaling": (
        {"extra": {"llama.rope.scaling.factor": 4.0}},
        UnsupportedError,
        "key llama.rope.scaling.factor = 4.0 is not supported",
    ),
    "experts": ({"extra": {"llama.expert_count": 8}}, UnsupportedError, "key llama.expert_count = 8 is not supported"),
    "partial rotary": (
        {"extra": {"llama.rope.dimension_count": 10}},
        UnsupportedError,
        r"llama.attention.key_length = 20 and another key that means head_dim = 10 differ",
    ),
    "a width per layer": (
        {"extra": {"llama.feed_forward_length": [88, 88, 80]}},
        UnsupportedError,
        "llama.feed_forward_length has a value per layer",
    ),
    "biases": ({"add": {"blk.1.attn_q.bias": np.ones(120)}}, UnsupportedError, "tensor blk.1.attn_q.bias has no place in a llama model"),
    "rotary factors": ({"add": {"rope_freqs.weight": np.ones(10)}}, UnsupportedError, "tensor rope_freqs.weight has no place"),
    "another tokenizer": (
        {"extra": {"tokenizer.ggml.model": "llama"}},
        UnsupportedError,
        "tokenizer.ggml.model 'llama' with tokenizer.ggml.pre 'smollm' is not supported, only 'gpt2' with gpt-2, smollm",
    ),
    "another way to cut": ({"extra": {"tokenizer.ggml.pre": "tekken"}}, UnsupportedError, "tokenizer.ggml.pre 'tekken' is not supported"),
    "an end added": ({"extra": {"tokenizer.ggml.add_eos_token": True}}, UnsupportedError, "add_eos_token true is not supported"),
    "no heads": (
        {"extra": {"llama.attention.head_count": 0}, "leave_out": ("llama.attention.key_length",)},
        CheckpointError,
        "llama.attention.head_count = 0 is not a number above 0",
    ),
    "a word for a number": (
        {"extra": {"llama.embedding_length": "many"}},
        CheckpointError,
        "llama.embedding_length = 'many' is not a number above 0",
    ),
    "a fraction of a layer": (
        {"extra": {"llama.block_count": 2.5}},
        UnsupportedError,
        "transformers has no such llama model: Validation error for field 'num_hidden_layers'",
    ),
    "hidden that heads do not divide": (
        {"extra": {"llama.attention.head_count": 5}},
        UnsupportedError,
        r"transformers has no such llama model: .*The hidden size \(48\) is not a multiple of the number of attention heads \(5\)\.",
    ),
    "heads that their rows do not divide": (
        {"extra": {"llama.attention.head_count": 16, "llama.attention.head_count_kv": 16}},
        CheckpointError,
        "its tensors do not fit its keys",
    ),
    "missing tensor": ({"leave_out": ("blk.2.ffn_up.weight",)}, CheckpointError, r"tensor blk\.2\.ffn_up\.weight is missing"),
    "missing embedding": ({"leave_out": ("token_embd.weight",)}, CheckpointError, r"incomplete GGUF file: no tensor token_embd\.weight"),
    "missing key": ({"leave_out": ("llama.block_count",)}, CheckpointError, r"incomplete GGUF file: no key llama\.block_count"),
    "missing groups": (  # transformers would leave the rows of q and k in llama.cpp's order
        {"leave_out": ("llama.attention.head_count_kv",)},
        CheckpointError,
        r"incomplete GGUF file: no key llama\.attention\.head_count_kv",
    ),
    "shapes": (
        {"extra": {"llama.feed_forward_length": 80}},
        CheckpointError,
        r"(?s)do not fit its keys:.*tensor model\.layers\.0\.mlp\.up_proj\.weight has shape \[88, 48\] instead of \[80, 48\]",
    ),
    "part of a model": ({"extra": {"split.count": 3}}, CheckpointError, "one of 3 parts of a model; join them first"),
    "token types": (
        {"extra": {"tokenizer.ggml.token_type": [1]}},
        CheckpointError,
        r"\d+ tokenizer\.ggml\.tokens but 1 tokenizer\.ggml\.token_type",
    ),
    "special words": ({"extra": {"tokenizer.ggml.eos_token_id": 9999}}, CheckpointError, r"special words \{'eos': 9999\} are not among"),
    "negative special words": (
        {"extra": {"tokenizer.ggml.bos_token_id": -1}},
        CheckpointError,
        r"special words \{'bos': -1\} are not among the \d+ tokenizer",
    ),
    "negative special words without a tokenizer": (
        {"tokenizer": {"tokenizer.ggml.padding_token_id": -1}},
        CheckpointError,
        r"special words \{'pad': -1\} are not among the 0 tokenizer",
    ),
    "special words that are no number": (
        {"extra": {"tokenizer.ggml.eos_token_id": "end"}},
        CheckpointError,
        r"special words \{'eos': 'end'\} are not among",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(name: str, write: Callable[..., Path]) -> None:
    options, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message) as caught:
        converted(write(**options))
    assert len(str(caught.value).splitlines()) in (1, 1 + len(caught.value.problems))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "README.md"])
def test_a_full_disk_is_an_error_of_the_system(name: str, write: Callable[..., Path]) -> None:
    file = write()
    (file.parent / "converted").mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if name == "model.safetensors":  # it would replace a link
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        else:
            (file.parent / "converted" / name).symlink_to("/dev/full")
        with pytest.raises(OSError, match=r"No space left on device|File too large") as caught:
            converted(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(caught.value)


LICENCES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "plain": ({"general.license": "mit"}, {"license": "mit"}),
    "of YAML's signs": ({"general.license": "a: b # ünï\n---"}, {"license": "a: b # ünï\n---"}),
    "of its own": (
        {"general.license": "other", "general.license.name": "llama3.1", "general.license.link": "https://example.org/LICENSE"},
        {"license": "other", "license_name": "llama3.1", "license_link": "https://example.org/LICENSE"},
    ),
}


@pytest.mark.parametrize("case", LICENCES)
def test_a_licence_is_yaml(case: str, write: Callable[..., Path]) -> None:
    keys, header = LICENCES[case]
    text = (converted(write(tokenizer=keys)) / "README.md").read_text(encoding="utf-8")
    assert text.startswith("---\n") and text.endswith("\n---\n") and yaml.safe_load(text[4:-4]) == header


def test_words_beyond_ascii_whatever_the_locale(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("io.text_encoding", lambda encoding, stacklevel=2: encoding or "ascii")  # as Python has it in a locale of ASCII
    directory = converted(write(extra={"tokenizer.ggml.tokens": ["<unk>", "<s>", "<｜end▁of▁sentence｜>", *TOKENS[3:]]}))
    assert AutoTokenizer.from_pretrained(directory).eos_token == "<｜end▁of▁sentence｜>"


def test_a_quantisation_that_cannot_be_undone_is_named(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def dequantize(data: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
        raise NotImplementedError("Dequantization for Q8_K is not yet implemented")

    monkeypatch.setattr("gguf.dequantize", dequantize)
    with pytest.raises(UnsupportedError, match="Q8_K is not yet implemented; convert the file to another one first"):
        converted(write())


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(share: float, write: Callable[..., Path]) -> None:
    file = write()
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match=r"truncated or damaged GGUF file \(.*\); fetch it again"):
        converted(file)


@pytest.mark.parametrize("size", [4, 8, 20, 30])
def test_a_file_cut_inside_its_first_words_is_refused(size: int, write: Callable[..., Path]) -> None:
    file = write()
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="truncated or damaged GGUF file"):
        converted(file)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a pickle", struct.pack("<Q", 8) + b"{}      "])
def test_another_kind_of_file_is_not_read(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a GGUF file: it starts with b'.*' instead of b'GGUF'"):
        converted(tmp_path / "model.gguf")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing.gguf: cannot be read: No such file"):
        converted(tmp_path / "missing.gguf")


@pytest.mark.parametrize("package", ["gguf", "accelerate", "transformers"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    package: str, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write()
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(UnsupportedError, match=r'run: pip install "megatron-elastic\[hf,gguf\]"'):
        converted(file)
