"""The commands, by who types them: thin, and light to import, because `--help` loads them all."""
