"""The sub-commands of `capslog`: arguments, a call into the library, a table.

`varuna_capslog.cli` collects them. A command decides nothing the library could decide and imports what is slow inside
its body.
"""
