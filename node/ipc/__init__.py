"""Messages and file descriptors between processes of one host, over Unix sockets.

`channel` is synchronous and needs neither trio nor torch; `async_channel` has the same frames on trio.
Weights never travel in a message: they go as descriptors of shared memory.

Modules:

- `async_channel`: The frames of `node.ipc.channel` on trio
- `channel`: Messages and file descriptors between processes of one host, over a Unix socket
"""
