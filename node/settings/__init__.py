"""What a person may choose and where it comes from: flags, `SWARM_*`, `swarm.toml`, defaults.

`config` has every setting as frozen values; `sources` and `given` find them. Tickets, key files, log lines and
the choice of memory or disk are here too: every process reads them first.

Modules:

- `config`: What a person may choose, as frozen values
- `contact`: Where the seed of this SWARM_HOME can be reached
- `extras`: How the packages of an extra are installed where this process runs
- `given`: Secrets that a person hands to a command
- `keyfile`: The file that holds a private key
- `logs`: Log lines
- `memory`: Where the replica goes
- `sources`: Where a flag's value comes from when it is not given
- `ticket`: A ticket
"""
