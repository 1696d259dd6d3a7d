"""The sub-commands of `capslog`: arguments, a call into the library, a table.

`varuna_capslog.cli` collects them. A command decides nothing that the library could decide, and imports slow modules
inside its body.
"""
