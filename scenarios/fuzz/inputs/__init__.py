"""What the fuzzers feed: valid messages and documents of every kind, their fields, and mutations of those.

Modules:

- `values`: Mutations of a field: extremes of its type, and values of other types
- `fields`: The fields of a message or document, derived from its type
- `samples`: Makes a valid value of any message type from the type alone
- `scene`: The sender of messages and the valid documents from which messages are made
- `messages`: The kinds of messages and documents that peers send
- `work`: The kinds of `Work` bodies between nodes and the ledger
- `binary`: The codec's binary encoding of manifests, chunk headers and layouts
- `certificates`: Certificates for libp2p's TLS with one value changed
- `http_kinds`: Kinds of HTTP requests
- `images`: The kinds of images' headers, part by part
- `local`: Kinds of the messages on local sockets, and a scripted channel that delivers given frames
"""
