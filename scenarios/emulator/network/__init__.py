"""A network of emulated hosts: real processes, real sockets, emulated links. Needs root, and ends by itself.

    from scenarios.emulator.network import Network

    net = Network(rtt_ms=20, between_ms=100)                  # round trips within a region, and between regions
    seed = net.host("seed", up_mbit=200, down_mbit=1000, region="eu")
    home = net.host("home", up_mbit=50, down_mbit=200, region="us", firewall="nat")
    with net:
        server = seed.popen([sys.executable, "-m", "my.server"], stdout=subprocess.PIPE, text=True)
        client = home.popen([sys.executable, "-m", "my.client", seed.address])
        client.wait()
        print(seed.sums)                                      # IP bytes sent and received, packets dropped
        home.set(up_mbit=25)                                  # links may change while packets flow
        home.cut()                                            # and break

`Host.popen` takes what `subprocess.Popen` takes; other launchers use `preexec_fn=host.enter`. Hosts listen on
`0.0.0.0`; others find them at `Host.address`. A host reaches no network but this one, not even the machine's own
loopback: exchange words with its processes by pipes or files.

**What a packet goes through.** Its sender's uplink (rate; a queue of `queue_ms`, tail drop), the delay between the two
hosts (half the round trip of their regions, and each one's `delay_ms`), a loss, its receiver's downlink (rate, queue).
A queue holds one bandwidth-delay product unless said otherwise: what the link carries during the longest round trip
from this host. A firewall stands at the receiver's end of its downlink.

**How.** Each host is a network namespace with one TUN device; one process (`wire`), a compiled loop, is the network. No
kernel module such as netem is needed, nor `ip netns`: namespaces have no names and go with the last process that holds
them. When the driver ends, however it ends, the wire kills every process in its namespaces and itself; should both be
killed at once, the next network sweeps what is left.

**What it costs.** TCP hands over up to 64 KiB at a time (TSO), so bytes cost little whatever the MTU: 1.25 CPU seconds
a gigabyte carried, that is a fifth of a core for nine hosts sending 200 Mbit/s each, all at once. With loss each packet
travels alone: 2 to 3 times as much at MTU 9000, more at 1500. Starting takes half a second (the very first time seven:
it compiles).

**What differs from a real one.** MTU 9000 as a rule (`mtu=1500` for the headers that real links add: 3 % more bytes).
IPv4, TCP and UDP only. Packets come up to half a millisecond late. A `loss` set only later drops whole large
segments. Queues drop at the tail; there is no cross traffic but yours. Everybody shares this machine's cores: look at
its idle time before you believe a number.
"""

from scenarios.emulator.network.namespace import check_privileges
from scenarios.emulator.network.network import Host, Network, Sums

__all__ = ["Host", "Network", "Sums", "check_privileges"]
