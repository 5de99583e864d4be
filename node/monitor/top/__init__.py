"""The page in a terminal: `swarm-node top`.

Modules:

- `draw`: What is drawn: pure functions from a status to lines of text
- `live`: The screen that is kept up to date, its keys and its size
- `panels`: The parts of the picture
- `style`: Colours, bars and figures
"""
