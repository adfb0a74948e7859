"""Numba kernels: fast twins of `canonical.py`, equal bit for bit.

Plain arrays in, plain arrays out: outputs first, then inputs. Every array is C-contiguous, every float is
float32. T counts token rows; an output may have more rows than are written. No `fastmath`, no fused
multiply-add but of exact products, and no parallel reductions: SIMD and threads run across outputs, and never
change the order in which one output is summed.

    codegen, simd          16-lane vectors, in LLVM's terms
    tiles                  register tiles of them
    vector_math            exp and its relatives on vectors
    rows                   norm, quantisation, SwiGLU, sums
    gemm, gemm_int8        float32 and INT8 matrix products
    gemm_exact             and exact_tiles: exact products of BF16 numbers
    grid                   products of many groups of rows, of which few have some, on a static grid
    pair_dots              exact products two at a time, by AVX-512 BF16
    matrix_unit            the tiles of AMX; gemm_matrix, mla_matrix: products and attention with them
    latent_cache           what precedes attention per token
    indexer                what chooses the positions that sparse attention sees
    mla, mla_products      attention; mla_prefill: of many rows, on a matrix unit
    moe                    gate, grouping, combine
    sampling               tokens from logits
    carried, drafts        index lists: of steps planned ahead, of MTP's passes
"""

from xdeepserve.model.kernels.gemm import (
    grouped_matmul,
    matmul,
    matmul_blocked,
    matmul_heads,
    num_groups,
)
from xdeepserve.model.kernels.gemm_exact import matmul_exact, matmul_exact_blocked, matmul_exact_heads
from xdeepserve.model.kernels.gemm_int8 import grouped_matmul_int8, matmul_int8, matmul_int8_sums
from xdeepserve.model.kernels.grid import grid_matmul, grid_matmul_int8, grid_scratch
from xdeepserve.model.kernels.indexer import choose_positions, gather_positions, layer_norm
from xdeepserve.model.kernels.latent_cache import append_heads, append_kv, rope_heads
from xdeepserve.model.kernels.mla import attention
from xdeepserve.model.kernels.mla_prefill import prefill
from xdeepserve.model.kernels.moe import IN_ORDER, add_sums, combine, gate, gather_tokens, group_rows
from xdeepserve.model.kernels.rows import (
    add,
    gather_rows,
    quantize_by_maxima,
    quantize_rows,
    rms_norm,
    rms_norm_quantize,
    round_to_int8,
    row_maxima,
    scale_sums,
    scatter_rows,
    swiglu,
    swiglu_quantize,
)
from xdeepserve.model.kernels.sampling import sample, uniform

__all__ = [
    "IN_ORDER",
    "add",
    "add_sums",
    "append_heads",
    "append_kv",
    "attention",
    "choose_positions",
    "combine",
    "gate",
    "gather_positions",
    "gather_rows",
    "gather_tokens",
    "grid_matmul",
    "grid_matmul_int8",
    "grid_scratch",
    "group_rows",
    "grouped_matmul",
    "grouped_matmul_int8",
    "layer_norm",
    "matmul",
    "matmul_blocked",
    "matmul_exact",
    "matmul_exact_blocked",
    "matmul_exact_heads",
    "matmul_heads",
    "matmul_int8",
    "matmul_int8_sums",
    "num_groups",
    "prefill",
    "quantize_by_maxima",
    "quantize_rows",
    "rms_norm",
    "rms_norm_quantize",
    "rope_heads",
    "round_to_int8",
    "row_maxima",
    "sample",
    "scale_sums",
    "scatter_rows",
    "swiglu",
    "swiglu_quantize",
    "uniform",
]
