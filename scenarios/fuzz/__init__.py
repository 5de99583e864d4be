"""Fuzzers: they give malformed and hostile bytes and messages to every reader in the product."""
