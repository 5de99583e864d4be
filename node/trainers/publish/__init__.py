"""Publishing a version without stopping training: copied, compared, coded, handed over.

`publishing` runs the thread that does it, `attempt` holds what one rank found of a version, `encoding` codes
its blocks, and `publication` is what the caller gets back.

Modules:

- `attempt`: What one rank has found of a version so far
- `encoding`: Diff and code the blocks that are ours, by several threads, in order, each as soon as its bits are
  there
- `entries`: What stands in a trainer's publish line
- `publication`: One version on its way, as the trainer sees it
- `publishing`: Publishing without waiting
"""
