"""The council's machines as they run: the replicated journal, the connections between them, and their election.

    coordinator --change--> CouncilService.establish --> CouncilMachine (the pure core) --> Journal, Links
                                                              ^                                  |
                                                              +------- the other machines -------+

`docs/standby.md` says how to run one, and argues the rules.

- `changes`: What an entry of the council's log says
- `journal`: What a machine of the council has on disk
- `kept`: Files of the trainer that every machine of the council has
- `leading`: The seed's stores while a council replicates them
- `links`: The streams between the machines
- `service`: Runs the core, and tells its application
"""
