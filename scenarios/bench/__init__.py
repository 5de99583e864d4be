"""Benchmarks of single parts in one or two processes: codec, transport, gossip, restart, idle, monitor.

Each prints a table, or JSON with `--json`. None needs root or a network.

Modules:

- `adapters`: Measures what adapters cost a vLLM, and what their updates cost
- `adapter_versions`: Measures adapters as versions of their own: size, copies, delay and roots
- `check_tolerance`: Measures how far log-probabilities differ between honest nodes, and from a dishonest one
- `codec`: Measures the codec's size and speed against baselines and bounds
- `codec_bounds`: Entropy bounds on the size of a delta, in bits per change
- `codec_data`: The input data of the codec benchmark
- `codec_measure`: The measurement loop of the codec benchmark
- `experts`: Measures what a version costs of which only some experts of a mixture changed
- `gateway_overhead`: Compares the gateway's tokens per second with those of its engine's own server
- `gateway_restart`: Kills nodes and the seed while requests are in flight at the gateway
- `gossip`: Measures the share and the delay of announcements that reach every peer
- `monitor`: Measures what a scrape of metrics and a look at the page cost
- `reckoned`: Compares what `swarm-node delta --shapes` reckons with a step that is really coded
- `idle`: Measures what a seed and its relays cost while nothing is published
- `restart`: Measures how long a node takes to start from a model on its disk
- `routes`: Measures the bytes a token of routes of experts, and the speed of their coder
- `sessions`: Measures how much of a session's text its next turn finds in a node's prefix cache
- `real_sessions`: The same at real vLLMs, by their own counters
- `sparsity`: Measures the share of weights that a step changes, and compares it with a model
- `streams`: Measures how long a token takes from the engine to a client of a stream
- `tasks`: Measures what it costs to start a task in a service of py-libp2p
- `transport`: Measures the CPU time and throughput of the transport
- `transport_ends`: The two processes of `scenarios.bench.transport`
"""
