"""Fuzzers: bytes and messages that nobody honest would send, given to whatever reads them."""
