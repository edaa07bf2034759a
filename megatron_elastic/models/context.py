"""Context parallelism: which tokens of a packed row a rank holds, and the Mamba layers over the whole row.

A row of T tokens is cut into 2C equal chunks over the C ranks of the context-parallel group, wherever its documents begin and end, and rank r
holds chunks r and 2C - 1 - r, in that order: a causal token costs as much as it stands late in the row, so every rank gets the same work.
T is a multiple of 2C. This is what megatron-core does with a row that is not packed (`get_batch_on_this_cp_rank`); its packed form cuts every
document instead, which asks for documents padded to multiples of 2C.
"""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mamba_context_parallel import MambaContextParallel
from torch import Tensor


def context_chunks(total: int, rank: int, size: int) -> tuple[range, range]:
    """The positions of the two chunks of a row of `total` tokens that `rank` of `size` holds. total: a multiple of 2 * size."""
    assert total % (2 * size) == 0, f"{total} tokens are not 2 x {size} equal chunks"
    chunk = total // (2 * size)
    first, second = (range(number * chunk, (number + 1) * chunk) for number in (rank, 2 * size - 1 - rank))
    return first, second


def context_indices(total: int, rank: int, size: int, device: torch.device | None = None) -> Tensor:
    """Positions in a row of `total` tokens of those that `rank` of `size` holds, in its order, int64 [total / size]."""
    return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in context_chunks(total, rank, size)])


def natural_order(total: int, size: int, device: torch.device | None = None) -> Tensor:
    """int64 [total]: indexed with it, the tokens of ranks 0 to size - 1 one after another (as an all-gather gives them) are in row order."""
    return torch.cat([context_indices(total, rank, size, device) for rank in range(size)]).argsort()


class WholeRowContextParallel(MambaContextParallel):
    """A Mamba mixer's exchange of tokens for heads before convolution and scan, and back, on rows that are cut as this module says.

    Between the two every rank has all T tokens in row order, so documents are marked over the whole row. megatron-core would put the tokens of
    packed rows in the order of its own packed form.
    """

    def pre_conv_ssm(self, input_: Tensor, packed_seq_params: PackedSeqParams | None = None) -> Tensor:
        """[T / C, b, rows of in_proj] -> [T, b, rows of this rank's heads and groups]."""
        return super().pre_conv_ssm(input_)

    def post_conv_ssm(self, input_: Tensor, packed_seq_params: PackedSeqParams | None = None) -> Tensor:
        """[T, b, channels of this rank's heads] -> [T / C, b, channels]."""
        return super().post_conv_ssm(input_)
