"""Compile the Triton kernels for a GPU that is not there, and print the shared memory that each needs."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tanghulu.workers.compute.attention import triton_decode

#: Types of queries and of the cache.
TYPES = [("bf16", "bf16", tl.bfloat16), ("bf16", "i8", tl.bfloat16), ("fp32", "fp32", tl.float32)]


def shared_bytes(function: object, types: dict[str, str], constants: dict[str, object], num_warps: int) -> int:
    source = ASTSource(fn=function, signature=types | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    assert compiled.asm["cubin"]
    return int(compiled.metadata.shared)


def main() -> None:
    numbers = ("v_distance", "query_row", "block_stride", "token_stride", "head_stride", "table_row", "splits")
    for query, kept, product in TYPES:
        keys = triton_decode._keys(128 * (2 if query == "bf16" else 4))
        types = {"query": f"*{query}", "cache": f"*{kept}", "tables": "*i64", "contexts": "*i64", "out": "*fp32"}
        types |= {"sizes": "*fp32", "scale": "fp32", **dict.fromkeys(numbers, "i32")}
        constants = {"BLOCK_TOKENS": 24, "WINDOW": 1000, "KEYS": keys, "GROUP": 4, "ROWS": 16, "HEAD_DIM": 80}
        constants |= {"DIM": 128, "INT8": kept == "i8", "DOT": product}
        print(shared_bytes(triton_decode._decode, types, constants, 4), flush=True)
    types = {"parts": "*fp32", "sizes": "*fp32", "out": "*bf16", "splits": "i32"}
    print(shared_bytes(triton_decode._join, types, {"HEAD_DIM": 80, "DIM": 128}, 1))


if __name__ == "__main__":
    main()
