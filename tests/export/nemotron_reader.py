"""A script of its own: reads named tensors and sizes, and gives the logits of transformers' NemotronH. It must not find this project.

Run: python -I nemotron_reader.py MEMBER.pt LOGITS.pt
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch
import transformers

KINDS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def config_of(shape: dict[str, Any], length: int) -> Any:
    """transformers' configuration of the sizes a checkpoint describes."""
    attention, moe, mamba = shape["attention"], shape["moe"], shape["mamba"]
    return transformers.NemotronHConfig(
        vocab_size=shape["padded_vocab_size"],
        layers_block_type=[KINDS[letter] for letter in shape["layer_pattern"]],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["mlp"]["ffn"],
        num_attention_heads=attention["heads"],
        num_key_value_heads=attention["kv_groups"],
        head_dim=attention["head_dim"],
        mamba_num_heads=mamba["heads"],
        mamba_head_dim=mamba["head_dim"],
        n_groups=mamba["groups"],
        ssm_state_size=mamba["state"],
        conv_kernel=mamba["conv"],
        chunk_size=length,  # one chunk: its plain-PyTorch scan sums over the wrong axis when there are several
        n_routed_experts=moe["experts"],
        num_experts_per_tok=moe["topk"],
        moe_intermediate_size=moe["ffn"],
        moe_shared_expert_intermediate_size=moe["shared_ffn"],
        routed_scaling_factor=moe["scaling_factor"],
        layer_norm_epsilon=shape["norm_epsilon"],
        use_mamba_kernels=False,
        num_nextn_predict_layers=0,
    )


def weights_of(member: dict[str, torch.Tensor], shape: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint under transformers' names."""
    heads, groups = shape["attention"]["heads"], shape["attention"]["kv_groups"]
    out = {
        "model.embeddings.weight": member["embedding.word_embeddings.weight"],
        "model.norm_f.weight": member["decoder.final_norm.weight"],
        "lm_head.weight": member["output_layer.weight"],
    }
    for number, letter in enumerate(shape["layer_pattern"]):
        mine, theirs = f"decoder.layers.{number}.", f"model.layers.{number}."
        layer = {name.removeprefix(mine): tensor for name, tensor in member.items() if name.startswith(mine)}
        mixer, norm = f"{theirs}mixer.", f"{theirs}norm.weight"
        if letter == "M":
            out[norm] = layer.pop("mixer.in_proj.layer_norm_weight")
            out |= {theirs + name: tensor for name, tensor in layer.items()}
        elif letter == "*":
            out[norm] = layer["self_attention.linear_qkv.layer_norm_weight"]
            # Each group holds its query heads, then its key head, then its value head.
            fused = layer["self_attention.linear_qkv.weight"].unflatten(0, (groups, heads // groups + 2, -1))
            parts = {"q_proj": fused[:, :-2].flatten(0, 2), "k_proj": fused[:, -2].flatten(0, 1), "v_proj": fused[:, -1].flatten(0, 1)}
            out |= {f"{mixer}{name}.weight": tensor for name, tensor in parts.items()}
            out[f"{mixer}o_proj.weight"] = layer["self_attention.linear_proj.weight"]
        elif letter == "-":
            out[norm] = layer["mlp.linear_fc1.layer_norm_weight"]
            out[f"{mixer}up_proj.weight"], out[f"{mixer}down_proj.weight"] = layer["mlp.linear_fc1.weight"], layer["mlp.linear_fc2.weight"]
        else:
            out[norm] = layer["pre_mlp_layernorm.weight"]
            out[f"{mixer}gate.weight"] = layer["mlp.router.weight"]
            out[f"{mixer}gate.e_score_correction_bias"] = layer["mlp.router.expert_bias"]
            for mine_fc, their_fc in (("linear_fc1", "up_proj"), ("linear_fc2", "down_proj")):
                out[f"{mixer}experts.{their_fc}"] = layer[f"mlp.experts.experts.{mine_fc}.weight"]
                out[f"{mixer}shared_experts.{their_fc}.weight"] = layer[f"mlp.shared_experts.{mine_fc}.weight"]
    return out


def main() -> None:
    """Read, load strictly, compute."""
    assert importlib.util.find_spec("megatron_elastic") is None, "the reader must not depend on this project"
    given = torch.load(sys.argv[1])
    shape, tokens = given["shape"], given["tokens"]
    model = transformers.NemotronHForCausalLM(config_of(shape, tokens.shape[1])).float().eval()
    model.load_state_dict(weights_of(given["tensors"], shape), strict=True)
    with torch.no_grad():
        torch.save(model(tokens, use_cache=False).logits, sys.argv[2])


if __name__ == "__main__":
    main()
