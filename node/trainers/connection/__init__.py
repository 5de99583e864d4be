"""A trainer's connection to the seed on its host: found, started, attached, watched.

Synchronous; `seedlink` needs neither trio nor torch. A trainer outlives its seed: `seedwatch` says how long
a publish still waits for one.

Modules:

- `link`: One rank's attached connection to the seed
- `patience`: A trainer's waits
- `seedlink`: A trainer's way to the seed on its host
- `seedwatch`: Whether the seed is there, since when it is not, and for how long a publish still waits for it
"""
