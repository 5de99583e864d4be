"""Measurements and experiments: every number of the README has a command here that makes it.

They import the product and are never imported by it. `sim` and `emulator` are the two worlds that they run in;
`bench` needs neither.

Modules:

- `conformance/`
- `fuzz/`
"""
