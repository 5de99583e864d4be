"""Publishing a version without stopping training: the weights are copied, then compared, coded and sent by a thread.

`line` holds the publishes that are not sealed yet, `sender` carries each to the seed, `encoding` codes its blocks, and
`publication` is what the caller gets back.

Modules:

- `adapter_line`: Publishes one adapter: a publish line whose versions are the tensors of the adapter's slot
- `attempt`: What one rank has found of a version that it sends
- `encoding`: Diffs and codes this rank's blocks, in several threads and in order
- `entries`: What stands in a trainer's publish line
- `line`: The publishes of one rank that are not sealed yet, and the thread that sends them
- `lines`: The publish lines of one process: of the base and of each adapter that it publishes
- `publication`: One version on its way, as the trainer sees it
- `sender`: One rank's exchange with the seed about each publish
"""
