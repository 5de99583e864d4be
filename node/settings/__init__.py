"""Settings of a user and where they come from: flags, `SWARM_*`, `swarm.toml`, defaults.

`config` has every setting as frozen values; `sources` and `given` read them. Tickets, key files, logging and the choice
of memory or disk are here too, because every process needs them first.

Modules:

- `addresses`: Addresses and durations as people write them
- `config`: The settings of every command, as frozen values
- `contact`: Where the seed of a SWARM_HOME can be reached
- `council`: The machines of a council, as the operator lists them
- `definitions`: Every setting of every command as data
- `engine_choice`: Checks of the settings of a node about its engines
- `event_log`: Events of modules that also run where nobody has set up the log
- `events`: The events of the log: what each says, and what to do about it
- `example`: The commented example of swarm.toml, and its JSON schema
- `extras`: The command that installs an extra's packages into this environment
- `given`: Secrets that a user hands to a command
- `gpus`: Whether this machine has a GPU, by the files of its kernel
- `groups`: The control groups that limit this process
- `keyfile`: The file that holds a private key
- `log_file`: A log file of limited size
- `logs`: Logging: lines, levels and rate limits
- `memory`: What memory this machine has left, and how malloc gives it back
- `memory_plan`: How much memory of the machine each process needs, and where a node's replica is kept
- `rates`: Rates of links, as people write them
- `rewards`: Checks of the settings of a node about its rewards
- `sources`: Where a flag's value comes from when it is not on the command line
- `standby_config`: The settings of a standby
- `ticket`: Tickets: everything that a machine needs to join, in one string
- `toml_file`: swarm.toml: where it is looked for, and on which line a mistake stands
- `units`: Numbers as people read them
"""
