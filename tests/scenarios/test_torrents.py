"""The torrent files that aria2 and libtorrent are given."""

import hashlib

from scenarios.torrents import PIECE_BYTES, encode, torrent


def test_bencoding() -> None:
    value = {b"b": [1, b"spam", -3], b"a": {b"": 0}}
    assert encode(value) == b"d1:ad0:i0ee1:bli1e4:spami-3eee"


def test_a_torrent_names_every_piece() -> None:
    content = bytes(PIECE_BYTES) + b"tail"
    made = torrent("file", content, "http://10.77.0.1:6969/announce")
    pieces = hashlib.sha1(bytes(PIECE_BYTES)).digest() + hashlib.sha1(b"tail").digest()
    assert b"6:pieces40:" + pieces in made
    assert b"6:lengthi%de" % len(content) in made
    assert made.startswith(b"d8:announce30:http://10.77.0.1:6969/announce4:infod")
