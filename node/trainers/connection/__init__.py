"""The connection of a trainer's process to the seed on the same host: finding, starting, attaching to and watching it.

Everything here is synchronous. `seedlink` needs neither trio nor torch. The seed may be restarted while a trainer
runs; `seedwatch` decides how long a publish waits for it.

Modules:

- `link`: One rank's attached connection to the seed
- `patience`: Waits with a deadline that log what they wait for
- `seedlink`: Finds, starts and queries the seed on this host
- `seedwatch`: Knows whether the seed is up, and how long a publish waits for one that is not
"""
