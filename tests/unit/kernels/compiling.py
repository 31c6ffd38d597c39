"""Compiles every kernel to machine code for Hopper, which needs no GPU; the interpreter knows nothing of types."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ragcache_kernels import chunk_mass, rotate_into_cache, scattered_attention, unrotate_from_cache

TARGET = GPUTarget("cuda", 90, 32)
FLOATS = {"keys", "values", "key_cache", "value_cache", "cos_sin", "query", "out"}
INTEGERS = {"source_rows", "target_rows", "positions", "slots", "block_table", "query_starts"}
MOVING = {
    "NUM_KV_HEADS": 2,
    "BLOCK_SIZE": 16,
    "HEAD_DIM": 64,
    "HEAD_PADDED": 64,
    "HALF": 16,
    "HALF_PADDED": 16,
    "REST_PADDED": 32,
    "IS_NEOX": False,
    "HEADS": 16,
}
ATTENDING = {
    "GROUP": 4,
    "GROUP_PADDED": 4,
    "BLOCK_SIZE": 16,
    "HEAD_DIM": 16,
    "HEAD_PADDED": 16,
    "ROWS": 64,
    "KEYS": 16,
    "DOT": tl.bfloat16,
}


def compile_kernel(kernel: triton.JITFunction, constants: dict[str, object]) -> None:
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else type_of(name) for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    code = triton.compile(source, target=TARGET, options={"num_warps": 4}).asm
    assert len(code["cubin"]) > 1000


def type_of(name: str) -> str:
    if name in FLOATS:
        return "*bf16"
    if name in INTEGERS or name.startswith("chunk_"):
        return "*i32"
    return {"by_head": "*fp32", "scale_log2": "fp32"}.get(name, "i32")


if __name__ == "__main__":
    compile_kernel(rotate_into_cache._kernel, MOVING)
    print("rotate")
    compile_kernel(unrotate_from_cache._kernel, {**MOVING, "IS_NEOX": True})
    print("unrotate")
    compile_kernel(chunk_mass._kernel, {**ATTENDING, "CHUNKS": 16, "SUM": tl.float16})
    print("mass")
    compile_kernel(scattered_attention._kernel, ATTENDING)
    print("attention")
