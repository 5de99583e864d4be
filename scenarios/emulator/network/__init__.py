"""A network of emulated hosts: real processes and sockets on emulated links. Needs root, and cleans up after itself.

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
        home.cut()                                            # and may be cut

`Host.popen` takes the arguments of `subprocess.Popen`; other launchers use `preexec_fn=host.enter`. Hosts listen on
`0.0.0.0`, and other hosts reach them at `Host.address`. A host reaches only this network, not even the machine's own
loopback, so talk to its processes through pipes or files.

**The path of a packet.** The uplink of its sender (a rate, and a queue of `queue_ms` with tail drop), the delay between
the two hosts (half the round trip of their regions, plus each host's `delay_ms`), a random loss, and the downlink of
its receiver (a rate and a queue). By default a queue holds one bandwidth-delay product: what the link carries during
the longest round trip from this host. A firewall stands at the receiver's end of its downlink.

**How it works.** Each host is a network namespace with one TUN device. One process with a compiled loop (`wire`) is the
network. It needs neither a kernel module such as netem nor `ip netns`: the namespaces have no names and vanish with the
last process that holds them. However the driver ends, the wire then kills every process in its namespaces and exits. If
driver and wire are both killed at once, the next network kills the processes that are left.

**What it costs.** TCP hands over up to 64 KiB at a time (TSO), so the cost per byte hardly depends on the MTU: 1.25 CPU
seconds per gigabyte carried, which is a fifth of a core for nine hosts that all send 200 Mbit/s at once. With loss each
packet travels alone, which costs 2 to 3 times as much at MTU 9000 and more at 1500. Starting takes half a second, and
seven seconds the very first time, when the loop is compiled.

**How it differs from a real network.** The MTU is 9000 by default (use `mtu=1500` for the headers of real links: 3 %
more bytes). It carries IPv4 with TCP and UDP only. Packets arrive up to half a millisecond late. A `loss` that is set
while the network runs drops whole large segments. Queues drop at the tail, and there is no cross traffic. All hosts
share this machine's cores: check its idle time before you trust a number.
"""

from scenarios.emulator.network.namespace import check_privileges
from scenarios.emulator.network.network import Host, Network, Sums

__all__ = ["Host", "Network", "Sums", "check_privileges"]
