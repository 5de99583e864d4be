// A js-libp2p peer, driven by JSON lines on stdin; one JSON line on stdout answers each. `node peer.mjs tls|noise`
import { createInterface } from 'node:readline'
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { gossipsub } from '@libp2p/gossipsub'
import { identify } from '@libp2p/identify'
import { ping } from '@libp2p/ping'
import { tcp } from '@libp2p/tcp'
import { tls } from '@libp2p/tls'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'

const ECHO = '/swarm-node/control/1'
const node = await createLibp2p({
  addresses: { listen: ['/ip4/127.0.0.1/tcp/0'] },
  transports: [tcp()],
  connectionEncrypters: [process.argv[2] === 'tls' ? tls() : noise()],
  streamMuxers: [yamux()],
  services: {
    identify: identify(),
    ping: ping(),
    pubsub: gossipsub({ emitSelf: false, allowPublishToZeroTopicPeers: true })
  }
})
const heard = []
node.services.pubsub.addEventListener('message', (e) => heard.push(new TextDecoder().decode(e.detail.data)))
await node.handle(ECHO, (stream) => {
  stream.addEventListener('message', (e) => stream.send(e.data.subarray()))
  stream.addEventListener('remoteCloseWrite', () => stream.close())
})

let peer // the PeerId that we are connected to
const commands = {
  dial: async ({ address }) => {
    const connection = await node.dial(multiaddr(address))
    peer = connection.remotePeer
    return { encryption: connection.encryption, multiplexer: connection.multiplexer }
  },
  ping: async () => ({ ms: await node.services.ping.ping(peer) }),
  identify: async () => {
    const found = await node.peerStore.get(peer)
    return { protocols: found.protocols, agent: new TextDecoder().decode(found.metadata.get('AgentVersion')) }
  },
  echo: async ({ bytes }) => {
    const stream = await node.dialProtocol(peer, ECHO)
    let got = 0
    let same = true
    const all = new Promise((resolve) => stream.addEventListener('message', (e) => {
      for (const byte of e.data.subarray()) same &&= byte === got++ % 251
      if (got >= bytes) resolve()
    }))
    for (let sent = 0; sent < bytes;) {
      const piece = Uint8Array.from({ length: Math.min(65536, bytes - sent) }, (_, i) => (sent + i) % 251)
      sent += piece.length
      if (!stream.send(piece)) await stream.onDrain()
    }
    await all
    await stream.close()
    return { got, same }
  },
  hangup: async () => { await node.hangUp(peer); return {} },
  subscribe: async ({ topic }) => { node.services.pubsub.subscribe(topic); return {} },
  publish: async ({ topic, text }) => {
    const { recipients } = await node.services.pubsub.publish(topic, new TextEncoder().encode(text))
    return { recipients: recipients.length }
  },
  heard: async () => ({ heard })
}

const say = (answer) => process.stdout.write(JSON.stringify(answer) + '\n')
say({ id: node.peerId.toString(), addresses: node.getMultiaddrs().map(String) })
for await (const line of createInterface({ input: process.stdin })) {
  const command = JSON.parse(line)
  try {
    say(await commands[command.do](command))
  } catch (error) {
    say({ error: String(error?.stack ?? error) })
  }
}
await node.stop()
process.exit(0)
