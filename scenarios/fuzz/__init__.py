"""Fuzzers: they give malformed and hostile bytes and messages to every reader in the product.

Modules:

- `inputs/`: What the fuzzers feed: valid messages and documents of every kind, and mutations of their fields
- `targets/`: What is fed, by name
- `target`: The interface of fuzz targets
- `cores`: The base of the worlds of both cores
- `run`: Drives a target: chooses mutations, gives messages, times them, and reports how to reproduce an escape
- `signatures`: Cheap signatures for fuzzing
- `tables`: Measures the sizes of all tables that can be reached from an object
- `codec`, `yamux`: Fuzzers of those two alone
- `guided`, `libfuzzer`: Coverage-guided fuzzing of every decoder of bytes from peers, with atheris
"""
