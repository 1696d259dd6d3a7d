"""The Python API: plan, estimate and train on Python objects, with answers that show themselves in a notebook.

Users import these names from `varuna_capslog` itself. The commands do the same work with the same functions of the
rooms below; this room only turns objects into their arguments, and their results into tables and pictures.
"""
