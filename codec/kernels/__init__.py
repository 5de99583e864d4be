"""The kernels that numba compiles: bit codes, passes over a block, and the vector instructions that they use.

`codec.rice`, `codec.pco` and `codec.values` call them; `codec.scratch` owns the arrays that they work in. Nothing is
imported here, so that a process that only relays chunks never loads the compiler.

- `jit`: The decorator that compiles a kernel, and the cache folder for compiled kernels
- `lanes`: Vector instructions over 64 elements, as LLVM IR
- `codes`: Rice, exp-Golomb and Golomb codes of lists of numbers
- `planes`: The order of these lists in a payload
- `scan`: Passes over a block that find its changes or replay them
- `rans`: rANS codes of bytes
- `quantise`: Passes over bf16 matrices that find scales and codes (`codec.formats`)
- `routes`: Sets of experts, by an arithmetic coder
"""
