"""The front of a gateway: the process that listens, and keeps the clients' requests while the seed is away.

The front (the `swarm-node gateway` command, or a trainer) has the clients' HTTP connections. It sends each request over
a local socket to the seed, whose `Backend` answers it. When the seed ends, the front still has the requests, and notes
of what was sent; with these it asks the next seed.

Modules:

- `backend`: Answers the requests of a front, in the seed
- `forwarding`: One request on its way to its answer
- `front`: Answers clients with what the seed answers
- `messages`: What a front and a seed tell each other
- `outbox`: Sends messages in batches
- `seed_link`: The connection to one seed
- `seeds`: The seed that a front has now, if any
"""
