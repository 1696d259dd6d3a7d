"""Python API: plan, estimate and train on Python objects, with answers that show themselves in a notebook. Users import
these names from `varuna_capslog`. This room only turns objects into the arguments of the rooms below, and their results
into tables and pictures.
"""
