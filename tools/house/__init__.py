"""The codemod of the redesign: moves modules into rooms, renames words, adds the pages. See `mapping` and `run.sh`.

`moves` and `renames` change a clean checkout from the tables in `mapping` alone, so both can be run again on a newer
main. `encodings` proves that what travels, and what people type, is unchanged.
"""
