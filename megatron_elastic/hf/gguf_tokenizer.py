"""The tokenizer inside a GGUF file, written as a Hugging Face tokenizer.

It is not left to transformers, whose conversion (5.14) takes the first special word for both ends of a text and forgets how the text is
cut before merging. Byte-level BPE only. The ways to cut are those that llama.cpp (src/llama-vocab.cpp) knows by the names in the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_elastic.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

_CONTROL, _USER_DEFINED = 3, 4
"""Values of tokenizer.ggml.token_type: words such as the end of a text, and words that are never cut."""

_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class TokenizerKeys:
    """What a GGUF file says about its tokenizer; `model` is None when it has none."""

    model: str | None
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    ids: dict[str, int]
    """bos, eos, unk, pad -> id, as far as the file names them."""
    add_bos: bool
    add_eos: bool
    chat_template: str | None

    @classmethod
    def read(cls, fields: dict[str, Any]) -> TokenizerKeys:
        """From all keys of a file with their values."""
        ggml = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items() if name.startswith("tokenizer.ggml.")}
        pre = ggml.get("pre", "default")
        words = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
        return cls(
            model=ggml.get("model"),
            pre=pre,
            tokens=ggml.get("tokens", []),
            types=ggml.get("token_type", []),
            merges=ggml.get("merges", []),
            ids={short: ggml[f"{word}_token_id"] for word, short in words.items() if f"{word}_token_id" in ggml},
            # Without the key llama.cpp goes by the kind of tokenizer.
            add_bos=ggml.get("add_bos_token", pre == "llama-bpe"),
            add_eos=ggml.get("add_eos_token", False),
            chat_template=fields.get("tokenizer.chat_template"),
        )

    def special_ids(self) -> dict[str, int]:
        """The ids as config.json names them: bos_token_id, eos_token_id, pad_token_id."""
        return {f"{name}_token_id": number for name, number in self.ids.items() if name != "unk"}

    def check(self, source: Path) -> None:
        """Raise UnsupportedError for a kind of tokenizer that is not supported, CheckpointError for one that contradicts itself.

        source: the GGUF file, for messages.
        """
        words = len(self.tokens) if self.model is not None else float("inf")
        ids = {name: number for name, number in self.ids.items() if not isinstance(number, int) or not 0 <= number < words}
        if ids or (self.add_bos and self.model is not None and "bos" not in self.ids):
            raise CheckpointError(f"{source}: special words {ids or 'bos'} are not among the {len(self.tokens)} tokenizer.ggml.tokens")
        if self.model is not None:
            _check_kind(source, self)


def save_tokenizer(keys: TokenizerKeys, directory: Path, *, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into `directory`; nothing when the file has no tokenizer.

    keys: checked. max_length: longest text of the model [tokens]. Raises OSError when the disk does not take it.
    """
    if keys.model is None:
        return
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in keys.merges)]
    # llama.cpp takes a whole word that is in the vocabulary before it merges, for this kind alone.
    bpe = BPE(vocab={token: number for number, token in enumerate(keys.tokens)}, merges=merges, ignore_merges=keys.pre == "llama-bpe")
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = _CUTS[keys.pre]()
    tokenizer.decoder = decoders.ByteLevel()
    if keys.pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        words = [
            AddedToken(token, special=special, normalized=False) for token, its in zip(keys.tokens, keys.types, strict=True) if its == kind
        ]
        tokenizer.add_tokens(words)
    if keys.add_bos:
        bos = keys.tokens[keys.ids["bos"]]
        byte_level = processors.ByteLevel(trim_offsets=False)
        first = processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, keys.ids["bos"])])
        tokenizer.post_processor = processors.Sequence([byte_level, first])
    words = {f"{name}_token": keys.tokens[number] for name, number in keys.ids.items()}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        chat_template=keys.chat_template,
        **words,
    )
    try:
        fast.save_pretrained(directory)
    except Exception as error:
        # The tokenizers package is not written in Python: what goes wrong with a disk comes out of it as Exception itself.
        if type(error) is not Exception:
            raise
        raise OSError(str(error)) from None
    # The class as releases of transformers before 5 know it, too; 5 reads either.
    config = directory / "tokenizer_config.json"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'), encoding="utf-8")


def _check_kind(source: Path, keys: TokenizerKeys) -> None:
    if keys.model != "gpt2" or keys.pre not in _CUTS:
        known = ", ".join(_CUTS)
        raise UnsupportedError(
            f"{source}: tokenizer.ggml.model {keys.model!r} with tokenizer.ggml.pre {keys.pre!r} is not supported, only 'gpt2' with {known}; "
            "import the Hugging Face directory that the file was made from"
        )
    if keys.add_eos:
        raise UnsupportedError(f"{source}: tokenizer.ggml.add_eos_token true is not supported; import the Hugging Face directory instead")
    if len(keys.types) != len(keys.tokens):
        raise CheckpointError(f"{source}: {len(keys.tokens)} tokenizer.ggml.tokens but {len(keys.types)} tokenizer.ggml.token_type")


def _byte_level() -> PreTokenizer:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel(add_prefix_space=False)


def _single_digits() -> PreTokenizer:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])


def _by_pattern(pattern: str) -> PreTokenizer:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    return Sequence([Split(Regex(pattern), behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])


_CUTS: dict[str, Callable[[], PreTokenizer]] = {
    "gpt-2": _byte_level,
    "smollm": _single_digits,
    "llama-bpe": lambda: _by_pattern(_LLAMA3),
    "qwen2": lambda: _by_pattern(_QWEN2),
}
