"""What the tests' layers of repacked weights have in common; see `swarm_vllm.repacked.Repacked`."""

from contextlib import contextmanager


class HoldingLayer:
    """A layer whose module can have other parameters, as loaders expect them."""

    @contextmanager
    def holding(self, parameters):
        own = self.module._parameters
        self.module._parameters = own | dict(parameters)
        yield
        self.module._parameters = own
