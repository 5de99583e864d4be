"""The events of the log: what each says to a person on a terminal, and what that person should do about it.

A log line is an event name and fields. On a terminal it is shown as the sentence that is kept here; elsewhere as JSON
with the name and the fields. `docs/operations.md` has the same table, and tests check that both are complete.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from node.settings.units import size_text, time_text, version_text

__all__ = ["EVENTS", "Event", "say"]


class Event(NamedTuple):
    """An event of the log.

    `says`: the sentence. `{field}` stands for a field; `{field:size}`, `{field:time}` and `{field:share}` show bytes,
    seconds and a share as people read them. A part in `[[ ]]` is left out unless all of its fields are known.
    `todo`: what to do. `routine`: so frequent that a terminal shows it with `--log-level debug` only.
    """

    says: str
    todo: str = "nothing"
    routine: bool = False


EVENTS: Final[Mapping[str, Event]] = {
    # ------------------------------------------------------------ of the seed
    "serving": Event(
        "The seed is up at {addrs}, with version {version}. Next: {next}",
        "run the command that it names, and give the ticket to your machines",
    ),
    "member_joined": Event("{name} joined[[ (members: {members})]]."),
    "member_left": Event(
        "{who} left[[: {why}]][[ (members: {members})]].",
        "nothing if you stopped it; `why` names a removal (`kick`, `revoke`, a quota)",
    ),
    "lease_expired": Event(
        "{who} is lost: nothing was heard of it until its lease ended[[ (members: {members})]].",
        "look whether that machine runs and reaches the seed; it comes back by itself",
    ),
    "held": Event("{who} holds version {version}.", routine=True),
    "planned": Event("The trees were planned again, for {members} members.", routine=True),
    "superseded": Event(
        "Another seed with this swarm's key has started since.", "run one seed a key: stop this copy, or the other"
    ),
    "publishing": Event("A trainer publishes version {version}[[ (step {step})]].", routine=True),
    "sealed": Event(
        "Version {version}[[ (step {step})]] is sealed: {density:share} of the elements changed, {delta_bytes:size}."
    ),
    "version_arrived": Event("Version {version} is at every node ({nodes}), {seconds:time} after its publish began."),
    "rollout_false": Event(
        "The trainer found that a node lied: {why}.", "`swarm-node quarantine` shows which node, and why"
    ),
    "keys_unread": Event(
        "The gateway's keys were changed and cannot be read, so those before still count: {why}",
        "repair the file that it names, or restore it",
    ),
    "tokens_contradicted": Event(
        "{who} signed other tokens than it told a client while they were drawn; the answer goes on with what was told.",
        "look at that machine if it comes again: it counts towards a quarantine",
    ),
    "quarantined": Event(
        "{who} is in quarantine and gets no work: {why}.",
        "look at that machine; `swarm-node quarantine NODE --release` gives it work again",
    ),
    "evidence_dropped": Event(
        "What checks find has moved for half of the nodes that compute alike, so it is learned anew.",
        "nothing, unless half of these nodes may be cheating: then check their samples with your own scores",
    ),
    "rewards_differ": Event(
        "Nodes have different functions for the reward {reward} (digest: nodes; {nodes}); work goes to those with "
        "{chosen} only.",
        "install one version of it on all nodes",
    ),
    "reward_disputed": Event(
        "{who} and {other} computed different rewards {reward} for a sample, and no third node can decide.",
        "add a third node with this reward, or give the trainer the function (`verify_rewards`); if both are honest, "
        "the function is not deterministic",
    ),
    "handing_over": Event("Telling {members} members of the new swarm. {hint}.", "wait for `handed_over`"),
    "handed_over": Event(
        "{left} members have left for the new swarm; {lost} were not reached.",
        "give the members that were not reached a new ticket",
    ),
    "state_saved": Event(
        "The state of step {step} ({bytes:size}) is saved in the swarm, in {fragments} fragments, each at a node."
    ),
    "state_adopted": Event(
        "The saved state of step {step} ({bytes:size}) was fetched from the nodes, and this seed looks after its "
        "{fragments} fragments now."
    ),
    "state_not_adopted": Event(
        "This seed does not look after the saved state that nodes hold, and tries again: {why}",
        "start the nodes that held fragments, or free disk here; a trainer that saves a state replaces it",
    ),
    "state_waits": Event("The saved state is not settled yet: {why}", "do what it says; it is tried again"),
    "fragment_not_placed": Event(
        "{who} has not taken a fragment of the saved state: {why}",
        "nothing while other nodes take it; else look at that node's disk and `--state-gb`",
    ),
    "waits_for_council": Event(
        "This seed leads once a majority of the council is up.",
        "start a standby: `swarm-node invite`, then `swarm-node standby TICKET` on another machine of the council",
    ),
    "leads": Event("This machine leads the swarm (term {term}).", "start the trainer here if it was lost"),
    "leads_no_more": Event(
        "This machine leads the swarm no more: {why}.", "look whether the council's machines reach one another"
    ),
    "stands_by": Event("This machine stands by; the machine {leader} leads."),
    "snapshot_came": Event("The state of the swarm has come from the leader, {bytes:size}."),
    "waits_for_standby": Event(
        "Version {version} is sealed once a standby holds it.", "look whether a standby runs, and at its downlink"
    ),
    "watch_ended": Event(
        "The process that watches the folder ended with code {code}; it is started again in {again_s:time}.",
        "look at the lines above it; a checkpoint that is truncated while it is read does this",
    ),
    "watch_folder_missing": Event("Nothing is published from {folder}: {why}", "make the folder, or mount it"),
    "watch_folder_found": Event("{folder} is here."),
    "older_passed_over": Event("{checkpoints} older checkpoints are not published: {why}"),
    "not_published": Event(
        "{folder} is not published: {why}", "mend what it names, or publish it by hand: `swarm-node publish FOLDER`"
    ),
    "publish_failed": Event("{folder} could not be published: {why} It is tried again.", "wait; or look at the seed"),
    "published": Event("{folder} was published as version {version}.", routine=True),
    # ------------------------------------------------------------ of a node or relay, in the order of a start
    "starting": Event("Looking for the swarm from {addrs}."),
    "unreachable": Event(
        "The seed does not answer[[: {why}]]. Trying again.",
        "look whether the seed runs and its port is open; a new ticket names its present addresses",
    ),
    "refused": Event("The seed does not admit this machine: {why}", "do what it says; `later` is tried again"),
    "clocks_apart": Event("This machine's clock and the seed's differ by a month or more.", "set the clocks"),
    "joined": Event("Reached the swarm: this machine is member {slot}."),
    "catching_up": Event("Fetching version {version} of the model from the other members."),
    "catch_up_phase": Event("Catching up: {phase}.", routine=True),
    "fetching": Event(
        "Fetching the model: [[{bytes:size} of {of_bytes:size}, ]]{percent} %[[, {bytes_s:size}/s]]"
        "[[, {left_s:time} left]].",
        "nothing; if it stands still, look at the uplinks of the other members",
    ),
    "caught_up": Event("The model is here, as version {version}."),
    "replica": Event("The replica is kept in {place}[[: {why}]].", "`--replica` chooses the place"),
    "fragment_held": Event(
        "This machine holds a fragment of the trainer's saved state (step {step}): {bytes:size}.", routine=True
    ),
    "fragment_refused": Event(
        "This machine has not taken a fragment of the trainer's saved state: {why}", "free disk, or raise `--state-gb`"
    ),
    "engine_starting": Event(
        "The engine starts ({seconds:time}): it waits for {waits_for}[[. It last said: {log_says}]]",
        "nothing for the first minutes; the whole log is in `SWARM_HOME/engine.log`",
    ),
    "engines_planned": Event("{plan}.", "`--engines` and `--tp` choose otherwise"),
    "engine_given_up": Event(
        "Engine {number}[[ on {devices}]] is given up: {why} The others go on.",
        "mend what it names, and restart this node",
    ),
    "engine_late": Event(
        "Engine {number} has not answered for {seconds:time}; the others go on without it until it does.",
        "nothing; if it comes again, see its log in `SWARM_HOME`",
    ),
    "engines_finish": Event("Finishing the work that is here, for at most {within_s:time}; then the engines sleep."),
    "engines_asleep": Event(
        "The engines are asleep and their memory is free (all work was finished: {finished}).",
        "`swarm-node wake` starts them again",
    ),
    "engines_wake": Event("The engines start again."),
    "ready": Event("Ready: {doing}[[, {seconds:time} after the start]]."),
    "working": Event(
        "Version {version}[[ of {head}]]"
        "[[, {tokens_s} tokens/s, {accepted} samples accepted and {refused} refused so far]]"
        "[[, {passed_on_bytes:size} passed on in the last minute]].",
        "nothing; many refused samples: `swarm-node status --json` has the reasons",
    ),
    "relaying": Event("This relay is up: {hint}."),
    "holds": Event("Holds version {version}.", routine=True),
    "complete": Event("Version {version} has arrived.", routine=True),
    "checkpointed": Event("Version {version} was written to the disk as a checkpoint.", routine=True),
    "wrote": Event("Wrote {file}, {bytes:size}."),
    "budget": Event("This machine is close to its limit of bytes a day: {saving}.", routine=True),
    "uplink_budget": Event(
        "{left_bytes:size} are left of what this machine may send today; it passes chunks on: {passes_on}.",
        "nothing; `--up-gb-day` raises it",
    ),
    "stuck": Event("{who} brings nothing and does not answer; its chunks come from other members.", routine=True),
    "bad_bytes": Event(
        "{who} sent bytes that do not verify, and is shut out: {detail}.",
        "nothing was stored; if it is a machine of yours, look at its memory and disk, or `swarm-node kick` it",
    ),
    "session_lost": Event("The connection with {who} ended[[: {why}]].", routine=True),
    "succession": Event("The swarm has a new key."),
    "succession_ignored": Event(
        "A message about a new key is not valid: {why}", "nothing, once; ask the swarm's owner if it comes again"
    ),
    "follows": Event("This machine follows the swarm to its new key.", "put the new ticket into your scripts"),
    "failed": Event("This machine cannot hold the model: {detail}", "see the last line of the process"),
    "equivocation": Event(
        "The seed's key has signed two different versions {version}.",
        "leave the swarm; the key is stolen, or two seeds run with it",
    ),
    # ------------------------------------------------------------ of the engine and its work
    "engine_damaged": Event(
        "The engine's weights are not the version's bits; it is filled again: {hint}.", "test this machine's memory"
    ),
    "engine_lost": Event("The engine does not answer: {why}. It is started again.", "see `SWARM_HOME/engine.log`"),
    "engine_killed": Event("The engine was ended: {why}.", "see `SWARM_HOME/engine.log`"),
    "engine_ended": Event(
        "The engine ended with code {code}; it is started again in {pause_s:time}.", "see `SWARM_HOME/engine.log`"
    ),
    "commit_failed": Event("The engine could not take version {version}: {why}. It is filled again from the replica."),
    "adapter_refused": Event(
        "The engine cannot serve the adapter {adapter}: {why}. This node gets no work for it.",
        "start the node with what the sentence asks for",
    ),
    "draft_not_loaded": Event(
        "This node holds the swarm's draft model and passes it on, but its engine does not load it: {why}.",
        "[what loads it](vllm.md#draft-models)",
    ),
    "not_staged": Event("Version {version} was not staged: {why}."),
    "no_work": Event(
        "The ledger gives this node no work: {why}.", "`swarm-node quarantine` on the trainer's machine says more"
    ),
    "self_test_failed": Event("The engine failed its first test: {why}.", "see `SWARM_HOME/engine.log`"),
    "work_lost": Event("{sequences} sequences were lost with the engine: {why}. Others generate them."),
    "lease_refused": Event("The engine refuses a lease: {why}.", "nothing, if another node can do it"),
    "image_refused": Event("An image from the seed is not the one that was asked for: {why}. It is fetched again."),
    "not_scored": Event("A sample of another node could not be scored: {why}."),
    "not_judged": Event("A sample of another node could not be judged: {why}."),
    "reward_failed": Event(
        "The reward {reward} of a sample was not computed: {why}. The sample comes without a reward.",
        "look at the function, if it comes often",
    ),
    "reward_unusable": Event("A package's reward cannot be used: {why}.", "repair or remove that package"),
    # ------------------------------------------------------------ of every process
    "announcing": Event("Other machines reach this one at {addrs}."),
    "no_port_for_us": Event(
        "{provider} maps no port to this process[[ (mapped: {mapped})]]: {hint}.",
        "map a port, or listen on a mapped one",
    ),
    "reached_through": Event("Other machines reach this one through the relay {relay}."),
    "no_relay": Event("Nobody reaches this machine through the relay {relay}: {why}.", "look at that relay"),
    "compiling_kernels": Event("Compiling the coder for {dtypes} ({note})."),
    "compiled_kernels": Event("Compiled, in {seconds:time}."),
    "computing_formats": Event("Computing the formats {formats} from the base: {done} %."),
    "monitor": Event("The page: {page}", "open it"),
    "base_changed": Event(
        "The checkpoint has changed since the last run[[: {folder}]][[: {error}]][[; {hint}]].",
        "keep the files of `--base` and `--model` as they are, or use `--copy-base`, `--copy-model`",
    ),
    "damaged": Event(
        "Blocks of version {version} are damaged and fetched again: {detail}.", "look at the disk and memory"
    ),
    "replica_damaged": Event("{blocks} blocks of the replica have changed on the disk: {hint}.", "look at the disk"),
    "replica_proven": Event("Every block of the replica on the disk is right.", routine=True),
    "finishing": Event("Finishing the work that is here, for at most {within_s:time}; once more to stop at once."),
    "finished": Event("Finished (work was given back to the swarm: {given_back})."),
    "stopping": Event("Stopping; once more to stop at once."),
    "ended": Event("{why}", "do what it says; it is the last line of a process that failed"),
    "message": Event(
        "[[{who}: ]]{text}", "read it; it comes from a part of the program or a library that names no event"
    ),
}

_PART: Final = re.compile(r"\[\[(.*?)\]\]")
_ADDRESS: Final = re.compile(r"/(ip4|ip6|dns\w*)/([^/]+)/tcp/(\d+)")
_VERSION: Final = re.compile(r"([0-9]+)\.([0-9]+)")
"""As fields have it: `swarm.protocol.core.version.VersionId` as text."""
_FIELD: Final = re.compile(r"\{(\w+)(?::(\w+))?\}")


def say(name: str, fields: Mapping[str, Any]) -> str:
    """The sentence of an event. An event without a sentence is shown by its name and fields."""
    event = EVENTS.get(name)
    if event is None:
        return " ".join([name, *(f"{key}={value}" for key, value in fields.items())])

    def known(part: str) -> bool:
        return all(fields.get(match[1]) not in (None, "") for match in _FIELD.finditer(part))

    text = _PART.sub(lambda match: match[1] if known(match[1]) else "", event.says)
    return _FIELD.sub(lambda match: _shown(match[1], fields.get(match[1], "?"), match[2]), text)


def _shown(field: str, value: Any, form: str | None) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if field in ("version", "head") and isinstance(value, str) and (version := _VERSION.fullmatch(value)):
        return version_text((int(version[1]), int(version[2])))
    if field == "addrs":
        return _ADDRESS.sub(
            lambda match: f"[{match[2]}]:{match[3]}" if match[1] == "ip6" else f"{match[2]}:{match[3]}", value
        )
    if form is None or not isinstance(value, int | float):
        return str(value)
    return {"size": size_text, "time": time_text, "share": lambda share: f"{100 * share:.2g} %"}[form](value)
