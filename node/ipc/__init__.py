"""Messages and file descriptors between processes of one host, over Unix sockets.

Every Unix socket of swarm-node speaks the one format of `framing`: the trainer's socket, the engine's, the status
socket, and the driver's end of the vLLM plugin. The plugin itself is a package that cannot import `node`; its
`channel.py` repeats the format. Weights never travel in a message, only as descriptors of shared memory.

Modules:

- `async_channel`: One end of a local socket on trio, and the server that accepts such connections
- `channel`: One end of a local socket for synchronous code (trainers, engines, commands); needs neither trio nor torch
- `framing`: The frame format, in memory: messages to bytes, and received bytes and descriptors back to messages
- `sockets`: Socket files and the processes at their two ends: path, owner, permissions, lock
"""
