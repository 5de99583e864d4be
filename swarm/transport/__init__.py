"""How bytes reach a peer: one seam (`base`), two implementations (`libp2p`, `memory`)."""
