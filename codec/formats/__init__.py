"""The model in the formats of receivers: fp8, int8 and int4 codes with scales, as pure functions of the bf16 bits.

In reading order; `docs/formats.md` specifies every bit. Nothing is imported here, so that a relay, which knows formats
by name only, never loads the compiler.

- `spec`: The formats by name, which tensors they quantise, and the tensors of a format's part
- `quantise`: Bits to codes and back, for whole rows of a matrix, in full or only where elements changed
- `coding`: The coder of a format's block
- `part`: The blocks of a format's part: all, one, or those that a version changes
- `dequantised`: The base that codes stand for, for engines that compute with bf16
- `packed`: The codes as a checkpoint of packed int4, for engines that compute with them
- `share`: What a member of one format holds
"""
