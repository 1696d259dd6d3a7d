"""What a program or a notebook calls: plan, estimate and train on Python objects, with answers that show themselves.

Users import these names from `varuna_capslog` itself. The commands do the same work with the same functions of the
rooms below; this room only turns objects into their arguments, and what they return into tables and pictures.
"""
