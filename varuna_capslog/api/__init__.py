"""Python API: plan, estimate and train on Python objects, with results that a notebook shows as tables and pictures.
Users import these names from `varuna_capslog`. This room only turns objects into arguments of other rooms, and their
results into tables and pictures.
"""
